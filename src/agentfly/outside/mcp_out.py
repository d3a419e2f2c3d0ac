"""`ToolServer`: tools of ours as an MCP server, over standard input and output or over HTTP. Needs no package for the protocol.

    initialize -> tools/list -> tools/call ...        JSON-RPC; a call's step reward and end are in the result's `_meta`

All clients of one server use one environment, reset for one task: it is for one agent at a time, like a chain.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from ..errors import ConfigError, RolloutError
from ..net.guard import Guard
from ..net.json_body import load_json
from ..net.server import App, Receive, Scope, Send, WebServer
from ..resources import Budget, ResourceManager, Spec, spec_of
from ..tools import Context, Tool, as_tool, call_tools
from ..types import Task, ToolCall, ToolResult, Trajectory

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of the protocol whose handshake and tools this server speaks; newest first."""
PATH = "/mcp"
MAX_LINE = 8 << 20
FOREVER_S = 1e9
END_S = 5.0
"""Calls in progress have so long to end after the input has ended."""
_PARSE, _REQUEST, _METHOD, _PARAMS, _INTERNAL = -32700, -32600, -32601, -32602, -32603


class ToolServer:
    """`async with ToolServer([tool], env=..., task=...) as server` opens the environment and resets it for the task."""

    def __init__(self, tools: Sequence[object], *, env: object = None, task: Task | None = None) -> None:
        self.tools: dict[str, Tool] = {}
        for tool in map(as_tool, tools):
            if tool.name in self.tools:
                raise ConfigError(f"two tools are called {tool.name!r}; give one of them another name")
            self.tools[tool.name] = tool
        self._spec: Spec | None = None if env is None else spec_of(env, max=1, max_hold_s=FOREVER_S)
        self._task = task or Task("mcp", (), {})
        for tool in self.tools.values():
            if missing := sorted(tool.needs - set(self._task.fields)):
                raise ConfigError(f"the tool {tool.name!r} needs the field {missing[0]!r} of a task: give one")
        self._opened = AsyncExitStack()
        self._context: Context | None = None
        self.instructions = "\n\n".join(message.content for message in self._task.messages)

    async def __aenter__(self) -> ToolServer:
        context = self._context = Context(self._task, Trajectory("mcp", self._task))
        kinds = {kind for tool in self.tools.values() for kind in tool.envs}
        specs = [
            spec_of(kind, max=1, max_hold_s=FOREVER_S) for kind in kinds if self._spec is None or kind is not self._spec.make
        ]
        own = [] if self._spec is None else [self._spec]
        try:
            self._opened.push_async_callback(context.close)
            if specs or own:
                manager = await self._opened.enter_async_context(ResourceManager(Budget(), *own, *specs))
                names = [spec.name for spec in own]
                lease = await self._opened.enter_async_context(
                    manager.lease(names, self._task, "mcp", may=[spec.name for spec in specs])
                )

                async def lend(kind: type) -> Any:
                    await lease.need([kind])
                    return lease[kind]

                context.lend = lend
                if self._spec is not None:
                    context.env = lease[self._spec.name]
                    if isinstance(seen := lease.observation(self._spec.name), str):
                        self.instructions = f"{self.instructions}\n\n{seen}".strip()
        except BaseException:
            await self._opened.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._opened.aclose()

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """One call of a tool. Raises RolloutError if the environment fails."""
        assert self._context is not None
        return (await call_tools(self.tools, [ToolCall(name, arguments)], self._context))[0]

    # ---- messages

    async def answer(self, message: object) -> dict[str, Any] | None:
        """The answer to one message of JSON-RPC; None to a notification."""
        if not isinstance(message, Mapping) or not isinstance(message.get("method"), str):
            return _error(None, _REQUEST, "a message is one JSON-RPC request: an object with a method")
        number, method, params = message.get("id"), message["method"], message.get("params") or {}
        if "id" not in message:
            return None
        if not isinstance(params, Mapping):
            return _error(number, _REQUEST, "params must be an object")
        try:
            result = await self._result(method, params)
        except _NotServed as refused:
            return _error(number, refused.code, str(refused))
        except ConfigError as error:
            return _error(number, _INTERNAL, str(error))
        return {"jsonrpc": "2.0", "id": number, "result": result}

    async def _result(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            asked = params.get("protocolVersion")
            return {
                "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "agentfly", "version": "1"},
                **({"instructions": self.instructions} if self.instructions else {}),
            }
        if method == "ping":
            return {}
        if method == "tools/list":
            functions = (tool.schema["function"] for tool in self.tools.values())
            return {
                "tools": [
                    {"name": f["name"], "description": f["description"], "inputSchema": f["parameters"]} for f in functions
                ]
            }
        if method == "tools/call":
            return await self._call(params)
        raise _NotServed(_METHOD, f"this server has no method {method!r}; it has tools/list and tools/call")

    async def _call(self, params: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = params.get("name"), params.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise _NotServed(_PARAMS, "tools/call has a name and an object of arguments")
        try:
            result = await self.call(name, arguments)
        except RolloutError as error:
            result = ToolResult(observation=f"the environment failed: {error}", error="raised")
        content = [{"type": "text", "text": result.observation}, *_image(result.image)]
        about = {"agentfly/reward": result.reward, "agentfly/done": result.done or None, "agentfly/error": result.error}
        meta = {key: value for key, value in about.items() if value is not None}
        return {"content": content, "isError": result.error is not None, **({"_meta": meta} if meta else {})}

    # ---- transports

    async def serve_stdio(self) -> None:
        """Answer the lines of standard input until it ends. What tools print goes to the standard error."""
        loop = asyncio.get_running_loop()
        output = os.fdopen(os.dup(1), "wb", buffering=0)
        sys.stdout.flush()
        os.dup2(2, 1)
        reader = asyncio.StreamReader(limit=MAX_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
        running: set[asyncio.Task[None]] = set()

        async def handle(line: bytes) -> None:
            if (made := await self._of_text(line)) is not None:
                output.write(json.dumps(made, ensure_ascii=False).encode("utf-8", "replace") + b"\n")

        async for line in reader:
            if line.strip():
                task = asyncio.create_task(handle(line))
                running.add(task)
                task.add_done_callback(running.discard)
        if running:
            _, late = await asyncio.wait(running, timeout=END_S)
            for task in late:
                task.cancel()

    async def _of_text(self, text: bytes) -> dict[str, Any] | None:
        try:
            message = load_json(text)
        except ValueError as error:
            return _error(None, _PARSE, str(error))
        return await self.answer(message)

    def web_server(self, host: str, port: int, token: str | None) -> WebServer:
        """The server over HTTP: POST a message to /mcp. Beyond loopback a token is needed, as a bearer."""
        guard = Guard(host, token, cure="name its variable by --token-env")
        return WebServer(self._app(), guard, host=host, port=port, max_body=MAX_LINE)

    def _app(self) -> App:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            made: dict[str, Any] | None = None
            status = 404 if scope["path"].rstrip("/") != PATH else 405
            if status == 405 and scope["method"] == "POST":
                made = await self._of_text((await receive())["body"])
                status = 202 if made is None else 200
            body = b"" if made is None else json.dumps(made, ensure_ascii=False).encode("utf-8", "replace")
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})

        return app


class _NotServed(Exception):
    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def _error(number: object, code: int, sentence: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": sentence}}


def _image(image: object) -> list[dict[str, Any]]:
    if isinstance(image, bytes):
        return [{"type": "image", "mimeType": "image/png", "data": base64.b64encode(image).decode()}]
    if isinstance(image, str) and image.startswith("data:") and ";base64," in image:
        head, _, data = image.partition(";base64,")
        return [{"type": "image", "mimeType": head.removeprefix("data:"), "data": data}]
    return []
