"""Runs in the session of the solution, after `wire`: does what a request asks for and answers with data.

    request   {"op": "names", "names"}, or {"op": "call" | "get" | "set", "on", "name", "args", "kwargs"}
    answer    {"v": value, "changed": {place: value}} or {"e": [type, message]}; "changed" holds arguments that the call changed

The solution shares this session and may have replaced any of it, so an answer counts as nothing more than an answer.
"""

import operator
from typing import Any

# A session runs `wire` before this file, so `run.source` removes this line.
from .wire import NotPlain, PartSender, pack, read, unpack, write

OPERATORS = {name: getattr(operator, name) for name in operator.__all__}


class Solution(PartSender):
    """The solution's namespace, and the objects that the judge knows by number."""

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
        except BaseException as error:  # noqa: BLE001 - what the solution raises is its answer
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
