"""One demonstration: messages, and which of the replies are to be learnt. The dialogues themselves are made elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["good", "mixed"]
# What is said before an answer that nobody worked out.
GUESSES = ("I know this", "easy", "that is it")


@dataclass(slots=True)
class Demo:
    """`learn[i]` says whether the i-th assistant message is learnt; `solved` whether the last answer is right."""

    messages: list[dict[str, str]]
    schemas: list[dict[str, Any]] = field(default_factory=list)
    learn: list[bool] = field(default_factory=list)
    solved: bool = True
    kind: str = ""

    def reply(self, text: str, learn: bool = True) -> None:
        self.messages.append({"role": "assistant", "content": text})
        self.learn.append(learn)
