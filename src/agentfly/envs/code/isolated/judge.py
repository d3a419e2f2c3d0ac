"""Runs in the session of the tests, after `plan`: runs the tests with stand-ins for what the solution defines.

`begin` and `reply` return a part of the next message: a request to the solution ("r"), the verdict ("d", {"passed": numbers,
"because"}), or why the tests cannot run isolated ("c", decided before the first request). What comes in is data in the grammar
of `wire`, so `==`, arithmetic and built-in functions are Python's own.
"""

import collections
import importlib
import queue
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

# A session runs `wire`, `forms` and `plan` before this file, so `run.source` removes these lines.
from .forms import ERRORS, READABLE
from .plan import ALIASES, JudgePlan, plan_tests
from .wire import EXTENDED, NotData, NotPlain, PartSender, decode, pack, read, unpack, write

UNARY = ("neg", "pos", "abs", "invert")
ACCESS = ("getitem", "setitem", "delitem")
BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor", "lshift", "rshift",
    "lt", "le", "gt", "ge", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor",
    "ilshift", "irshift",
)  # fmt: skip
MUTABLE: tuple[Any, ...] = (
    list, set, bytearray, collections.deque, collections.OrderedDict, collections.Counter, dict,
)  # fmt: skip


class RemoteObject:
    """Stands for an object of the solution that is not plain data: a function, a class, an instance.

    The tests can call it and use its attributes, items, length, truth, text and iterator. Each is a request without anything
    that the tests expect. It never equals data and has no arithmetic with data: an operator would show the solution the other
    operand. Two objects of the solution are equal if they are the same, or have the same class, which defines `==`, and equal
    attributes.
    """

    __slots__ = ("_remote_judge", "_remote_number")

    def __init__(self, judge: "Judge", number: int) -> None:
        object.__setattr__(self, "_remote_judge", judge)
        object.__setattr__(self, "_remote_number", number)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self._remote_judge.ask("call", self._remote_number, args=args, kwargs=kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("__", "_remote_")) and name not in READABLE:
            raise AttributeError(name)  # numpy and others would take `__array_interface__` and the like at its word
        return self._remote_judge.ask("get", self._remote_number, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._remote_judge.ask("set", self._remote_number, name, (value,))

    def __hash__(self) -> int:
        return int(_typed(self, "hash", int))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemoteObject) and self._remote_judge.same(self._remote_number, other._remote_number)

    def __len__(self) -> int:
        return int(_typed(self, "len", int))

    def __bool__(self) -> bool:
        return bool(_typed(self, "truth", bool))

    def __str__(self) -> str:
        return str(_typed(self, "str", str))

    def __repr__(self) -> str:
        return str(_typed(self, "repr", str))

    def __iter__(self) -> Iterator[Any]:
        return iter(_typed(self, "iter", Iterator))

    def __contains__(self, item: object) -> bool:
        return any(own == item for own in self)  # compares the items here: a solution's __contains__ could always say yes

    def __instancecheck__(self, thing: object) -> bool:
        return isinstance(thing, RemoteObject) and _typed(thing, "isinstance", bool, self)

    def __subclasscheck__(self, thing: object) -> bool:
        return isinstance(thing, RemoteObject) and _typed(thing, "issubclass", bool, self)


def _operate(thing: RemoteObject, name: str, *args: object) -> Any:
    return thing._remote_judge.ask("operator", thing._remote_number, name, args)


def _typed(thing: RemoteObject, name: str, kind: Any, *args: Any) -> Any:
    value = _operate(thing, name, *args)
    if not isinstance(value, kind):
        raise TypeError(f"{name}() of an object of the solution is not a {kind.__name__}")
    return value


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, *args: _operate(self, name, *args)


def _between(name: str) -> Callable[..., Any]:
    def operate(self: RemoteObject, other: object) -> Any:
        if isinstance(other, RemoteObject) and self._remote_judge.plan.operators:
            return _operate(self, name, other)
        return NotImplemented

    return operate


RemoteObject.__doc__ = property(lambda self: self._remote_judge.ask("get", self._remote_number, "__doc__"))  # type: ignore[assignment]
for _name in (*UNARY, *ACCESS):
    setattr(RemoteObject, f"__{_name}__", _forward(_name))
for _name in BINARY:
    setattr(RemoteObject, f"__{_name.rstrip('_')}__", _between(_name))


def _extend(value: object, remote: RemoteObject) -> Any:
    """Returns data that has the other attributes of an object of the solution. Those of the data are Python's own."""
    kind = type(value)
    if kind not in EXTENDED and not hasattr(kind, "_make"):
        return value
    space = {"__getattr__": lambda self, name: getattr(remote, name), "remote": remote}
    extended: Any = type(kind.__name__, (kind,), space)
    return extended._make(value) if hasattr(kind, "_make") else extended(value)


class Judge(PartSender):
    """Runs the tests in a thread, which waits for an answer whenever a test uses the solution."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = JudgePlan(frozenset(), frozenset())
        self.messages: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.objects: dict[int, RemoteObject] = {}
        self.comparing: set[tuple[int, int]] = set()

    def begin(self, prelude: str, tests: list[str]) -> str:
        threading.Thread(target=self.play, args=(prelude, tests), daemon=True).start()
        return self.say(*self.messages.get())

    def reply(self, text: str) -> str:
        self.answers.put(text)
        return self.say(*self.messages.get())

    def play(self, prelude: str, tests: list[str]) -> None:
        passed: list[int] = []
        last = ""
        try:
            warnings.simplefilter("ignore")  # about the code of the tests
            self.plan = plan_tests(prelude, tests)
            if self.plan.cannot:
                self.messages.put(("c", write({"cannot": self.plan.cannot})))
                return
            space: dict[str, Any] = {"__name__": "tests"}
            exec(compile(prelude, "<prelude>", "exec"), space)
            self.fill(space)
            for number, test in enumerate(tests):
                try:
                    exec(compile(test, "<test>", "exec"), space)
                    passed.append(number)
                except BaseException as error:  # noqa: BLE001 - a test that raises anything has not passed
                    last = f"test {number}: {_describe(error)}"
        except BaseException as error:  # noqa: BLE001 - an exception in this thread must become an answer
            passed, last = [], _describe(error)
        self.messages.put(("d", write({"passed": passed, "because": last})))

    def fill(self, space: dict[str, Any]) -> None:
        """Binds the names that the tests read. Modules are imported here, even if the solution has something of that name."""
        for name in sorted(self.plan.modules):
            try:
                space[name] = importlib.import_module(ALIASES.get(name, name))
            except ImportError:
                continue
        for name in self.plan.seeds:
            self.share_seed(importlib.import_module(name))
        if self.plan.names:
            values = self.ask("names", names=sorted(self.plan.names))
            if type(values) is not dict:
                raise TypeError("the solution's answer is not data: the names are not a dict")
            space.update({name: values[name] for name in self.plan.names if name in values})

    def share_seed(self, module: Any) -> None:
        """Lets the tests seed the solution's generator with their own. Neither session sees what the other draws."""
        own = module.seed

        def seed(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            self.ask("seed", name=module.__name__, args=args, kwargs=kwargs)

        module.seed = seed

    def ask(self, op: str, on: int = 0, name: str | None = None, args: Any = (), kwargs: Any = None, names: Any = ()) -> Any:
        """Returns the solution's answer as data. Raises what the solution raised, or TypeError for anything else."""
        kwargs = kwargs or {}
        try:
            request = write({
                "op": op, "on": on, "name": name, "names": names, "args": [pack(value, _own) for value in args],
                "kwargs": {key: pack(value, _own) for key, value in kwargs.items()},
            })  # fmt: skip
        except (NotPlain, RecursionError) as why:
            raise TypeError(f"{why} cannot be handed to the solution") from None
        self.messages.put(("r", request))
        try:
            answer = read(decode(self.answers.get()))
            if set(answer) == {"e"}:
                kinds, message = answer["e"]
                if type(kinds) is not list or not kinds or {type(message), *map(type, kinds)} != {str}:
                    raise NotData("an error is not names and a text")
            elif set(answer) - {"changed"} == {"v"}:
                value = self.unpack(answer["v"])
                self.apply(answer.get("changed", []), {**dict(enumerate(args)), **kwargs})
                return value
            else:
                raise NotData("the keys are not those of an answer")
        except (ValueError, TypeError) as error:
            raise TypeError(f"the solution's answer is not data: {error}"[:500]) from None
        kind_of_error = next((ERRORS[kind] for kind in kinds if kind in ERRORS and kind != "Exception"), None)
        raise kind_of_error(message) if kind_of_error else RuntimeError(f"{kinds[0]}: {message}"[:500])

    def unpack(self, tree: object) -> Any:
        return unpack(tree, self.remote, _stream, self.plan.arrays, _extend)

    def remote(self, number: int) -> RemoteObject:
        """Returns the one stand-in of an object, so that `is` works."""
        return self.objects.setdefault(number, RemoteObject(self, number))

    def apply(self, changed: Any, places: dict[Any, Any]) -> None:
        """Applies to the arguments the changes that the call made to its copies. Checks all of them before the first."""
        changes = [(place, self.unpack(tree)) for place, tree in changed]
        for place, value in changes:
            argument = places.get(place) if type(place) in (int, str) else None
            if _mutable(argument) is None or _mutable(argument) is not _mutable(value):
                raise NotData("an argument cannot have changed like that")
        for place, value in changes:
            _update(places[place], value)

    def same(self, one: int, other: int) -> bool:
        """Whether two objects of the solution are equal. Compares their attributes here: `==` of a solution could always say
        yes."""
        if one == other or (one, other) in self.comparing:  # objects that refer to each other
            return True
        self.comparing.add((one, other))
        try:
            states = [self.ask("state", number) for number in (one, other)]
            if not all(type(state) is tuple and len(state) == 2 and type(state[1]) is dict for state in states):
                return False
            (kind, own), (other_kind, others) = states
            return isinstance(kind, RemoteObject) and isinstance(other_kind, RemoteObject) and (
                kind._remote_number == other_kind._remote_number and own == others
            )  # fmt: skip
        finally:
            self.comparing.discard((one, other))


def _own(thing: object) -> int:
    if isinstance(thing, RemoteObject):
        return int(thing._remote_number)
    raise NotPlain(f"a {type(thing).__name__}")


def _stream(source: RemoteObject) -> Iterator[Any]:
    """Yields the items of an iterator of the solution, one request each."""
    while True:
        try:
            yield _operate(source, "next")
        except RuntimeError as error:
            if str(error).startswith("StopIteration:"):
                return
            raise


def _mutable(value: object) -> Any:
    """Returns the type of data that a call can change in place, or None."""
    if type(value).__name__ == "ndarray":
        return type(value)
    return next((kind for kind in MUTABLE if isinstance(value, kind)), None)


def _update(argument: Any, value: Any) -> None:
    if isinstance(argument, list | bytearray):
        argument[:] = value
    elif hasattr(argument, "clear"):
        argument.clear()
        (argument.extend if hasattr(argument, "extend") else argument.update)(value)
    else:
        argument[...] = value


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:500]
    except BaseException:  # noqa: BLE001 - the text may hold an object of the solution, which is asked for its text
        return type(error).__name__


judge = Judge()
