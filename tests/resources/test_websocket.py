"""Our WebSocket against the examples of RFC 6455, frames that break its rules, and a server that everybody can reach."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agentfly.errors import ConfigError, WorldError
from agentfly.resources import ResourceManager, spec_of
from agentfly.resources.rpc import env_server as serve_module
from agentfly.resources.rpc.env_server import EnvServer, default_placement, read_options, token_from
from agentfly.resources.rpc.frames import Frames, pack
from agentfly.resources.rpc.websocket import BINARY, CLOSE, PING, PONG, TEXT, Broken, Decoder, accept_word, connect, encode, mask

from .worlds import TASK, Board, Sickly, Worker

WAIT_S = 120
TOKEN = "a-long-token"


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await main()

    asyncio.run(bounded())


# ---- frames


def test_the_examples_of_the_standard() -> None:
    assert accept_word("dGhlIHNhbXBsZSBub25jZQ==") == "s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert encode(TEXT, b"Hello", masked=False) == bytes.fromhex("810548656c6c6f")
    assert list(Decoder(masked=True).feed(bytes.fromhex("818537fa213d7f9f4d5158"))) == [(TEXT, b"Hello")]
    parts = bytes.fromhex("010348656c") + bytes.fromhex("8900") + bytes.fromhex("80026c6f")
    assert list(Decoder(masked=False).feed(parts)) == [(PING, b""), (TEXT, b"Hello")]  # a ping between two parts


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 200_003])
@pytest.mark.parametrize("masked", [True, False])
def test_every_length_comes_back_however_the_bytes_are_cut(size: int, masked: bool) -> None:
    rng = random.Random(size)
    payload = rng.randbytes(size)
    data = encode(BINARY, payload, masked) + encode(PONG, b"x", masked)
    decoder, found = Decoder(masked), []
    while data:
        cut = rng.choice([1, 2, 3, 7, 1000, 50_000])
        found += list(decoder.feed(data[:cut]))
        data = data[cut:]
    assert found == [(BINARY, payload), (PONG, b"x")]


def test_a_mask_is_its_own_inverse_and_byte_by_byte_the_same() -> None:
    key, payload = bytes([1, 2, 3, 4]), bytes(range(11))
    assert mask(payload, key) == bytes(byte ^ key[at % 4] for at, byte in enumerate(payload))
    assert mask(mask(payload, key), key) == payload


@pytest.mark.parametrize(
    ("frame", "word"),
    [
        (bytes.fromhex("c100"), "reserved bit"),
        (bytes.fromhex("818537fa213d7f9f4d5158"), "masked"),
        (bytes.fromhex("8000"), "wrong order"),
        (bytes.fromhex("010141010142"), "wrong order"),
        (bytes.fromhex("8300"), "wrong order"),
        (bytes.fromhex("0900"), "control frame"),
        (bytes.fromhex("897e007e") + bytes(126), "control frame"),
        (bytes.fromhex("8b00"), "control frame"),
        (struct.pack(">BBQ", 0x82, 127, 1 << 40), "a frame of"),
        (struct.pack(">BBH", 0x02, 126, 900) + bytes(900) + struct.pack(">BBH", 0x80, 126, 200) + bytes(200), "above 1000"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_breaks_the_rules_is_refused(frame: bytes, word: str) -> None:
    with pytest.raises(Broken, match=word):
        list(Decoder(masked=False, limit=1000).feed(frame))


# ---- the server


@asynccontextmanager
async def raw(server: EnvServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ask(server: EnvServer, *lines: str) -> str:
    async with raw(server) as (reader, writer):
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n")
        return (await reader.read(-1)).decode()


UPGRADE = ("GET / HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
KEY = f"Sec-WebSocket-Key: {base64.b64encode(bytes(16)).decode()}"
AUTHORIZED = f"Authorization: Bearer {TOKEN}"


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ((*UPGRADE, KEY), 401),
        ((*UPGRADE, KEY, "Authorization: Bearer wrong"), 401),
        ((*UPGRADE, KEY, f"Authorization: Basic {TOKEN}"), 401),
        ((*UPGRADE, KEY, f"Authorization: Bearer {TOKEN}é"), 401),
        ((*UPGRADE, KEY, AUTHORIZED, "Origin: https://evil.example"), 403),
        ((*UPGRADE, AUTHORIZED), 426),
        (("GET / HTTP/1.1", AUTHORIZED), 426),
        (("GET /../etc/passwd HTTP/1.1", AUTHORIZED), 404),
        (("POST / HTTP/1.1", AUTHORIZED), 404),
        (("GET /health HTTP/1.1", AUTHORIZED, "Content-Length: 5"), 413),
        (("GET /health HTTP/1.1", AUTHORIZED, "Transfer-Encoding: chunked"), 413),
        (("nonsense", AUTHORIZED), 400),
        (("GET /health HTTP/1.1", AUTHORIZED), 200),
    ],
)
def test_who_may_not_come_in_is_told_why(lines: tuple[str, ...], status: int) -> None:
    async def main() -> None:
        async with EnvServer(Board, token=TOKEN) as server:
            answer = await ask(server, *lines)
            assert answer.startswith(f"HTTP/1.1 {status} ")
            assert server.lent == 0
            if status == 200:
                assert json.loads(answer.partition("\r\n\r\n")[2]) == {"environment": "Board", "lent": 0, "max": 64}

    run(main)


def test_a_head_without_end_and_one_that_never_comes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "HEAD_S", 0.2)

    async def main() -> None:
        async with EnvServer(Board) as server:
            async with raw(server) as (reader, writer):
                writer.write(b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000)
                assert await reader.read(-1) == b""
            async with raw(server) as (reader, writer):
                writer.write(b"GET / HT")
                assert await reader.read(-1) == b""

    run(main)


def test_a_connection_beyond_the_most_is_refused_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "SEAT_S", 0.2)

    async def main() -> None:
        async with EnvServer(Board, most=1) as server:
            first = await connect(server.url, None, 60)
            with pytest.raises(WorldError, match="refused: all 1 instances of Board are lent"):
                await connect(server.url, None, 60)
            first.end()
            await first.finish()

    run(main)


async def said(socket: Any, frames: Frames) -> dict[str, Any]:
    data = await socket.receive()
    assert data is not None
    (message,) = frames.feed(data)
    return message


def test_a_client_that_misuses_the_wire_hears_why_and_harms_nobody() -> None:
    async def main() -> None:
        async with EnvServer(Board, placement="thread") as server:
            socket, frames = await connect(server.url, None, 60), Frames()
            assert (await said(socket, frames))["v"] == {"environment": "Board", "placement": "thread"}
            answers = []
            for number, message in enumerate(
                [
                    {"m": "read"},
                    {"m": "@new"},
                    {"m": "@new"},
                    {"m": "__init__"},
                    {"m": "@get", "a": ["__dict__"]},
                    {"m": "_hidden"},
                    {"m": 3},
                    {"m": "write", "a": "text"},
                    {"m": "nothing_like_it"},
                    {"m": "write", "a": ["good"]},
                ]
            ):
                socket.send(pack({"id": number, "i": 0, **message}))
                answers.append(await said(socket, frames))
            assert [answer.get("e", ["fine"])[0] for answer in answers] == [
                "WorldError", "fine", "WorldError", "AttributeError", "AttributeError", "AttributeError", "WorldError",
                "WorldError", "AttributeError", "fine",
            ]  # fmt: skip
            assert answers[-1]["v"] == 1
            socket.send(pack({"id": 9})[:-1] + b"!")  # not JSON
            assert await socket.receive() is None
            assert Board.open["Board"] == 0 or await gone()
            await socket.finish()

    async def gone() -> bool:
        while Board.open["Board"]:
            await asyncio.sleep(0.01)
        return True

    run(main)


@pytest.mark.parametrize(
    "frame", [encode(TEXT, b"{}", True), encode(BINARY, b"{}", False), b"\xff" * 8], ids=["text", "bare", "junk"]
)
def test_a_client_that_breaks_the_protocol_is_cut_off(frame: bytes) -> None:
    async def main() -> None:
        async with EnvServer(Board) as server, raw(server) as (reader, writer):
            writer.write("\r\n".join((*UPGRADE, KEY)).encode() + b"\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            writer.write(frame)
            rest = await reader.read(-1)
            assert [opcode for opcode, _ in Decoder(masked=False).feed(rest)][-1] == CLOSE

    run(main)


def test_silence_is_noticed_on_both_sides() -> None:
    async def main() -> None:
        async with EnvServer(Board, ping_s=0.05, placement="thread") as server:
            async with raw(server) as (reader, writer):  # a client that answers no ping
                writer.write("\r\n".join((*UPGRADE, KEY)).encode() + b"\r\n\r\n")
                await reader.read(-1)
            while server.lent:
                await asyncio.sleep(0.01)

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            key = head.partition("Sec-WebSocket-Key: ")[2].partition("\r\n")[0]
            writer.write(f"HTTP/1.1 101 X\r\nSec-WebSocket-Accept: {accept_word(key)}\r\n\r\n".encode())
            frame = {"id": 0, "v": {"environment": "Board", "placement": "loop"}}
            writer.write(encode(BINARY, pack(frame), masked=False))
            await reader.read(-1)  # and not a word more
            writer.close()

        silent = await asyncio.start_server(mute, "127.0.0.1", 0)
        url = f"ws://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        async with silent, ResourceManager(None, spec_of(Board, placement="http", url=url, ping_s=0.05)) as manager:
            with pytest.raises(WorldError, match=r"nothing was heard for 0\.15 s"):
                await manager.acquire([Board], TASK, "a", 60)

    run(main)


def test_the_token_and_the_environment_are_checked_by_the_trainer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENV_TOKEN", TOKEN)

    async def main() -> None:
        async with EnvServer(Sickly, token=TOKEN, placement="thread") as server:
            good = spec_of(Sickly, placement="http", url=server.url, token_env="ENV_TOKEN")
            async with ResourceManager(None, good) as manager, manager.lease([Sickly], TASK, "a", WAIT_S) as lease:
                assert await lease.call(Sickly, "read") == []
            other = spec_of(Board, placement="http", url=server.url, token_env="ENV_TOKEN")
            async with ResourceManager(None, other) as manager:
                with pytest.raises(WorldError, match="the server of its pool serves 'Sickly', not 'Board'"):
                    await manager.acquire([Board], TASK, "a", WAIT_S)
            async with ResourceManager(None, spec_of(Sickly, placement="http", url=server.url)) as manager:
                with pytest.raises(ConfigError, match="the token is missing or wrong; name the variable"):
                    await manager.acquire([Sickly], TASK, "a", WAIT_S)

    run(main)
    with pytest.raises(ConfigError, match="token_env names NO_TOKEN, but that variable holds no token"):
        ResourceManager(None, spec_of(Board, placement="http", url="ws://127.0.0.1:1", token_env="NO_TOKEN"))


def test_no_server_is_one_sentence() -> None:
    async def main() -> None:
        with pytest.raises(
            WorldError, match=r"no environment server answers at ws://127\.0\.0\.1:1 .*agentfly envs serve NAME"
        ):
            await connect("ws://127.0.0.1:1", None, 60)

    run(main)


def test_a_server_that_others_could_reach_needs_a_token_and_bad_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0 lets other machines in"):
        EnvServer(Board, host="0.0.0.0")
    with pytest.raises(ConfigError, match="8 characters or more"):
        EnvServer(Board, token="short")
    with pytest.raises(ConfigError, match="--max must be a whole number from 1"):
        EnvServer(Board, most=0)
    monkeypatch.delenv("NO_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="--token-env names NO_TOKEN, but that variable is not set"):
        token_from("NO_TOKEN")
    assert token_from(None) is None
    assert read_options(["tier=landlock", "limit_s=2.5", 'names=["a"]']) == {"tier": "landlock", "limit_s": 2.5, "names": ["a"]}
    with pytest.raises(ConfigError, match="--option takes key=value, not 'tier'"):
        read_options(["tier"])


def test_what_would_block_the_server_goes_into_processes_and_the_rest_where_it_says() -> None:
    from agentfly.envs.code.env import CodeInterpreter

    assert default_placement(spec_of(Board)) == "process"
    assert default_placement(spec_of(CodeInterpreter)) == "loop"
    assert default_placement(spec_of(Worker, placement="thread")) == "thread"
