"""Values to bytes and back: MessagePack with three extension types, for the wire and for the store. No pickle.

    None, bool, int, float, str, bytes, list, dict    as MessagePack writes them
    TUPLE       ext 1: the items
    WIDE_INT    ext 2: an integer of more than 64 bits, in hexadecimal
    RECORD      ext 3: [name of a dataclass, its field values...]

A record is a dataclass that `register` knows; reading never imports or calls anything else. msgpack falls back to pure
Python, so a worker that has no compiled packages (another Python inside a container) reads the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from .errors import InvariantError
from .types import SANDBOX_LIMITS, Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn

TUPLE, WIDE_INT, RECORD = 1, 2, 3
MAX_EXTENSIONS = 50
"""Levels of extensions inside each other. Each level of reading takes 40 KiB of the C stack: a few hundred would crash."""
_SCALARS = frozenset((str, int, float, bool, type(None), bytes))
_names: dict[type, str] = {}
_records: dict[str, tuple[type, tuple[str, ...], Callable[[Any], None] | None]] = {}


class NotEncodable(TypeError):
    """A value has no encoded form; the sentence names its type."""


class NotDecodable(ValueError):
    """Bytes that `encode` did not write, or a record that its check refuses."""


def register(cls: type, check: Callable[[Any], None] | None = None) -> None:
    """Let instances of a dataclass be encoded. `check(instance)` runs after decoding; it raises ValueError for bad values."""
    _names[cls] = cls.__name__
    _records[cls.__name__] = (cls, tuple(each.name for each in fields(cls)), check)


def encode(value: object) -> bytes:
    """Raises `NotEncodable` for a value that is not listed above, or is nested more than about 500 levels deep, or more than
    MAX_EXTENSIONS levels of tuples and records.
    """
    return _encode(value, 0)


def _encode(value: object, level: int) -> bytes:
    import msgpack

    extend = _extend if level == 0 else partial(_extend, level=level)
    try:
        data: bytes = msgpack.packb(value, default=extend, strict_types=True, unicode_errors="surrogatepass")
    except NotEncodable:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise NotEncodable(f"it has no encoded form: {error}") from None
    return data


def check_keys(value: Any) -> None:
    """Raises `NotEncodable` if a dict has a key that is not a string: `decode` refuses those unless `any_keys` is set."""
    kind = type(value)
    if kind is list or kind is tuple:
        for item in value:
            if type(item) not in _SCALARS:
                check_keys(item)
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise NotEncodable(f"the key {key!r} of a dict is not a string")
            if type(item) not in _SCALARS:
                check_keys(item)
    elif kind in _names:
        for name in _records[_names[kind]][1]:
            item = getattr(value, name)
            if type(item) not in _SCALARS:
                check_keys(item)


def decode(data: bytes | bytearray | memoryview, *, any_keys: bool = False) -> Any:
    """Raises `NotDecodable`.

    Integer keys can be chosen so that they collide in a dict, which makes building it quadratic. `any_keys` is therefore for
    bytes that this machine has stored, not for those of a peer.
    """
    return _decode(data, any_keys, 0)


def check_values(data: bytes | bytearray, most: int) -> None:
    """Raises `NotDecodable` if the bytes hold more than `most` values. Reads their headers and builds nothing: an empty list
    is one byte here and 64 bytes once it is decoded."""
    place, size, count = 0, len(data), 0
    if size <= most:
        return  # a value takes at least one byte
    while place < size:
        count += 1
        if count > most:
            raise NotDecodable(f"it holds more than {most} values")
        head = data[place]
        step = _STEPS[head]
        if step < 0:  # the length is in the next 1, 2 or 4 bytes; -step is how many
            after = place + 1 - step
            step = after - place + int.from_bytes(data[place + 1 : after])
            if 0xC7 <= head <= 0xC9:  # an extension: its values, other than the digits of an integer, count as well
                step = step + 1 if data[after : after + 1] == _WIDE_INT_CODE else after + 1 - place
        place += step


def _steps() -> list[int]:
    """Returns for each first byte of a value how many bytes lead to the next value, those of a list or dict being next."""
    steps = [1] * 256
    for head in range(0xA0, 0xC0):  # short strings
        steps[head] = 1 + (head & 31)
    fixed = {0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9}
    lists = {0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5}
    short_extensions = dict.fromkeys(range(0xD4, 0xD9), 2)
    sized = {0xC4: -1, 0xC5: -2, 0xC6: -4, 0xC7: -1, 0xC8: -2, 0xC9: -4, 0xD9: -1, 0xDA: -2, 0xDB: -4}
    for head, step in {**fixed, **lists, **short_extensions, **sized}.items():
        steps[head] = step
    return steps


_STEPS = _steps()
_WIDE_INT_CODE = bytes([WIDE_INT])


def _decode(data: bytes | bytearray | memoryview, any_keys: bool, level: int) -> Any:
    import msgpack

    read = partial(_read, any_keys=any_keys, level=level + 1)
    try:
        return msgpack.unpackb(data, ext_hook=read, strict_map_key=not any_keys, unicode_errors="surrogatepass")
    except NotDecodable:
        raise
    except (ValueError, TypeError, RecursionError, InvariantError, msgpack.UnpackException) as error:
        raise NotDecodable(f"{type(error).__name__}: {error}") from None


def _extend(value: Any, level: int = 0) -> Any:
    """What msgpack calls for each value that it cannot write. `strict_types` sends tuples and subclasses here, too."""
    import msgpack

    kind = type(value)
    if level == MAX_EXTENSIONS:
        raise NotEncodable("it is nested too deeply")
    if kind is tuple:
        return msgpack.ExtType(TUPLE, _encode(list(value), level + 1))
    name = _names.get(kind)
    if name is not None:
        return msgpack.ExtType(RECORD, _encode([name, *(getattr(value, each) for each in _records[name][1])], level + 1))
    if kind is int:
        return msgpack.ExtType(WIDE_INT, hex(value).encode())
    if isinstance(value, Outcome):
        return value.value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a scalar of numpy or torch
        return value.item()
    raise NotEncodable(f"a {kind.__name__} has no encoded form")


def _read(code: int, data: bytes, any_keys: bool, level: int) -> Any:
    if level > MAX_EXTENSIONS:
        raise NotDecodable("it is nested too deeply")
    if code == TUPLE:
        return tuple(_decode(data, any_keys, level))
    if code == WIDE_INT:
        return int(data, 16)
    if code != RECORD:
        raise NotDecodable(f"unknown extension {code}")
    name, *values = _decode(data, any_keys, level)
    if not isinstance(name, str) or name not in _records:
        raise NotDecodable(f"unknown record {name!r}")
    cls, names, check = _records[name]
    # A record that an older version wrote has fewer fields: new ones are added at the end, with defaults.
    if len(values) > len(names):
        raise NotDecodable(f"a {name} with {len(values)} fields; it has {len(names)}")
    try:
        value = cls(**dict(zip(names, values, strict=False)))
        if check is not None:
            check(value)
    except Exception as error:  # noqa: BLE001 - a record of forged values may fail anywhere in its own checks
        raise NotDecodable(f"a {name} that cannot be read: {error}") from None
    return value


def _check_result(result: ToolResult) -> None:
    if not isinstance(result.observation, str) or not isinstance(result.done, bool):
        raise NotDecodable("a ToolResult whose observation is not text, or whose `done` is not a bool")
    if result.reward is not None and (isinstance(result.reward, bool) or not isinstance(result.reward, int | float)):
        raise NotDecodable("a ToolResult whose reward is not a number")
    if result.limit is not None and result.limit not in SANDBOX_LIMITS:
        raise NotDecodable("a ToolResult whose limit is not one of a sandbox")


def _check_trajectory(trajectory: Trajectory) -> None:
    trajectory.outcome = Outcome(trajectory.outcome)  # written as its text


for _cls in (ToolCall, Message, Task, Completion, Turn):
    register(_cls)
register(ToolResult, _check_result)
register(Trajectory, _check_trajectory)
