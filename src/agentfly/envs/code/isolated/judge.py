"""Run in the session of the tests, after `apart_wire` as source: plays the tests with stand-ins for what the solution defines.

The tests run in a thread, which waits whenever they call the solution: `begin` and `reply` give the next request to ask the
solution, or at the end {"passed": [numbers]} or {"cannot": why}, which is up to the tests alone. No code of the solution comes
in here, only data, so `==` and the built-in functions are Python's own. An object of the solution that is not plain data is a
`Remote`: its methods can be called, but it equals no data, whatever it says of itself.
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

from .wire import NotPlain, Speaker, pack, read, unpack, write  # taken out before it is sent: they are there already

ALIASES = {"np": "numpy", "pd": "pandas", "plt": "matplotlib.pyplot"}
FORWARDED = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift", "neg", "pos",
    "abs", "invert", "getitem", "setitem", "delitem", "iadd", "isub", "imul",
)  # fmt: skip
COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")


class CannotSplit(BaseException):
    """Not an error of a test, which must not catch it."""


class Remote:
    """Something that the solution has and that is not plain data: a function, a class, an object."""

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
        return any(own == item for own in self)  # what it contains, not what it says it does


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args: self._method(name, *args)


def _compare(name: str) -> Callable[..., Any]:
    def compare(self: Remote, other: Any) -> Any:
        if isinstance(other, Remote):
            return self._method(name, other)
        if name in ("eq", "ne"):
            return name == "ne"
        raise TypeError("an object of the solution cannot be compared with data")

    return compare


for _name in FORWARDED:
    setattr(Remote, f"__{_name.rstrip('_')}__", _forward(_name))
for _name in COMPARED:
    setattr(Remote, f"__{_name}__", _compare(_name))


def asked_names(tests: list[str]) -> tuple[set[str], set[str]]:
    """The global names that the tests read, and those that they set themselves."""
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


class Judge(Speaker):
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
            warnings.simplefilter("ignore")  # not ours
            space: dict[str, Any] = {"__name__": "tests"}
            exec(compile(prelude, "<prelude>", "exec"), space)
            self.fill(space, tests)
            for number, test in enumerate(tests):
                try:
                    exec(compile(test, "<test>", "exec"), space)
                    passed.append(number)
                except CannotSplit:
                    raise
                except BaseException as error:  # noqa: BLE001 - a test that raises anything has not passed
                    last = f"test {number}: {type(error).__name__}: {error}"[:500]
            self.requests.put(write({"passed": passed, "because": last}))
        except CannotSplit as why:
            self.requests.put(write({"cannot": str(why)}))
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to
            self.requests.put(write({"passed": [], "because": f"{type(error).__name__}: {error}"[:500]}))

    def fill(self, space: dict[str, Any], tests: list[str]) -> None:
        """Modules are our own, whatever the solution calls so; the rest comes from the solution, built-in names only where the
        tests ask for nothing else."""
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
        except (NotPlain, RecursionError) as why:  # the solution may have had a hand in it, so it is no reason not to split
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

    def remote(self, number: int) -> Remote:
        return Remote(self.ask, int(number))

    @staticmethod
    def own(thing: Any) -> int:
        if isinstance(thing, Remote):
            return int(thing._number)
        if isinstance(thing, BaseException):
            raise TypeError("an exception cannot be handed to the solution")
        raise CannotSplit(f"the tests hand a {type(thing).__name__} to the solution")


def _update(argument: Any, value: Any) -> None:
    """Make an argument what the call has made of it."""
    if isinstance(argument, list | bytearray):
        argument[:] = value
    elif hasattr(argument, "clear"):
        argument.clear()
        (argument.extend if hasattr(argument, "extend") else argument.update)(value)
    else:
        argument[...] = value


judge = Judge()
