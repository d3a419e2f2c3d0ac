"""Run in the session of a solution, after `apart_wire` as source: does what the tests ask, and answers with data.

What is in this session belongs to the solution, which may have replaced any of it: nothing that is said here is more than an
answer to a question. A request: {"op": "names", "names"}, or {"op": "call" or "get" or "set", "on", "name", "args", "kwargs"}.
An answer: {"v"} or {"e": [type, message]}, with {"changed": {place: value}} for arguments that the call has changed. Long
answers are fetched in parts.
"""

import operator
from typing import Any

from .wire import NotPlain, Speaker, pack, read, unpack, write  # taken out before it is sent: they are there already

OPERATORS = {name: getattr(operator, name) for name in operator.__all__}


class Solution(Speaker):
    def __init__(self) -> None:
        super().__init__()
        self.space: dict[str, Any] = {"__name__": "solution"}
        self.kept: list[Any] = []

    def keep(self, thing: Any) -> int:
        self.kept.append(thing)
        return len(self.kept) - 1

    def load(self, *sources: str) -> None:
        for source in sources:
            exec(compile(source, "<solution>", "exec"), self.space)

    def ask(self, request: str) -> str:
        try:
            return self.say(write(self.answer(read(request))))
        except NotPlain as error:
            return self.say(write({"e": ["TypeError", f"{error} is not plain data"]}))
        except BaseException as error:  # noqa: BLE001 - whatever the solution raises is its answer
            return self.say(write({"e": [type(error).__name__, str(error)[:500]]}))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["op"] == "names":
            known = [name for name in request["names"] if name in self.space]
            return {"v": ["d", *([name, pack(self.space[name], self.keep)] for name in known)]}
        thing = self.kept[request["on"]]
        if request["op"] == "get":
            return {"v": pack(getattr(thing, request["name"]), self.keep)}
        args = [unpack(argument, self.kept.__getitem__) for argument in request["args"]]
        kwargs = {name: unpack(value, self.kept.__getitem__) for name, value in request["kwargs"].items()}
        if request["op"] == "set":
            setattr(thing, request["name"], args[0])
            return {"v": None}
        mutable = {str(place): value for place, value in [*enumerate(args), *kwargs.items()] if _can_change(value)}
        before = {place: pack(value, self.keep) for place, value in mutable.items()}
        method = request["name"]
        if method in OPERATORS:
            result = OPERATORS[method](thing, *args)
        else:
            result = (thing if method is None else getattr(thing, method))(*args, **kwargs)
        answer = {"v": pack(result, self.keep)}
        after = {place: pack(value, self.keep) for place, value in mutable.items()}
        changed = {place: value for place, value in after.items() if value != before[place]}
        return {**answer, "changed": changed} if changed else answer


def _can_change(value: Any) -> bool:
    return hasattr(value, "clear") or hasattr(value, "sort") or type(value).__name__ == "ndarray"


solution = Solution()
