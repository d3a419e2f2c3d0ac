"""What the endpoint costs: CPU of this process per call with 64 chains at once, and 512 chains at once without an error.

    python benchmarks/endpoint.py [--chains 64] [--calls 8] [--crowd 512] [--rounds 5] [--json PATH]

The server answers at once from a script, so what is measured is HTTP, reading a growing history with tools, and writing the
answer. The clients are another process, which sends requests over connections that stay open, as an SDK's client does. A row is
the round with the least CPU of `--rounds`: other programs on the machine only add to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agentfly.endpoint.calls import Answer, Call
from agentfly.endpoint.server import EndpointServer, Keys
from agentfly.endpoint.wire import new_id
from agentfly.types import Message, ToolCall

TOOL = {
    "name": "search",
    "description": "Search the text of an encyclopaedia and return the passages that fit best.",
    "parameters": {"type": "object", "properties": {"query": {"type": "string"}, "count": {"type": "integer"}}},
}
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
OBSERVATION = "The river rises in the hills and flows to the sea. " * 20


class Instant:
    """Answers at once with a call of a tool."""

    async def answer(self, call: Call) -> Answer:
        call_ = ToolCall("search", {"query": "the river", "count": 3}, new_id("call"))
        message = Message("assistant", "I look it up.", (call_,))
        return Answer(message=message, finish="tool_calls", prompt_tokens=400, completion_tokens=30)

    async def count(self, call: Call) -> int:
        return 400


def body_of(dialect: str, turn: int, stream: bool) -> dict[str, object]:
    """The request of a chain's turn: `turn` calls and results are in its history."""
    system, question, arguments = "You answer questions. " * 40, "Where does the river rise?", '{"query": "the river"}'
    shared: dict[str, object] = {"model": "policy", "stream": stream}
    if dialect == "chat":
        messages: list[dict[str, object]] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        for number in range(turn):
            call = {"id": f"c{number}", "type": "function", "function": {"name": "search", "arguments": arguments}}
            messages.append({"role": "assistant", "content": "I look it up.", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": OBSERVATION})
        return {**shared, "messages": messages, "tools": [{"type": "function", "function": TOOL}]}
    if dialect == "responses":
        items: list[dict[str, object]] = [{"role": "user", "content": question}]
        for number in range(turn):
            items.append({"type": "function_call", "call_id": f"c{number}", "name": "search", "arguments": arguments})
            items.append({"type": "function_call_output", "call_id": f"c{number}", "output": OBSERVATION})
        return {**shared, "instructions": system, "input": items, "tools": [{"type": "function", **TOOL}]}
    messages = [{"role": "user", "content": question}]
    for number in range(turn):
        use = {"type": "tool_use", "id": f"c{number}", "name": "search", "input": json.loads(arguments)}
        messages.append({"role": "assistant", "content": [{"type": "text", "text": "I look it up."}, use]})
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": OBSERVATION}
        messages.append({"role": "user", "content": [result]})
    tool = {"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}
    return {**shared, "max_tokens": 512, "system": system, "messages": messages, "tools": [tool]}


async def play(port: int, key: str, dialect: str, num_calls: int, stream: bool) -> tuple[list[float], int]:
    """A chain over one connection. Returns the seconds of its calls, and how many failed."""
    took, failed = [], 0
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for turn in range(num_calls):
        body = json.dumps(body_of(dialect, turn, stream)).encode()
        head = (
            f"POST {PATHS[dialect]} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        began = time.perf_counter()
        writer.write(head.encode() + body)
        answer = await reader.readuntil(b"\r\n\r\n")
        failed += not answer.startswith(b"HTTP/1.1 200")
        if b"transfer-encoding: chunked" in answer.lower():
            await reader.readuntil(b"0\r\n\r\n")
        else:
            length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.split(b":")[1]))
        took.append(time.perf_counter() - began)
    writer.close()
    return took, failed


async def load(port: int, dialect: str, num_calls: int, stream: bool, keys: list[str]) -> None:
    """The clients' process: plays all chains at once and prints what it saw."""
    found = await asyncio.gather(*(play(port, key, dialect, num_calls, stream) for key in keys))
    seconds = sorted(second for took, _ in found for second in took)
    print(
        json.dumps(
            {"failed": sum(failed for _, failed in found), "median_s": statistics.median(seconds), "last_s": seconds[-1]}
        )
    )


async def measure(dialect: str, num_chains: int, num_calls: int, stream: bool) -> dict[str, Any]:
    """Serve one process of clients. Returns our CPU per call and what the clients saw."""
    keys = Keys()
    opened = [keys.open(Instant()) for _ in range(num_chains)]
    async with EndpointServer(keys) as server:
        words = [sys.executable, __file__, "--load", server.url.rpartition(":")[2], dialect, str(num_calls), str(int(stream))]
        process = await asyncio.create_subprocess_exec(*words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        told, _ = await process.communicate("\n".join(opened).encode())
        after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    calls = num_chains * num_calls
    return {
        "dialect": dialect, "stream": stream, "chains": num_chains, "calls": calls, "cpu_ms_per_call": 1000 * cpu_s / calls,
        "wall_s": time.perf_counter() - began, **json.loads(told),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=64)
    parser.add_argument("--calls", type=int, default=8)
    parser.add_argument("--crowd", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--load", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.load:
        port, dialect, num_calls, stream = arguments.load
        asyncio.run(load(int(port), dialect, int(num_calls), stream == "1", sys.stdin.read().split()))
        return
    rows = []
    for dialect in PATHS:
        for stream in (False, True):
            asyncio.run(measure(dialect, 4, 2, stream))  # imports and caches
            rounds = [asyncio.run(measure(dialect, arguments.chains, arguments.calls, stream)) for _ in range(arguments.rounds)]
            rows.append(min(rounds, key=lambda row: row["cpu_ms_per_call"]) | {"failed": sum(row["failed"] for row in rounds)})
            print(row_text(rows[-1]), flush=True)
    rows.append(asyncio.run(measure("chat", arguments.crowd, 4, True)))
    print(row_text(rows[-1]))
    if arguments.json:
        found = {"cpus": os.cpu_count(), "rows": rows}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def row_text(row: dict[str, Any]) -> str:
    return (
        f"{row['dialect']:10} {'stream' if row['stream'] else 'whole':6} {row['chains']:4} chains, {row['calls']:5} calls: "
        f"{row['cpu_ms_per_call']:.2f} ms of CPU each, {1000 * row['median_s']:.0f} ms in the middle, {row['failed']} failed"
    )


if __name__ == "__main__":
    main()
