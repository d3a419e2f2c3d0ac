"""Values to JSON, and the parameters of a request. JSON has no NaN: such a number is null."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..errors import ConfigError
from ..net.server import Receive, Scope, Send
from ..runs import Opaque
from ..runs.catalog import RunSummary
from ..schema import Bounds, read

MAX_LIMIT = 1000
_BIG = 1 << 62
_EXACT = 1 << 53
"""JavaScript reads integers beyond this inexactly: they are sent as text."""


def answer(value: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(dumps(value), status_code=status, media_type="application/json")


def dumps(value: object) -> bytes:
    """The value as JSON in ASCII, so that half a surrogate pair in a model's text is valid too."""
    try:  # most values are JSON but for dataclasses; the lists of a token view have 100,000 numbers
        text = json.dumps(value, allow_nan=False, separators=(",", ":"), default=plain)
    except (ValueError, TypeError):  # a number that is not finite, or a key that is no text
        text = json.dumps(plain(value), allow_nan=False, separators=(",", ":"))
    return text.encode()


def plain(value: object) -> Any:
    """The value in JSON's types. A dataclass is an object of its fields; an object that was not stored is its type and text."""
    if value is None or type(value) in (str, bool):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else None
    if type(value) is int:
        return value if -_EXACT <= value <= _EXACT else str(value)
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, Opaque):
        return {"not_stored": value.type, "text": value.text}
    if isinstance(value, Mapping):
        return {key if isinstance(key, str) else str(plain(key)): plain(part) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, float | int):  # a number of another class
        return plain(float(value)) if isinstance(value, float) else plain(int(value))
    return str(value)


def summary_json(run: RunSummary) -> dict[str, Any]:
    """A run in a list, without its path on this machine."""
    summary = plain(run)
    del summary["path"]
    return {**summary, "age_s": run.age_s}


class EventStream(StreamingResponse):
    """A stream of events that ends as soon as the browser closes the connection, also while no event comes.

    A StreamingResponse notices that only when it sends the next event.
    """

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self.stream_response(send))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait([sending, gone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            await asyncio.wait([sending, gone])
            await self._events.aclose()
        if not sending.cancelled():
            sending.result()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Parameters:
    """The query of a request. Raises ConfigError for a name outside of `known`, a name given twice, and a wrong value."""

    def __init__(self, request: Request, known: Collection[str]) -> None:
        given = request.query_params.multi_items()
        self._values = dict(given)
        for name in self._values:
            if name not in known:
                raise ConfigError(f"there is no parameter {name[:40]!r}; there are: {', '.join(sorted(known)) or 'none'}")
        if len(self._values) < len(given):
            raise ConfigError("a parameter is given twice")

    def text(self, name: str) -> str | None:
        """The value; None if it is absent or empty."""
        return self._values.get(name) or None

    def required(self, name: str) -> str:
        if (value := self.text(name)) is None:
            raise ConfigError(f"the parameter {name!r} is missing")
        return value

    def integer(self, name: str, low: int = -_BIG, high: int = _BIG) -> int | None:
        value = self._number(name, int, Bounds(low=low, high=high))
        return None if value is None else int(value)

    def real(self, name: str) -> float | None:
        return self._number(name, float)

    def flag(self, name: str) -> bool | None:
        value = self.text(name)
        if value not in (None, "0", "1"):
            raise ConfigError(f"{name} is 0 or 1, not {value[:40]!r}")
        return None if value is None else value == "1"

    def names(self, name: str, most: int = 200) -> list[str]:
        """A list that is separated by commas."""
        parts = [part for part in (self.text(name) or "").split(",") if part]
        if len(parts) > most:
            raise ConfigError(f"{name} takes at most {most} names")
        return parts

    def _number(self, name: str, kind: type[int | float], bounds: Bounds | None = None) -> float | None:
        text = self.text(name)
        if text is None:
            return None
        try:
            value: float | str = kind(text)
        except ValueError:  # refused with the words of its type
            value = text
        number: float = read(name, value, kind, bounds)
        return number
