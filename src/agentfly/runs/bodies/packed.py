"""The format of a stored trajectory, number 3: small, and cheap to write while chains run.

    1 byte    4 bytes             zlib (level 1)             not compressed: zlib would take most of the time to save a fifth
    3         size of records     records in MessagePack     token ids, log-probs and versions of all turns, packed

A record is the list of its field values, in the order of its dataclass; a new field is added at the end, with a default. In
place of a list of numbers a record holds `8 * count + kind`:

    H i q     integers of 16 (unsigned), 32 or 64 bits: the smallest that holds all. A list with a larger one stays a list.
    =         one integer of 64 bits that fills the list, as the versions of a reply
    f d       log-probs as float32 if those are their exact values, else as float64

`agentfly.codec` writes what fields and arguments hold. The bytes are little-endian.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter, index
from typing import Any

from ... import codec
from ...types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn
from .opaque import is_plain, left_out, simplify

MARK = b"\x03"
"""The first byte. A zlib stream never begins with it."""
MAX_SAME = 1 << 24
MAX_RECORDS = 256 << 20
"""Bytes of the texts of one trajectory. A few forged bytes can expand to gigabytes, so more is refused."""
_KINDS = "Hiq=fd"


class NotNumbers(ValueError):
    """A token id or a version is not an integer, or a log-prob is not a number."""


def encode(trajectory: Trajectory) -> bytes:
    """Raises `NotNumbers`, and `codec.NotEncodable` for an object outside of fields and arguments."""
    numbers: list[bytes] = []
    records = zlib.compress(codec.encode(_TRAJECTORY.write(trajectory, numbers)), level=1)
    return b"".join((MARK, len(records).to_bytes(4, "little"), records, *numbers))


def decode(data: bytes) -> Any:
    """Raises ValueError, TypeError, zlib.error, struct.error or another error of its values for bytes that `encode` did not
    write.
    """
    end = 5 + int.from_bytes(data[1:5], "little")
    numbers = _Numbers(data, end)
    trajectory = _TRAJECTORY.read(codec.decode(inflate(data[5:end]), any_keys=True), numbers)
    if numbers.at != len(data):
        raise ValueError(f"the numbers end at byte {numbers.at} of {len(data)}")
    return trajectory


def inflate(data: bytes) -> bytes:
    """Decompresses at most MAX_RECORDS bytes. Raises ValueError if there are more, and zlib.error."""
    stream = zlib.decompressobj()
    inflated = stream.decompress(data, MAX_RECORDS)
    if stream.unconsumed_tail:
        raise ValueError(f"its texts have more than {MAX_RECORDS >> 20} MiB")
    if not stream.eof:
        raise zlib.error("the stream is cut off")
    return inflated


# ---- numbers -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Numbers:
    """The packed numbers of a trajectory. `at` is where the next ones begin."""

    data: bytes
    at: int

    def read(self, entry: Any) -> list[Any]:
        if isinstance(entry, list):
            return entry
        count, kind = divmod(entry, 8)
        code = _KINDS[kind]
        same = code == "="
        if same and count > MAX_SAME:
            raise ValueError(f"a list of {count} equal numbers")  # would take gigabytes
        layout = "<q" if same else f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return list(values) * count if same else list(values)


def _write_ids(ids: object, numbers: list[bytes]) -> int | list[int]:
    ids = _as_list(ids)
    count = len(ids)
    same = 1 < count <= MAX_SAME and ids[0] == ids[-1] and ids.count(ids[0]) == count
    for kind, code in enumerate("q" if same else "Hiq"):
        try:
            numbers.append(struct.pack("<q", ids[0]) if same else struct.pack(f"<{count}{code}", *ids))
            return 8 * count + (3 if same else kind)
        except struct.error:  # too large, or not an integer
            continue
    try:
        return [index(value) for value in ids]
    except TypeError as error:
        raise NotNumbers(f"a token id or a version is not an integer: {error}") from None


def _write_floats(values: object, numbers: list[bytes]) -> int:
    values = _as_list(values)
    count = len(values)
    try:
        data, kind = struct.pack(f"<{count}d", *values), 5
    except (struct.error, OverflowError) as error:
        raise NotNumbers(f"a log-prob is not a number: {error}") from None
    try:
        single = struct.pack(f"<{count}f", *values)
        if struct.unpack(f"<{count}f", single) == tuple(values):  # NaN is not equal to itself: float64 keeps its bits
            data, kind = single, 4
    except OverflowError:  # beyond the range of float32
        pass
    numbers.append(data)
    return 8 * count + kind


def _as_list(values: Any) -> list[Any]:
    if type(values) is list:
        return values
    if isinstance(values, str | bytes | bytearray):
        raise NotNumbers(f"a {type(values).__name__} is not a list of numbers")
    items: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)  # an array of numpy or torch
    return items


# ---- records -------------------------------------------------------------------------------------------------------------

Writer = Callable[[Any, list[bytes]], Any]
Reader = Callable[[Any, _Numbers], Any]
Part = tuple[Writer, Reader]


class _Layout:
    """Writes the records of one dataclass as lists of their field values, and reads them.

    A field in `parts` has functions that write and read its value; None and the values of all other fields are written as they
    are. Packed numbers are appended to `numbers` in the order of the fields, and read in the same order.
    """

    def __init__(self, cls: type, **parts: Part) -> None:
        self._cls = cls
        self._names = tuple(each.name for each in fields(cls))
        self._values = attrgetter(*self._names)
        self._parts = tuple((place, *parts[name]) for place, name in enumerate(self._names) if name in parts)

    def write(self, record: object, numbers: list[bytes]) -> list[Any]:
        values = list(self._values(record))
        for place, write, _ in self._parts:
            if values[place] is not None:
                values[place] = write(values[place], numbers)
        return values

    def read(self, values: object, numbers: _Numbers) -> Any:
        if not isinstance(values, list) or len(values) > len(self._names):
            raise ValueError(f"a {self._cls.__name__} is a list of at most {len(self._names)} values")
        for place, _, read in self._parts:
            if place < len(values) and values[place] is not None:
                values[place] = read(values[place], numbers)
        return self._cls(**dict(zip(self._names, values, strict=False)))

    @property
    def one(self) -> Part:
        """For a field that holds one of these records."""
        return self.write, self.read

    def many(self, container: type) -> Part:
        """For a field that holds a list or a tuple of these records."""
        return (
            lambda records, numbers: [self.write(record, numbers) for record in records] if records else [],
            lambda found, numbers: container([self.read(values, numbers) for values in found]),
        )


def _same(value: object, _: object) -> Any:
    return value


def _write_value(value: object, _: object) -> Any:
    return value if is_plain(value) else simplify(value)


_ids: Part = (_write_ids, lambda entry, numbers: numbers.read(entry))
_floats: Part = (_write_floats, lambda entry, numbers: numbers.read(entry))
_value: Part = (_write_value, _same)
_image: Part = (lambda image, _: left_out(image), _same)
_images: Part = (lambda images, _: [left_out(image) for image in images] if images else [], lambda found, _: tuple(found))
_outcome: Part = (lambda outcome, _: outcome.value, lambda found, _: Outcome(found))

_CALL = _Layout(ToolCall, arguments=_value)
_MESSAGE = _Layout(Message, tool_calls=_CALL.many(tuple), images=_images)
_TASK = _Layout(Task, messages=_MESSAGE.many(tuple), fields=_value)
_COMPLETION = _Layout(Completion, token_ids=_ids, logprobs=_floats, versions=_ids, tool_calls=_CALL.many(tuple))
_RESULT = _Layout(ToolResult, image=_image)
_TURN = _Layout(
    Turn, context_ids=_ids, completion=_COMPLETION.one, calls=_CALL.many(tuple), results=_RESULT.many(tuple)
)  # fmt: skip
_TRAJECTORY = _Layout(
    Trajectory, task=_TASK.one, messages=_MESSAGE.many(list), turns=_TURN.many(list), outcome=_outcome
)  # fmt: skip
