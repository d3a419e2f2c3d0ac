"""The training rows of a chain: which turns each row has, and what the engine read before each reply.

A new row begins where a request does not go on with what the model has read and sampled before. Rows need not be consecutive:

    turn  row  why            context  sampled
     0     0   first          P        A
     1     1   first          S        B              a sub-agent, while the first row waits
     2     0                  R        C        ->    row 1: [S B], row 0: [P A R C]
     3     2   history cut    Q        D        ->    row 2: [Q D]
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from .types import Completion, Extension, Message, RowReason, Trajectory, Turn


def row_numbers(turns: Sequence[Turn]) -> list[int]:
    """The row of each turn. Turns that were recorded before rows had numbers are in consecutive rows."""
    numbers: list[int] = []
    for turn in turns:
        if turn.row is not None:
            numbers.append(turn.row)
        elif turn.restarts or not numbers:
            numbers.append(1 + max(numbers, default=-1))
        else:
            numbers.append(numbers[-1])
    return numbers


def rows_of(chain: Trajectory) -> list[list[int]]:
    """The indices of the turns of each row, the rows in the order of their last turns. The row that ended the chain is last.

    This is the order of training rows, and of values per sampled token.
    """
    rows: dict[int, list[int]] = {}
    for index, number in enumerate(row_numbers(chain.turns)):
        own = rows.pop(number, [])
        own.append(index)
        rows[number] = own
    if chain.final_row in rows:
        rows[chain.final_row] = rows.pop(chain.final_row)
    return list(rows.values())


def turns_by_row(chain: Trajectory) -> list[Turn]:
    """The turns of a chain, row by row."""
    return [chain.turns[index] for row in rows_of(chain) for index in row]


def is_one_conversation(chain: Trajectory) -> bool:
    """Whether each reply of a chain followed the messages that stand before it in the record of the chain."""
    begun = [turn.why for turn in chain.turns if turn.why not in ("", "template restarts")]
    return begun in ([], ["first"])


def digest_of(ids: Sequence[int], before: int = 0) -> int:
    """A checksum of token ids; -1, which no ids have, if one is no integer of 64 bits. `before` is that of the ids before."""
    try:
        return zlib.crc32(struct.pack(f"<{len(ids)}q", *ids), before)
    except struct.error:
        return -1


class Aside(list[Message]):
    """What `agent.rewrite` returns to ask the model something itself: the reply is not parsed, the next `rewrite` reads it."""


@dataclass(slots=True)
class OpenRow:
    """A row whose next turn is being played.

    `prompt` are the ids of the next request, of which `new_ids` follow the last reply. `why` says why the row began, until its
    first turn is made. `prefix` are the messages with which an agent replaced those before `since` (None: it did not). A row
    `asks` if the agent reads the next reply itself, in `rewrite`.
    """

    number: int
    session: str
    prompt: list[int]
    new_ids: list[int]
    why: RowReason = ""
    prefix: list[Message] | None = None
    since: int = 0
    asks: bool = False
    _digest: int = field(default=0, init=False)
    _digested: int = field(default=0, init=False)

    @classmethod
    def begin(
        cls, session: str, number: int, ids: Sequence[int], why: RowReason, prefix: list[Message] | None = None, since: int = 0
    ) -> OpenRow:
        """A row whose first request reads `ids`. Rows that take turns have sessions of their own."""
        return cls(number, session, list(ids), list(ids), why, prefix, since)

    @classmethod
    def resume(cls, chain: Trajectory, before: OpenRow | None = None) -> OpenRow:
        """The row of a chain's last turn, or its first row. `before` is an earlier state of it, which knows its `prefix`."""
        numbers = row_numbers(chain.turns) or [0]
        row = cls.begin(chain.id, numbers[-1], [], "" if chain.turns else "first")
        for number, turn in zip(numbers, chain.turns, strict=False):
            if number == numbers[-1]:
                row.prompt += turn.context_ids
                row.prompt += turn.completion.token_ids
        if before is not None and before.number == row.number:
            row.prefix, row.since = before.prefix, before.since
        return row

    def history(self, messages: list[Message]) -> list[Message]:
        """The messages of the next request; `messages` are all of the chain."""
        return messages if self.prefix is None else [*self.prefix, *messages[self.since :]]

    def extend(self, extension: Extension) -> OpenRow:
        """The row with what follows its last reply, or the new row if the template rewrites history."""
        if extension.restarts:
            return OpenRow.begin(self.session, self.number + 1, extension.ids, "template restarts", self.prefix, self.since)
        self.new_ids = extension.ids
        self.prompt += extension.ids
        return self

    def turn(self, completion: Completion, *, sampled_s: float = 0.0, began_s: float = 0.0, state: str = "") -> Turn:
        """The turn of a reply to the prompt. Does not add the reply to the prompt."""
        self._digest = digest_of(self.prompt[self._digested :], self._digest)
        self._digested = len(self.prompt)
        return Turn(
            self.new_ids, bool(self.why), completion, sampled_s=sampled_s, began_s=began_s, state=state, row=self.number,
            why=self.why, prompt_digest=self._digest,
        )  # fmt: skip

    def reply(self, ids: Sequence[int]) -> None:
        """Add the sampled ids."""
        self.prompt += ids
        self.why = ""
