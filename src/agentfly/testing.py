"""Public fakes: an engine that plays a script, a renderer without a tokenizer, a small environment.

The engine returns real `Completion`s with ids, log-probs and versions, so all other code runs as with a real model. A script
that has ended raises `EngineError`. One call costs a few microseconds; the overhead benchmark uses it.

    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n      one id per byte; 256, 257: the two marks
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from .errors import ConfigError, EngineError, WorldError
from .faults import FaultSchedule, faulty, kill_worker
from .types import Completion, Extension, Message, Request, Task

__all__ = ["ByteRenderer", "FaultSchedule", "GuessEnv", "ScriptedEngine", "faulty", "kill_worker"]

START_ID, END_ID, PAD_ID = 256, 257, 258
SPECIALS = {START_ID: "<|im_start|>", END_ID: "<|im_end|>", PAD_ID: "<|pad|>"}

Reply = str | list[int] | Completion | Exception


class ByteRenderer:
    """Messages to ids and back, one id per byte plus three specials, laid out like ChatML. Implements `types.Renderer`."""

    vocab_size = 259
    stop_ids: tuple[int, ...] = (END_ID,)

    def __init__(self) -> None:
        self._heads = {role: [START_ID, *f"{role}\n".encode()] for role in ("system", "user", "assistant", "tool")}
        self._tail = [END_ID, *b"\n"]

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of a text. Marks spelled out in a text stay text, so no text can forge a turn."""
        return list(text.encode("utf-8", "replace"))

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        ids: list[int] = []
        if tools:
            self._append(ids, "system", "Tools: " + json.dumps(list(tools)))
        for message in messages:
            self._append(ids, message.role, message.content)
        ids += self._heads["assistant"]
        return ids

    def extend(
        self,
        messages: Sequence[Message],
        num_new: int,
        completion: Completion,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Extension:
        sampled = completion.token_ids
        ids = [10] if sampled and sampled[-1] == END_ID else self._tail.copy()  # close a reply that was cut at max_tokens
        for message in messages[len(messages) - num_new :]:
            self._append(ids, message.role, message.content)
        ids += self._heads["assistant"]
        return Extension(ids)

    def decode(self, ids: Sequence[int]) -> str:
        try:
            return bytes(ids).decode("utf-8", "replace")
        except ValueError:
            return self._decode_marks(ids)

    def _append(self, ids: list[int], role: str, content: str) -> None:
        ids += self._heads[role]
        ids += content.encode("utf-8", "replace")
        ids += self._tail

    def _decode_marks(self, ids: Sequence[int]) -> str:
        parts: list[str] = []
        run = bytearray()
        for token in ids:
            if token < START_ID:
                run.append(token)
                continue
            parts.append(run.decode("utf-8", "replace"))
            run.clear()
            parts.append(SPECIALS[token])
        parts.append(run.decode("utf-8", "replace"))
        return "".join(parts)


class ScriptedEngine:
    """An engine that plays replies instead of sampling them.

    `replies` is a list, played from its start in every session, or a function of the request. A reply is a text (its bytes and
    the end mark become the ids), a list of ids, a `Completion`, or an exception to raise. `max_tokens` and `stop` cut a text as
    they cut a real reply. `logprob` is each token's log-prob, or a function of the ids. With `record`, `requests` keeps a copy
    of every request. Equal texts give the same `Completion` object.
    """

    reads: Literal["ids", "messages"]

    def __init__(
        self,
        replies: Sequence[Reply] | Callable[[Request], Reply],
        *,
        delay_s: float = 0.0,
        logprob: float | Callable[[list[int]], list[float]] = -0.5,
        version: int = 0,
        max_context: int = 1 << 20,
        reads: Literal["ids", "messages"] = "ids",
        record: bool = False,
    ) -> None:
        if isinstance(replies, str):
            raise ConfigError("ScriptedEngine takes a list of replies or a function, not one string")
        self.reads = reads
        self.version = version
        self.max_context = max_context
        self.renderer = ByteRenderer()
        self.requests: list[Request] = []
        self.released: list[str] = []
        self.closed = False
        self._choose = replies if callable(replies) else None
        self._script: Sequence[Reply] = () if callable(replies) else tuple(replies)
        self._delay_s = delay_s
        self._logprob = logprob
        self._record = record
        self._played: dict[str, int] = {}
        self._made: dict[str, Completion] = {}

    async def generate(self, request: Request) -> Completion:
        if self._record:
            self.requests.append(replace(request, prompt_ids=list(request.prompt_ids), messages=tuple(request.messages)))
        if len(request.prompt_ids) >= self.max_context:
            raise EngineError(f"the prompt has {len(request.prompt_ids)} tokens; the context holds {self.max_context}")
        if self._choose is not None:
            reply = self._choose(request)
        else:
            turn = self._played.get(request.session, 0)
            if turn >= len(self._script):
                raise EngineError(
                    f"the script has {len(self._script)} replies, and session {request.session!r} asked for one more"
                )
            self._played[request.session] = turn + 1
            reply = self._script[turn]
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        completion = self._made.get(reply) if type(reply) is str else None
        if completion is None:
            completion = self._complete(reply)
        sampling = request.sampling
        if len(completion.token_ids) > sampling.max_tokens or sampling.stop:
            completion = self._cut(completion, sampling.max_tokens, sampling.stop)
        if request.on_text is not None:
            request.on_text(completion.text)
        return completion

    def publish(self, version: int) -> None:
        """Tag tokens with this version from now on."""
        self.version = version
        self._made.clear()

    def release(self, session: str) -> None:
        self._played.pop(session, None)
        if self._record:
            self.released.append(session)

    async def close(self) -> None:
        self.closed = True

    def _complete(self, reply: Reply) -> Completion:
        if isinstance(reply, Exception):
            raise reply
        if isinstance(reply, Completion):
            return reply
        if isinstance(reply, str):
            if len(self._made) > 4096:  # a function may produce unlimited texts
                self._made.clear()
            ids = [] if self.reads == "messages" else [*self.renderer.encode(reply), END_ID]
            completion = self._made[reply] = self._pack(ids, reply, "stop")
            return completion
        ended = bool(reply) and reply[-1] == END_ID
        return self._pack(reply, self.renderer.decode(reply[:-1] if ended else reply), "stop" if ended else "length")

    def _cut(self, completion: Completion, max_tokens: int, stop: tuple[str, ...]) -> Completion:
        if self.reads == "messages":
            return completion
        text, ids = completion.text, completion.token_ids
        ends = [at + len(word) for word in stop if (at := text.find(word)) >= 0]
        keep = len(text[: min(ends)].encode("utf-8", "replace")) if ends else len(ids)
        if keep >= len(ids) and len(ids) <= max_tokens:
            return completion
        ids = ids[: min(keep, max_tokens)]
        return self._pack(ids, self.renderer.decode(ids), "stop" if ends and keep <= max_tokens else "length")

    def _pack(self, ids: list[int], text: str, stop: Literal["stop", "length"]) -> Completion:
        logprobs = self._logprob(ids) if callable(self._logprob) else [self._logprob] * len(ids)
        return Completion(text=text, token_ids=ids, logprobs=logprobs, versions=[self.version] * len(ids), stop=stop)


class GuessEnv:
    """Guess a number between 1 and `n`. A task's field `secret` is the number; rewards read `solved`."""

    def __init__(self, n: int = 10) -> None:
        self.n = n
        self.secret: int | None = None
        self.num_guesses = 0
        self.solved = False

    def reset(self, task: Task) -> None:
        secret = task.fields.get("secret")
        if not isinstance(secret, int) or not 1 <= secret <= self.n:
            raise ConfigError(f"task {task.id}: the field 'secret' must be a whole number from 1 to {self.n}, not {secret!r}")
        self.secret, self.num_guesses, self.solved = secret, 0, False

    def guess(self, n: int) -> str:
        """Guess the number.

        Args:
            n: your guess
        """
        if self.secret is None:
            raise WorldError("no game is open: call reset first")
        self.num_guesses += 1
        if n == self.secret:
            self.solved = True
            return "correct"
        return "higher" if n < self.secret else "lower"

    def close(self) -> None:
        self.secret = None

    @staticmethod
    def conformance() -> dict[str, Any]:
        """Returns what `check_env` needs: tasks, random actions, a solver and the score."""
        return {
            "tasks": [{"secret": 3}, {"secret": 8}],
            "actions": lambda rng, seen: ("guess", {"n": rng.randint(1, 10)}),
            "solver": lambda env, task: env.guess(task.fields["secret"]),
            "do_nothing": lambda env, task: None,
            "score": lambda env, task: float(env.solved),
        }
