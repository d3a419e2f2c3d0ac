"""Runs in the session of the tests, after `wire`: runs the tests with stand-ins for what the solution defines.

`begin` and `reply` return the next request to the solution, or at the end {"passed": [numbers], "because"} or {"cannot":
reason}. No code of the solution comes in here, only data, so `==` and built-in functions are Python's own.
"""

import builtins
import importlib
import queue
import symtable
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

# A session runs `wire` before this file, so `run.source` removes this line.
from .wire import NotPlain, PartSender, pack, read, unpack, write

ALIASES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot"}
FORWARDED = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift", "neg", "pos",
    "abs", "invert", "getitem", "setitem", "delitem", "iadd", "isub", "imul",
)  # fmt: skip
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


class CannotIsolate(BaseException):
    """The tests hand over what is not data. A BaseException, so that `except Exception` in a test does not catch it."""


class RemoteObject:
    """Stands for an object of the solution that is not plain data: a function, a class, an instance."""

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        self.__dict__.update(_ask=ask, _number=number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._ask("call", self._number, None, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return self._ask("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", self._number, name, (value,))

    def __hash__(self) -> int:
        return hash(self._number)

    def _method(self, name: str, *args: Any) -> Any:
        return self._ask("call", self._number, name, args)

    def __len__(self) -> int:
        return int(self._method("__len__"))

    def __bool__(self) -> bool:
        return bool(self._method("truth"))

    def __str__(self) -> str:
        return str(self._method("__str__"))

    def __repr__(self) -> str:
        return str(self._method("__repr__"))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._method("__iter__"))

    def __contains__(self, item: object) -> bool:
        return any(own == item for own in self)  # compares the items here: a solution's __contains__ could always say yes


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._method(name, *args)


def _compare(name: str) -> Callable[..., Any]:
    def compare(self: RemoteObject, other: Any) -> Any:
        if isinstance(other, RemoteObject):
            return self._method(name, other)
        if name in ("eq", "ne"):
            return name == "ne"  # never equal to data: a solution's __eq__ could always say yes
        raise TypeError("an object of the solution cannot be compared with data")

    return compare


for _name in FORWARDED:
    setattr(RemoteObject, f"__{_name.rstrip('_')}__", _forward(_name))
for _name in COMPARED:
    setattr(RemoteObject, f"__{_name}__", _compare(_name))


def asked_names(tests: list[str]) -> tuple[set[str], set[str]]:
    """Returns the global names that the tests read, and those that they set themselves."""
    reads: set[str] = set()
    sets: set[str] = set()

    def look(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                reads.add(symbol.get_name())
            if top and (symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()):
                sets.add(symbol.get_name())
        for child in table.get_children():
            look(child, False)

    for test in tests:
        look(symtable.symtable(test, "<test>", "exec"), True)
    return reads, sets


class Judge(PartSender):
    """Runs the tests in a thread, which waits for an answer whenever a test uses the solution."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()

    def begin(self, prelude: str, tests: list[str]) -> str:
        threading.Thread(target=self.play, args=(prelude, tests), daemon=True).start()
        return self.say(self.requests.get())

    def reply(self, text: str) -> str:
        self.answers.put(text)
        return self.say(self.requests.get())

    def play(self, prelude: str, tests: list[str]) -> None:
        passed: list[int] = []
        last = ""
        try:
            warnings.simplefilter("ignore")  # about the code of the tests
            space: dict[str, Any] = {"__name__": "tests"}
            exec(compile(prelude, "<prelude>", "exec"), space)
            self.fill(space, tests)
            for number, test in enumerate(tests):
                try:
                    exec(compile(test, "<test>", "exec"), space)
                    passed.append(number)
                except CannotIsolate:
                    raise
                except BaseException as error:  # noqa: BLE001 - a test that raises anything has not passed
                    last = f"test {number}: {type(error).__name__}: {error}"[:500]
            self.requests.put(write({"passed": passed, "because": last}))
        except CannotIsolate as why:
            self.requests.put(write({"cannot": str(why)}))
        except BaseException as error:  # noqa: BLE001 - an exception in this thread must become an answer
            self.requests.put(write({"passed": [], "because": f"{type(error).__name__}: {error}"[:500]}))

    def fill(self, space: dict[str, Any], tests: list[str]) -> None:
        """Binds the names that the tests read. Modules are imported here, even if the solution has something of that name. The
        other names come from the solution; names of built-ins do so only if the tests read no other name."""
        reads, sets = asked_names(tests)
        wanted = reads - sets - set(space)
        for name in sorted(wanted):
            if name in sys.stdlib_module_names or name in ALIASES:
                try:
                    space[name] = importlib.import_module(ALIASES.get(name, name))
                except ImportError:
                    continue
        wanted -= set(space)
        names = {name for name in wanted if not hasattr(builtins, name)} or wanted
        if names:
            found = self.ask("names", names=sorted(names))
            space.update({name: value for name, value in found.items() if name in names})

    def ask(self, op: str, on: int = 0, name: str | None = None, args: Any = (), kwargs: Any = None, names: Any = ()) -> Any:
        kwargs = kwargs or {}
        try:
            request = write({
                "op": op, "on": on, "name": name, "names": names, "args": [pack(value, self.own) for value in args],
                "kwargs": {key: pack(value, self.own) for key, value in kwargs.items()},
            })  # fmt: skip
        except (NotPlain, RecursionError) as why:  # not CannotIsolate: the value may come from the solution
            raise TypeError(f"{why} cannot be handed to the solution") from None
        self.requests.put(request)
        try:
            answer = read(self.answers.get())
            if "e" in answer:
                kind, message = map(str, answer["e"])
            else:
                for place, value in answer.get("changed", {}).items():
                    _update(kwargs[place] if place in kwargs else args[int(place)], unpack(value, self.remote))
                return unpack(answer["v"], self.remote)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
            raise TypeError(f"the solution's answer is not data: {error}") from None
        known = getattr(builtins, kind, None)
        ordinary = isinstance(known, type) and issubclass(known, Exception) and not issubclass(known, UnicodeError)
        raise known(message) if ordinary else RuntimeError(f"{kind}: {message}")  # type: ignore[misc]

    def remote(self, number: int) -> RemoteObject:
        return RemoteObject(self.ask, int(number))

    @staticmethod
    def own(thing: Any) -> int:
        if isinstance(thing, RemoteObject):
            return int(thing._number)
        if isinstance(thing, BaseException):
            raise TypeError("an exception cannot be handed to the solution")
        raise CannotIsolate(f"the tests hand a {type(thing).__name__} to the solution")


def _update(argument: Any, value: Any) -> None:
    """Applies to an argument the change that the call made to its copy."""
    if isinstance(argument, list | bytearray):
        argument[:] = value
    elif hasattr(argument, "clear"):
        argument.clear()
        (argument.extend if hasattr(argument, "extend") else argument.update)(value)
    else:
        argument[...] = value


judge = Judge()
