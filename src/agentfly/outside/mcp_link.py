"""`McpLink`: one connection to an MCP server, over the package `mcp` (2.x), and the server's process if a command starts it.

    open() -> call(), tools() ... -> close()        a task of its own holds the connection open between the two

A process is started by the keeper of worker processes, so it ends with the trainer, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..aio.deadline import Expired, within
from ..errors import AgentFlyError, ConfigError, MissingExtra, WorldError
from ..net.address import is_url
from ..plugins import missing_extra
from ..resources.backends.spawn import SPAWNER, WorkerProcess
from ..schema import Count, Positive, check_fields

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult

log = logging.getLogger(__name__)
OPEN_S = 60.0
END_S = 2.0
"""A server has so long to end after its input was closed, before it is killed."""
MAX_LINE = 32 << 20
_VARIABLE = re.compile(r"\$(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class McpSettings:
    """One MCP server: a `command` with `args`, or a `url`.

    `env`, `headers`  variables of the server's process, or headers of each request; `$NAME` is a variable of this process
    `shared`          whether one connection serves all chains; otherwise each chain has its own, and its own process
    `only`            the tools to take, by their names at the server; all when not set
    `prefix`          what is put before the names of the tools
    `images`          whether the model is shown images; otherwise it reads that there was one
    `timeout_s`       the time of one call
    `max_length`      characters of a result; a longer one is cut
    """

    command: str | None = None
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = field(default_factory=dict)
    shared: bool = False
    only: list[str] = field(default_factory=list)
    prefix: str = ""
    images: bool = False
    timeout_s: Positive = 30.0
    max_length: Count = 10_000

    def __post_init__(self) -> None:
        check_fields(self)
        if bool(self.command) == bool(self.url):
            raise ConfigError("give either the command that starts it, or its url")
        others = ("args", "env", "cwd") if self.url else ("headers",)
        for name in others:
            if getattr(self, name):
                raise ConfigError(f"{name} has no effect with {'a url' if self.url else 'a command'}: remove it")
        if self.url and not is_url(self.url):
            raise ConfigError(f"url must be http://host:port/path (or https) without a password, not {self.url!r}")
        for name, value in self.headers.items():
            if name.lower() in ("authorization", "cookie", "x-api-key") and not _VARIABLE.search(value):
                raise ConfigError(
                    f"the header {name} would be written to the run's folder: set an environment variable, and write $NAME here"
                )


def filled(values: Mapping[str, str]) -> dict[str, str]:
    """The values with `$NAME` replaced by the variable of this process. Raises ConfigError for one that is not set."""

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"the environment variable {match[1]} is not set")
        return os.environ[match[1]]

    return {name: _VARIABLE.sub(variable, value) for name, value in values.items()}


def client_class() -> Any:
    """The class `mcp.Client`. Raises MissingExtra without the package, ConfigError for its versions 1.x."""
    try:
        from mcp import Client
    except ModuleNotFoundError as error:
        raise missing_extra("an MCP server", "mcp") from error
    except ImportError as error:
        from importlib.metadata import version

        raise ConfigError(
            f"the package mcp is version {version('mcp')}, whose client is another one: pip install 'agentfly[mcp]'"
        ) from error
    return Client


class McpLink:
    """A connection. `name` is the server's in messages."""

    def __init__(self, name: str, settings: McpSettings) -> None:
        self.name, self.settings = name, settings
        self._client: Client | None = None
        self._process: WorkerProcess | None = None
        self._last_words = ""
        self._task: asyncio.Task[None] | None = None
        self._close = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._client is not None and not self._close.is_set()

    async def open(self) -> None:
        """Connect. Raises ConfigError if the command does not exist, WorldError if the server does not answer."""
        command = self.settings.command
        if command is not None and shutil.which(command) is None:
            raise ConfigError(f"the MCP server {self.name!r}: there is no program {command!r}")
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold(opened), name=f"agentfly-mcp-{self.name}")
        try:
            await within(opened, OPEN_S)
        except Expired:
            await self.close()
            raise WorldError(f"{self._who} did not answer within {OPEN_S:g} s") from None
        except MissingExtra:
            raise
        except AgentFlyError as error:
            raise type(error)(f"{self._who}: {error}") from error
        except Exception as error:
            raise WorldError(f"{self._who} cannot be connected: {_reason(error)}{self._said()}") from error
        except BaseException:
            await self.close()
            raise

    async def _hold(self, opened: asyncio.Future[None]) -> None:
        try:
            client_of = client_class()
            async with (
                self._transport() as transport,
                client_of(transport, read_timeout_seconds=self.settings.timeout_s) as client,
            ):
                self._client = client
                opened.set_result(None)
                await self._close.wait()
        except Exception as error:  # noqa: BLE001 - `open` raises it; after that, calls say that the connection is closed
            if opened.done():
                log.debug("%s ended: %s", self._who, _reason(error))
            else:
                opened.set_exception(_first(error))
        finally:
            self._client = None
            if not opened.done():
                opened.set_exception(WorldError(f"{self._who} was closed while it was opened"))
                opened.exception()  # retrieved: `open` may have been cancelled

    @contextlib.asynccontextmanager
    async def _transport(self) -> AsyncIterator[Any]:
        if self.settings.url is None:
            yield self._stdio()
            return
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared._httpx_utils import create_mcp_http_client

        async with create_mcp_http_client(headers=filled(self.settings.headers)) as http:
            yield streamable_http_client(self.settings.url, http_client=http)

    @contextlib.asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        """The transport of a process: a JSON object per line, each way."""
        import anyio
        from mcp.shared.message import SessionMessage
        from mcp_types import jsonrpc_message_adapter

        settings = self.settings
        assert settings.command is not None
        words = [shutil.which(settings.command) or settings.command, *settings.args]
        process = self._process = await SPAWNER.spawn(0, (), words, filled(settings.env), settings.cwd)
        reader, writer = await asyncio.open_connection(sock=process.channel, limit=MAX_LINE)
        received, read = anyio.create_memory_object_stream[Any](0)
        write, to_send = anyio.create_memory_object_stream[Any](0)

        async def receive() -> None:
            async with received:
                with contextlib.suppress(OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    async for line in _lines(reader):
                        try:
                            await received.send(SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False)))
                        except ValueError as error:
                            await received.send(error)

        async def send() -> None:
            with contextlib.suppress(OSError):
                async for message in to_send:
                    writer.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                    await writer.drain()
            await received.aclose()  # what waits for an answer then ends

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(receive)
                group.start_soon(send)
                yield read, write
                group.cancel_scope.cancel()
        finally:
            self._last_words = process.tail()
            with anyio.CancelScope(shield=True):
                await _end(process, reader, writer)
                for stream in (read, write, received, to_send):
                    await stream.aclose()

    async def tools(self) -> list[dict[str, Any]]:
        """What the server lists: name, description and input schema of each tool, in its order."""
        listed: list[dict[str, Any]] = []
        cursor = None
        with self._blaming():
            while True:
                page = await self._connected().list_tools(cursor=cursor)
                for each in page.tools:
                    about = each.description or each.title or ""
                    listed.append({"name": each.name, "description": about, "parameters": each.input_schema})
                cursor = page.next_cursor
                if not cursor:
                    return listed

    async def call(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a call: `text`, `images` and perhaps `error`. Raises WorldError if the server is gone."""
        from mcp.shared.exceptions import MCPError
        from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

        with self._blaming():
            try:
                client, timeout_s = self._connected(), self.settings.timeout_s
                made = await client.call_tool(tool, dict(arguments), read_timeout_seconds=timeout_s)
            except MCPError as error:
                if error.code == REQUEST_TIMEOUT:
                    return {"text": f"{tool} did not finish within {timeout_s:g} s and was stopped.", "error": "timeout"}
                if error.code == CONNECTION_CLOSED:
                    raise
                return {"text": f"{tool} failed: {error.message}", "error": "raised"}
        return read_result(made)

    @contextlib.contextmanager
    def _blaming(self) -> Iterator[None]:
        """Exceptions of the connection are failures of the world, with what the process said last."""
        try:
            yield
        except AgentFlyError:
            raise
        except Exception as error:
            self._close.set()
            raise WorldError(f"{self._who} is gone: {_reason(error)}{self._said()}") from error

    def _connected(self) -> Client:
        if self._client is None:
            raise WorldError(f"{self._who} is gone{self._said()}")
        return self._client

    @property
    def _who(self) -> str:
        return f"the MCP server {self.name!r}"

    def _said(self) -> str:
        text = " ".join((self._last_words or (self._process.tail() if self._process else "")).split())
        return f"; it said: {text[-200:]}" if text else ""

    async def close(self) -> None:
        """End the connection and the process. A second call only waits for that."""
        self._close.set()
        if self._task is not None:
            await asyncio.wait([self._task])


def read_result(made: CallToolResult) -> dict[str, Any]:
    """The content of an MCP result: texts together, images as data URLs, other blocks by a line that names them."""
    texts, images = [], []
    for block in made.content:
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "image":
            images.append(f"data:{block.mime_type};base64,{block.data}")
        elif block.type == "resource" and hasattr(block.resource, "text"):
            texts.append(block.resource.text)
        else:
            texts.append(f"[{block.type}: {getattr(block, 'uri', None) or getattr(block, 'mime_type', None) or 'not shown'}]")
    if not texts and not images and made.structured_content is not None:
        import json

        texts.append(json.dumps(made.structured_content, ensure_ascii=False))
    return {"text": "\n".join(texts), "images": images, **({"error": "raised"} if made.is_error else {})}


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Lines that are not empty. A line of more than MAX_LINE bytes ends the connection."""
    try:
        async for line in reader:
            if line.strip():
                yield line
    except ValueError as error:
        log.warning("an MCP server wrote a line that is too long: %s", error)


async def _end(process: WorkerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close the input of a process, wait for its end, and kill what is left of its group."""
    with contextlib.suppress(OSError, RuntimeError):
        writer.write_eof()
    with contextlib.suppress(Expired, OSError, ValueError):
        await within(reader.read(), END_S)
    writer.close()
    await SPAWNER.terminate(process)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(error: BaseException) -> str:
    error = _first(error)
    return f"{type(error).__name__}: {error}"
