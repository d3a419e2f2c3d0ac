"""The search server and its client: answers, batches, limits, refused requests, and an unreachable server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import pytest

from agentfly import ReactAgent
from agentfly.envs.search.env import SearchEnv
from agentfly.envs.search.retrieve.corpus import MemoryCorpus
from agentfly.envs.search.retrieve.types import LocalRetriever, Passage
from agentfly.envs.search.serve.client import ServerRetriever
from agentfly.envs.search.serve.server import SearchServer
from agentfly.envs.search.sources import Source, open_local
from agentfly.envs.search.tasks import easy_search
from agentfly.errors import ConfigError, MissingExtra, WorldError
from agentfly.testing import ScriptedEngine
from agentfly.training.ranks.process import free_port
from agentfly.types import Outcome, Task

QUICK = {"retries": 2, "retry_s": 0.01, "timeout_s": 30.0}


class Gated(LocalRetriever):
    """Ranks nothing until it may, and remembers its batches."""

    def __init__(self) -> None:
        super().__init__(MemoryCorpus([Passage("1", "One", "text")]))
        self.gate, self.busy, self.batches = threading.Event(), threading.Event(), []
        self.fails = False

    def rank(self, queries, k):
        self.batches.append(list(queries))
        self.busy.set()
        assert self.gate.wait(60)
        if self.fails:
            raise ValueError("the index is gone")
        return [[(0, 1.0)] for _ in queries]


def home() -> LocalRetriever:
    return open_local(Source("easy_search"))


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_a_server_gives_the_same_answers_as_its_retriever():
    async def main() -> None:
        async with SearchServer(home(), port=0) as server:
            client = ServerRetriever(server.url, **QUICK)
            queries = [row["gold_titles"][0] for row in easy_search("test", 20)]
            assert await client.search(queries, 3) == home().find(queries, 3)
            assert await client.search([], 3) == []
            assert await client.get("7") == await home().get("7")
            assert await client.get("nothing") is None
            await client.close()

    asyncio.run(main())


def test_queries_that_arrive_while_it_works_are_ranked_together():
    async def main() -> None:
        retriever = Gated()
        async with SearchServer(retriever, port=0, max_batch=8) as server:
            client = ServerRetriever(server.url, **QUICK)
            first = asyncio.create_task(client.search(["first"], 1))
            await until(retriever.busy.is_set)
            trainers = [ServerRetriever(server.url, **QUICK) for _ in range(12)]
            rest = [asyncio.create_task(each.search([f"q{number}"], 1)) for number, each in enumerate(trainers)]
            await until(lambda: server.num_waiting == 12)
            retriever.gate.set()
            found = await asyncio.gather(first, *rest)
            assert [[hit.passage.id for hit in hits] for (hits,) in found] == [["1"]] * 13
            assert [len(batch) for batch in retriever.batches] == [1, 8, 4]
            assert sorted(query for batch in retriever.batches[1:] for query in batch) == sorted(f"q{n}" for n in range(12))
            async with httpx.AsyncClient(trust_env=False) as plain:
                told = (await plain.get(f"{server.url}/health")).json()
            assert (told["queries"], told["batches"], told["passages"]) == (13, 3, 1)
            for each in (client, *trainers):
                await each.close()

    asyncio.run(main())


def test_what_one_trainer_asks_at_once_travels_in_one_request():
    async def main() -> None:
        async with SearchServer(home(), port=0) as server:
            client = ServerRetriever(server.url, **QUICK)
            queries = [row["gold_titles"][0] for row in easy_search("test", 40)]
            tasks = [asyncio.create_task(client.search([query], 2)) for query in queries]
            await asyncio.sleep(0)
            tasks[3].cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            wanted = [[hits] for hits in home().find(queries, 2)]
            assert [each for number, each in enumerate(found) if number != 3] == wanted[:3] + wanted[4:]
            assert server.requests == 1
            many = await client.search(queries * 10, 1)
            assert [hits[0] for hits in many[:40]] == [hits[0][0] for hits in wanted]
            assert server.requests == 3, "400 queries are more than one request holds"
            await client.close()

    asyncio.run(main())


def test_wants_of_different_sizes_in_one_batch_each_get_theirs():
    async def main() -> None:
        async with SearchServer(home(), port=0) as server:
            client = ServerRetriever(server.url, **QUICK)
            one, five = await asyncio.gather(client.search(["city"], 1), client.search(["city"], 5))
            assert (len(one[0]), len(five[0])) == (1, 5)
            assert one[0] == five[0][:1]
            await client.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("GET", "/nothing", None, 404, "/health, /search, /retrieve"),
        ("POST", "/search/", "{}", 404, "/health, /search, /retrieve"),
        ("GET", "/search", None, 405, "POST"),
        ("POST", "/search", "{", 400, "not JSON"),
        ("POST", "/search", "[" * 50_000, 400, "not JSON"),
        ("POST", "/search", "[]", 400, "a JSON object"),
        ("POST", "/search", '{"queries": "x"}', 400, "'queries' must be a list"),
        ("POST", "/search", '{"queries": []}', 400, "from 1 to 256"),
        ("POST", "/search", '{"queries": ["x"], "k": 0}', 400, "'k' must be"),
        ("POST", "/search", '{"queries": ["x"], "k": true}', 400, "'k' must be"),
        ("POST", "/search", json.dumps({"queries": ["x" * 5_000]}), 400, "at most 1000 characters"),
        ("POST", "/retrieve", '{"ids": [1]}', 400, "'ids' must be a list"),
        ("POST", "/search", " " * 2_000_000, 413, "at most 1048576 bytes"),
        ("POST", "/search", " " * 50_000_000, 413, "at most 1048576 bytes"),
    ],
)
def test_bad_requests_are_answered_with_a_sentence_and_the_server_goes_on(method, path, body, status, says):
    async def main() -> None:
        async with SearchServer(home(), port=0) as server, httpx.AsyncClient(trust_env=False, timeout=60) as client:
            answer = await client.request(method, server.url + path, content=body)
            assert answer.status_code == status
            assert says in answer.json()["error"]
            good = await client.post(server.url + "/search", json={"queries": ["city"], "k": 1})
            assert good.status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: minus\r\n\r\n", b"400"),
        (b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + b"9" * 5_000 + b"\r\n\r\n", b"400"),
        (b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999999\r\n\r\n", b"413"),  # without waiting for it
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 40_000, b"400"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nbroken header\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /health HTTP/1.1\r\nHost: attacker.example\r\n\r\n", b"403"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n\r\n", b"403"),
        (b"POST /search HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2000000\r\n\r\n" + b" " * 2_000_000, b"413"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"200"),
    ],
)
def test_an_invalid_or_refused_request_is_answered_with_a_status(raw, status):
    async def main() -> None:
        async with SearchServer(home(), port=0) as server, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(raw)
            assert (await reader.read()).split(b" ")[1] == status
            writer.close()

    asyncio.run(main())


def test_a_half_open_connection_ends_after_its_deadline(monkeypatch):
    monkeypatch.setattr("agentfly.net.server.READ_S", 0.2)

    async def main() -> None:
        async with SearchServer(home(), port=0) as server, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(b"POST /search HTTP/1.1\r\nHost: local")
            with contextlib.suppress(ConnectionResetError):  # an aborted connection may be reset
                assert await reader.read() == b""
            writer.close()

    asyncio.run(main())


def test_without_starlette_the_server_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(MissingExtra, match=r"agentfly\[serve\]"):
        SearchServer(home())


def test_too_many_waiting_queries_and_connections_are_turned_away():
    async def main() -> None:
        retriever = Gated()
        async with (
            SearchServer(retriever, port=0, max_waiting=2, max_connections=2) as server,
            httpx.AsyncClient(trust_env=False, timeout=60) as client,
        ):
            first = asyncio.create_task(client.post(server.url + "/search", json={"queries": ["a"]}))
            await until(retriever.busy.is_set)
            full = await client.post(server.url + "/search", json={"queries": ["a", "b", "c"]})
            assert (full.status_code, full.headers["retry-after"]) == (503, "1")
            async with httpx.AsyncClient(trust_env=False, timeout=60) as other:
                assert (await other.get(server.url + "/health")).status_code == 503
            retriever.gate.set()
            assert (await first).status_code == 200

    asyncio.run(main())


def test_a_retriever_that_fails_is_the_servers_failure_and_the_next_query_is_answered(caplog):
    async def main() -> None:
        retriever = Gated()
        retriever.gate.set()
        retriever.fails = True
        async with SearchServer(retriever, port=0) as server:
            client = ServerRetriever(server.url, **QUICK)
            with pytest.raises(WorldError, match="failed 3 times, the last time: HTTP 500"):
                await client.search(["x"], 1)
            retriever.fails = False
            assert (await client.search(["x"], 1))[0][0].passage.id == "1"
            await client.close()

    asyncio.run(main())


def test_a_query_that_cannot_be_ranked_fails_alone(caplog):
    class Picky(Gated):
        def rank(self, queries, k):
            found = super().rank(queries, k)
            if "bad" in queries:
                raise ValueError("this one is bad")
            return found

    async def main() -> None:
        retriever = Picky()
        async with SearchServer(retriever, port=0) as server, httpx.AsyncClient(trust_env=False, timeout=60) as client:
            first = asyncio.create_task(client.post(server.url + "/search", json={"queries": ["first"]}))
            await until(retriever.busy.is_set)
            rest = [asyncio.create_task(client.post(server.url + "/search", json={"queries": [q]})) for q in ("a", "bad", "b")]
            await until(lambda: server.num_waiting == 3)
            retriever.gate.set()
            answers = await asyncio.gather(first, *rest)
            assert sorted(retriever.batches[1]) == ["a", "b", "bad"]
            assert [answer.status_code for answer in answers] == [200, 200, 500, 200]

    asyncio.run(main())


def test_lone_surrogates_in_a_query_do_not_reach_the_retriever():
    class Strict(LocalRetriever):
        """As a tokenizer does, it refuses what is no text."""

        def rank(self, queries, k):
            assert all(query.encode() for query in queries)
            return [[(0, 1.0)] for _ in queries]

    async def main() -> None:
        strict = Strict(MemoryCorpus([Passage("1", "One", "text")]))
        async with SearchServer(strict, port=0) as server, httpx.AsyncClient(trust_env=False, timeout=60) as client:
            raw = b'{"queries": ["\\ud800 lone", "fine"], "k": 1}'
            assert (await client.post(server.url + "/search", content=raw)).status_code == 200
            assert (await client.post(server.url + "/retrieve", content=b'{"ids": ["\\ud800"]}')).json() == {"passages": [None]}
            ours = ServerRetriever(server.url, **QUICK)
            assert len(await ours.search(["\ud800 lone", "fine"], 1)) == 2
            await ours.close()
        assert len(await strict.search(["\ud800"], 1)) == 1

    asyncio.run(main())


def test_without_the_token_nothing_is_answered_and_the_token_is_in_no_message(monkeypatch):
    async def main() -> None:
        async with SearchServer(home(), port=0, token="sesame-secret") as server:
            for token in ("", "wrong"):
                client = ServerRetriever(server.url, token=token, **QUICK)
                with pytest.raises(ConfigError, match="AGENTFLY_SEARCH_TOKEN") as found:
                    await client.search(["x"], 1)
                assert "sesame" not in str(found.value)
                await client.close()
            monkeypatch.setenv("AGENTFLY_SEARCH_TOKEN", "sesame-secret")
            client = ServerRetriever(server.url, **QUICK)
            assert len((await client.search(["city"], 2))[0]) == 2
            assert "sesame" not in repr(client)
            await client.close()

    asyncio.run(main())


def test_a_server_that_others_can_reach_needs_a_token_and_a_taken_port_is_said():
    with pytest.raises(ConfigError, match="needs a token"):
        SearchServer(home(), host="0.0.0.0")

    async def main() -> None:
        async with SearchServer(home(), port=0) as server:
            with pytest.raises(ConfigError, match="cannot listen on"):
                await SearchServer(home(), port=server.port).start()

    asyncio.run(main())


def test_closing_ends_every_thread_also_while_it_works():
    before = set(threading.enumerate())

    async def main() -> None:
        retriever = Gated()
        server = await SearchServer(retriever, port=0).start()
        client = ServerRetriever(server.url, **{**QUICK, "retries": 0})
        asked = asyncio.create_task(client.search(["x"], 1))
        await until(retriever.busy.is_set)
        threading.Timer(0.05, retriever.gate.set).start()
        await server.close()
        with pytest.raises(WorldError):
            await asked
        await client.close()

    asyncio.run(main())
    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not {thread for thread in left if "search-server" in thread.name or isinstance(thread, threading.Timer)}


def test_a_dead_server_is_tried_again_and_then_the_worlds_failure():
    async def main() -> None:
        env = SearchEnv(source=f"http://127.0.0.1:{free_port()}", options=QUICK)
        await env.reset(Task("t", (), {}))
        with pytest.raises(WorldError, match="failed 3 times, the last time: ConnectError"):
            await env.search("x")
        await env.close()

    asyncio.run(main())


def test_a_chain_whose_server_is_dead_has_no_reward():
    agent = ReactAgent(
        ScriptedEngine(['Thought: x\nAction: search\nInput: {"query": "x"}', "Thought: x\nAnswer: y"]),
        tools=["search"],
        reward="qa_exact_match",
        resources={"pools": {"SearchEnv": {"options": {"source": f"http://127.0.0.1:{free_port()}", "options": QUICK}}}},
    )
    (trajectory,) = agent.run_sync(easy_search("test", 1))
    assert trajectory.outcome is Outcome.WORLD_FAILURE
    assert trajectory.reward is None
    assert "WorldError" in (trajectory.error or "")


def test_a_server_that_comes_back_is_found_again_by_the_same_client():
    async def main() -> None:
        port = free_port()
        client = ServerRetriever(f"http://127.0.0.1:{port}", retries=200, retry_s=0.01, timeout_s=30.0, deadline_s=100.0)
        asked = asyncio.create_task(client.search(["city"], 1))
        await asyncio.sleep(0)
        async with SearchServer(home(), port=port):
            assert len((await asked)[0]) == 1
        async with SearchServer(home(), port=port):
            assert len((await client.search(["city"], 1))[0]) == 1
        await client.close()

    asyncio.run(main())


def test_environments_of_one_loop_share_a_connection_and_the_last_one_closes_it():
    from agentfly.envs.search import sources

    async def main() -> None:
        async with SearchServer(home(), port=0) as server:
            envs = [SearchEnv(source=server.url, options=QUICK) for _ in range(5)]
            for env in envs:
                await env.reset(Task("t", (), {}))
            assert len({id(env._retriever) for env in envs}) == 1
            results = await asyncio.gather(*(env.search("city") for env in envs))
            assert len({result.observation for result in results}) == 1
            for env in envs:
                await env.close()
            assert not sources._remote

    asyncio.run(main())


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://user:secret@host", "nonsense"])
def test_an_address_that_is_none_is_refused_without_repeating_a_password(url):
    with pytest.raises(ConfigError, match="looks like http://host:port") as found:
        ServerRetriever(url)
    assert "secret" not in str(found.value)


@pytest.mark.skipif(os.name != "posix", reason="ends the process with a signal")
def test_the_command_serves_until_it_is_told_to_stop(write_jsonl):
    corpus = write_jsonl([{"id": 1, "title": "Cat", "text": "A cat."}])
    command = [sys.executable, "-m", "agentfly", "search-server", "--corpus", str(corpus), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        url = re.search(r"1 passages by bm25 at (http://127\.0\.0\.1:\d+)$", line.strip())
        assert url, line + process.stderr.read()
        answer = httpx.post(url[1] + "/search", json={"queries": ["cat"]}, trust_env=False, timeout=60).json()
        assert answer["results"][0][0]["title"] == "Cat"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out, err) == (0, "stopped\n", "")
    finally:
        process.kill()
        process.communicate()


def test_the_command_passes_what_is_said_about_the_model_on_to_the_encoder(monkeypatch):
    from agentfly.cli import main
    from agentfly.cli import search_server as command
    from agentfly.envs.search import sources

    opened: list[Source] = []

    async def serve(*given: Any) -> None:
        """Nothing is served."""

    monkeypatch.setattr(sources, "open_local", lambda source: opened.append(source))
    monkeypatch.setattr(command, "_serve", serve)
    words = ["search-server", "--retriever", "dense", "--model", "m"]
    more = ["--pooling", "cls", "--query-prefix", "query: ", "--passage-prefix", "passage: ", "--max-length", "128"]
    assert main([*words, *more]) == main(words) == 0
    given, plain = (dict(source.options) for source in opened)
    assert given == {"pooling": "cls", "query_prefix": "query: ", "passage_prefix": "passage: ", "max_length": 128}
    assert plain == {}


def test_the_command_refuses_what_it_cannot_serve(capsys):
    from agentfly.cli import main

    wrong: list[tuple[list[str], str]] = [
        (["--corpus", "missing.jsonl"], "no corpus 'missing.jsonl'"),
        (["--corpus", "web:serper"], "serves passages"),
        (["--retriever", "dense"], "needs `model`"),
        (["--port", "70000"], "a port is from 0"),
        (["--host", "0.0.0.0", "--port", "0"], "needs a token"),
    ]
    for more, says in wrong:
        assert main(["search-server", *more]) == 2
        assert says in capsys.readouterr().err


def test_what_a_stranger_answers_is_the_worlds_failure():
    async def main() -> None:
        async def answer(reader: Any, writer: Any) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 16\r\nConnection: close\r\n\r\n{"results": [1]}')
            await writer.drain()
            writer.close()

        stranger = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = ServerRetriever(f"http://127.0.0.1:{stranger.sockets[0].getsockname()[1]}", **QUICK)
        with pytest.raises(WorldError, match="something else than results"):
            await client.search(["x"], 1)
        await client.close()
        stranger.close()

    asyncio.run(main())
