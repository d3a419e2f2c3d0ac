"""Runs in the session of the solution, after `wire`: does what a request asks for and answers with data.

    request   {"op", "on", "name", "names", "args", "kwargs"}; "on" is the number of an object
      names     the values of these global names      state     class and attributes of an object with `==`
      call      calls an object                       operator  a function of the module `operator`, or `iter`, `next`, ...
      get, set  an attribute                            seed      a generator of random numbers, as the tests seed theirs
    answer    {"v": value, "changed": [[place, value], ...]} or {"e": [types, message]}; "changed" holds arguments that the call
              changed, by position or name

The solution shares this session and may have replaced any of it, so an answer counts as nothing more than an answer.
"""

import collections
import importlib
import operator
from typing import Any

# A session runs `wire` before this file, so `run.source` removes this line.
from .wire import NotPlain, PartSender, decode, pack, read, unpack, write

OPERATORS: dict[str, Any] = {name: getattr(operator, name) for name in operator.__all__}
OPERATORS.update({
    "iter": lambda thing: (item for item in thing),
    "next": next, "str": str, "repr": repr, "len": len, "hash": hash, "isinstance": isinstance, "issubclass": issubclass,
})  # fmt: skip
DATA = (int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, collections.deque)


class Solution(PartSender):
    """The solution's namespace, and the objects that the judge knows by number. An object has one number."""

    def __init__(self) -> None:
        super().__init__()
        self.space: dict[str, Any] = {"__name__": "solution"}
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}  # id -> number

    def keep(self, thing: object) -> int:
        if id(thing) not in self.numbers:
            self.numbers[id(thing)] = len(self.kept)
            self.kept.append(thing)
        return self.numbers[id(thing)]

    def load(self, *sources: str) -> None:
        for source in sources:
            exec(compile(source, "<solution>", "exec"), self.space)

    def ask(self, request: str) -> str:
        try:
            return self.say("a", write(self.answer(read(decode(request)))))
        except NotPlain as error:
            return self.say("a", write({"e": [["TypeError"], f"{error} is not plain data"]}))
        except BaseException as error:  # noqa: BLE001 - what the solution raises is its answer
            key = isinstance(error, KeyError) and len(error.args) == 1 and isinstance(error.args[0], str)
            kinds = [kind.__name__ for kind in type(error).__mro__][:20]
            return self.say("a", write({"e": [kinds, str(error.args[0] if key else error)[:500]]}))

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        op, name = request["op"], request["name"]
        if op == "names":
            names = [name for name in request["names"] if name in self.space]
            return {"v": ["d", *([name, pack(self.space[name], self.keep)] for name in names)]}
        if op == "seed":
            importlib.import_module(name).seed(*map(unpack, request["args"], [self.kept.__getitem__] * len(request["args"])))
            return {"v": None}
        thing = self.kept[request["on"]]
        if op == "state":
            return {"v": ["t", ["o", self.keep(type(thing))], pack(_state(thing), self.keep)]}
        if op == "get":
            return {"v": pack(getattr(thing, name), self.keep)}
        args = [unpack(argument, self.kept.__getitem__) for argument in request["args"]]
        kwargs = {key: unpack(value, self.kept.__getitem__) for key, value in request["kwargs"].items()}
        if op == "set":
            setattr(thing, name, args[0])
            return {"v": None}
        mutable = {place: value for place, value in [*enumerate(args), *kwargs.items()] if _can_change(value)}
        before = {place: pack(value, self.keep) for place, value in mutable.items()}
        result = OPERATORS[name](thing, *args) if op == "operator" else thing(*args, **kwargs)
        # An instance of a subclass of `list` or the like keeps its own methods where the tests construct it.
        constructed = isinstance(thing, type) and type(result).__module__ == self.space["__name__"]
        answer = {"v": ["o", self.keep(result)] if constructed else pack(result, self.keep)}
        after = {place: pack(value, self.keep) for place, value in mutable.items()}
        changed = [[place, value] for place, value in after.items() if value != before[place]]
        return {**answer, "changed": changed} if changed else answer


def _state(thing: object) -> dict[str, Any] | None:
    """Returns the attributes of an object, or None if its class has no `==`."""
    default: object = object.__eq__
    if isinstance(thing, type) or type(thing).__eq__ is default:
        return None
    data = [thing] if isinstance(thing, DATA) else []
    slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(thing, name)]
    return {**getattr(thing, "__dict__", {}), **{name: getattr(thing, name) for name in slots}, "": data}


def _can_change(value: object) -> bool:
    return hasattr(value, "clear") or hasattr(value, "sort") or type(value).__name__ == "ndarray"


solution = Solution()
