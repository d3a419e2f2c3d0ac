"""Web search against providers on loopback: how each is asked, tried again, remembered; and keys that stay secret."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
import time
from typing import Any

import pytest

from agentfly.envs.search.env import SearchEnv
from agentfly.envs.search.web import cache as web_cache
from agentfly.envs.search.web.cache import DiskCache, Layered, open_cache
from agentfly.envs.search.web.providers import PROVIDERS, WebSearch
from agentfly.errors import ConfigError, WorldError
from agentfly.types import Task

from ..fakes import FakeProvider, FakeRedis, running

KEY = "key-7f3a-secret"
FOUND = {"organic": [{"title": "Lima", "link": "https://example.org/lima", "snippet": "Lima is the capital."}]}
QUICK: dict[str, Any] = {"retry_s": 0.01, "timeout_s": 30.0, "rate": 1000.0}


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    for row in PROVIDERS.values():
        if row.key:
            monkeypatch.setenv(row.key, KEY)


def ask(*queries: str, provider: str = "serper", k: int = 2, **options: Any) -> list[list[tuple[str, str]]]:
    """Title and text of what is found, queries one after the other, by one client."""

    async def main() -> list[list[tuple[str, str]]]:
        search = WebSearch(provider, **{**QUICK, **options})
        try:
            return [
                [(hit.passage.title, hit.passage.text) for hit in (await search.search([query], k))[0]] for query in queries
            ]
        finally:
            await search.close()

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("provider", "answer", "method", "given", "header"),
    [
        ("serper", FOUND, "POST", {"q": "capital of Peru", "num": 2}, ("x-api-key", KEY)),
        (
            "tavily",
            {"results": [{"title": "Lima", "url": "https://example.org/lima", "content": "Lima is the capital."}]},
            "POST",
            {"query": "capital of Peru", "max_results": 2},
            ("authorization", f"Bearer {KEY}"),
        ),
        (
            "brave",
            {
                "web": {
                    "results": [
                        {
                            "title": "<b>Lima</b>",
                            "url": "https://example.org/lima",
                            "description": "Lima is the <strong>capital</strong>.",
                        }
                    ]
                }
            },
            "GET",
            {"q": "capital of Peru", "count": "2"},
            ("x-subscription-token", KEY),
        ),
        (
            "searxng",
            {
                "results": [
                    {"title": "Lima", "url": "https://example.org/lima", "content": "Lima is the capital."},
                    7,
                    {"title": "no link"},
                ]
            },
            "GET",
            {"q": "capital of Peru", "format": "json"},
            None,
        ),
    ],
)
def test_each_provider_is_asked_in_its_own_way_and_read_alike(provider, answer, method, given, header):
    with running(FakeProvider([answer])) as server:
        assert ask("capital of Peru", provider=provider, url=server.url) == [
            [("Lima", "Lima is the capital. (https://example.org/lima)")]
        ]
    (asked,) = server.asked
    assert (asked["method"], asked["given"]) == (method, given)
    if header:
        assert asked["headers"][header[0]] == header[1]


def test_the_environment_searches_the_web_and_retrieves_what_was_found():
    async def main(url: str) -> tuple[str, str, str]:
        env = SearchEnv(source="web:serper", options={**QUICK, "url": url})
        await env.reset(Task("t", (), {}))
        shown = (await env.search("capital of Peru")).observation
        page = (await env.retrieve(shown[1:9])).observation
        other = (await env.retrieve("ffffffff")).observation
        await env.close()
        return shown, page, other

    with running(FakeProvider([FOUND])) as server:
        shown, page, other = asyncio.run(main(server.url))
    assert shown.endswith("] Lima: Lima is the capital. (https://example.org/lima)")
    assert page == "Lima\nLima is the capital. (https://example.org/lima)"
    assert other.startswith("There is no passage")


def test_a_busy_provider_is_tried_again_when_it_says():
    with running(
        FakeProvider([(429, {"Retry-After": "0"}, "slow down"), (503, {}, "busy"), (200, {}, "<html>"), FOUND])
    ) as server:
        assert ask("x", url=server.url)[0][0][0] == "Lima"
        assert len(server.asked) == 4


def test_a_provider_that_stays_broken_is_the_worlds_failure():
    with running(FakeProvider([(500, {}, "oops")])) as server:
        with pytest.raises(WorldError, match="serper failed 3 times, the last time: HTTP 500: oops"):
            ask("x", url=server.url, retries=2)
        server.answers = [(422, {}, "bad query")]
        with pytest.raises(WorldError, match="refused the query: HTTP 422"):
            ask("x", url=server.url)
    with pytest.raises(WorldError, match="serper failed 2 times, the last time: ConnectError"):
        ask("x", url=server.url, retries=1)


def test_a_provider_that_is_silent_ends_at_the_deadline():
    with running(FakeProvider([FOUND])) as server:
        server.gate.clear()
        with pytest.raises(WorldError, match=r"gave no answer within 0\.3 s"):
            ask("x", url=server.url, deadline_s=0.3)


@pytest.mark.parametrize("status", [401, 403, 500, 400])
def test_the_key_is_in_no_error_and_no_log_even_if_the_provider_repeats_it(status, caplog):
    caplog.set_level(logging.DEBUG)
    provider = FakeProvider([(status, {}, f"the key {KEY} is no good")])
    with running(provider) as server, pytest.raises((ConfigError, WorldError)) as found:
        ask("x", url=server.url, retries=1)
    assert "***" in str(found.value)
    assert KEY not in str(found.value) + repr(found.value) + caplog.text
    assert isinstance(found.value, ConfigError) == (status in (401, 403))


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("before", range(140, 310, 10))
def test_no_part_of_the_key_is_told_where_a_long_answer_is_cut(status, before):
    answer = {"error": "x" * before + KEY} if status == 200 else (500, {}, "x" * before + KEY)
    with running(FakeProvider([answer])) as server, pytest.raises(WorldError) as found:
        ask("x", url=server.url, retries=0)
    assert KEY[:4] not in str(found.value)


def test_the_key_is_in_no_passage_and_no_representation():
    answer = {"organic": [{"title": f"t {KEY}", "link": f"https://x/?k={KEY}", "snippet": f"s {KEY}"}]}
    with running(FakeProvider([answer])) as server:
        assert KEY not in str(ask("x", url=server.url))
    assert KEY not in repr(WebSearch("serper", cache="none"))


def test_missing_keys_addresses_and_wrong_options_are_refused(monkeypatch):
    monkeypatch.delenv("BRAVE_API_KEY")
    for options, says in (
        ({"provider": "brave"}, "set BRAVE_API_KEY"),
        ({"provider": "searxng"}, "set SEARXNG_URL"),
        ({"provider": "bing"}, "no web search is called 'bing'"),
        ({"provider": "serper", "url": "file:///etc/passwd"}, "must look like https://host"),
        ({"provider": "serper", "rate": 0}, "above 0"),
        ({"provider": "serper", "cache": "memory"}, "no cache is called"),
        ({"provider": "serper", "cache": "redis"}, "needs REDIS_URL"),
        ({"provider": "serper", "ttl_s": 0}, "ttl_s must be above 0"),
        ({"provider": "serper", "deadline_s": 110.0}, "deadline_s is above 0 and at most 100"),
    ):
        with pytest.raises(ConfigError, match=says):
            WebSearch(**options)


def test_an_answer_is_remembered_on_disk_by_query_and_size_and_forgotten_when_old():
    with running(FakeProvider([FOUND])) as server:
        first = ask("a", "a", url=server.url)
        assert ask("a", url=server.url) == [first[0]]
        assert len(server.asked) == 1
        ask("a", url=server.url, k=5)
        ask("b", url=server.url)
        assert len(server.asked) == 3
        ask("a", url=server.url, ttl_s=1e-6)
        ask("a", url=server.url, cache="none")
        assert len(server.asked) == 5


def test_chains_that_ask_the_same_at_once_send_one_request():
    async def main(server: FakeProvider) -> None:
        search = WebSearch("serper", url=server.url, cache="none", **QUICK)
        server.gate.clear()
        tasks = [asyncio.create_task(search.search(["same"], 2)) for _ in range(8)]
        async with asyncio.timeout(60):
            while not server.asked:
                await asyncio.sleep(0.005)
        tasks[0].cancel()
        server.gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert all(each[0][0].passage.title == "Lima" for each in found[1:])
        assert search.requests == len(server.asked) == 1
        await search.close()

    with running(FakeProvider([FOUND])) as server:
        asyncio.run(main(server))


def test_more_queries_than_the_rate_allows_are_refused_at_once_and_the_others_are_served_as_if_they_were_alone():
    async def main(server: FakeProvider) -> None:
        search = WebSearch("serper", url=server.url, rate=2.0, cache="none")
        search._latest_turn_s = 3.0  # with a minute for each answer
        loop = asyncio.get_running_loop()
        await search.search(["first"], 1)  # creates the HTTP client, which blocks the loop on a busy machine
        begun = loop.time()
        tasks = [asyncio.create_task(search.search([f"q{number}"], 1)) for number in range(40)]
        found = await asyncio.gather(*tasks, return_exceptions=True)
        served = [number for number, each in enumerate(found) if not isinstance(each, BaseException)]
        assert served == list(range(len(served))) and 5 <= len(served) <= 7, "those of the first three seconds"
        assert all(isinstance(found[number], WorldError) for number in range(len(served), 40))
        assert "serper is not asked: its turn would come in" in str(found[-1])
        assert len(server.asked) == len(served) + 1
        assert loop.time() >= begun + (len(served) - 1) * 0.5 - 0.01
        assert len((await search.search(["later"], 1))[0]) == 1, "the line is as short as it looks"
        await search.close()

    with running(FakeProvider([FOUND])) as server:
        asyncio.run(main(server))


def test_a_query_whose_callers_were_all_cancelled_is_not_sent_and_uses_no_turn():
    async def main(server: FakeProvider) -> None:
        search = WebSearch("serper", url=server.url, rate=1.0, cache="none")
        await search.search(["first"], 1)
        tasks = [asyncio.create_task(search.search(["left"], 1)) for _ in range(3)]
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not search._in_flight
        await search.search(["second"], 1)
        assert [each["given"]["q"] for each in server.asked] == ["first", "second"]
        await search.close()

    with running(FakeProvider([FOUND])) as server:
        asyncio.run(main(server))


BLOCKED = {"query": "z", "results": [], "unresponsive_engines": [["google", "too many requests"]]}


@pytest.mark.parametrize(
    ("provider", "answer", "says"),
    [
        ("searxng", BLOCKED, "too many requests"),
        ("searxng", {"results": 5}, "'results' is no list"),
        ("serper", {"error": "quota"}, "quota"),
        ("serper", {"organic": [], "errors": ["quota"]}, "quota"),
        ("serper", {"organic": 5}, "'organic' is no list"),
        ("serper", {"organic": "abc"}, "'organic' is no list"),
        ("brave", {"web": 5}, "something else than an object with 'web.results'"),
        ("tavily", [1], "something else than an object with 'results'"),
        ("tavily", (200, {}, "null"), "something else than an object with 'results'"),
    ],
)
def test_an_answer_of_no_use_is_tried_again_and_then_the_worlds_failure_and_never_remembered(provider, answer, says):
    with running(FakeProvider([answer])) as server:
        with pytest.raises(WorldError, match=f"{provider} failed 2 times, the last time: the answer is of no use: .*{says}"):
            ask("x", provider=provider, url=server.url, retries=1)
        assert len(server.asked) == 2
        row = {"title": "Lima", "url": "https://l", "link": "https://l", "content": "c", "snippet": "s", "description": "d"}
        server.answers = [{"organic": [row], "results": [row], "web": {"results": [row]}}]
        assert ask("x", provider=provider, url=server.url)[0][0][0] == "Lima"


def test_nothing_found_is_shown_and_asked_again_the_next_time():
    with running(FakeProvider([{"organic": []}, {"searchParameters": {}}, FOUND])) as server:
        assert ask("x", "x", url=server.url) == [[], []]
        assert ask("x", "x", url=server.url)[1][0][0] == "Lima"
        assert len(server.asked) == 3


def test_a_refusal_by_searxng_speaks_of_its_settings_and_of_no_key():
    provider = FakeProvider([(403, {}, "Forbidden")])
    with running(provider) as server, pytest.raises(ConfigError, match="its JSON format may be disabled") as found:
        ask("x", provider="searxng", url=server.url)
    assert "key" not in str(found.value)


def test_a_provider_is_asked_for_no_more_than_it_gives():
    with running(FakeProvider([{"results": []}])) as server:
        ask("x", provider="tavily", url=server.url, k=50)
    assert server.asked[0]["given"]["max_results"] == 20


def test_half_characters_are_asked_and_remembered_without_harm():
    answer = (200, {}, '{"organic": [{"title": "half \\ud800", "link": "https://x", "snippet": "s \\udc00"}]}')
    with running(FakeProvider([answer])) as server:
        first = ask("\ud800 lone", "\ud800 lone", url=server.url)
        assert len(server.asked) == 1
    str(first).encode()


def test_a_provider_that_wants_to_be_left_alone_is_left_alone_by_all_chains():
    async def main(server: FakeProvider) -> None:
        search = WebSearch("serper", url=server.url, rate=1000.0, cache="none", retries=0)
        begun = asyncio.get_running_loop().time()
        with pytest.raises(WorldError, match="429"):
            await search.search(["one chain"], 1)
        server.answers = [FOUND]
        await search.search(["another chain"], 1)
        assert asyncio.get_running_loop().time() >= begun + 0.5
        await search.close()

    with running(FakeProvider([(429, {"Retry-After": "0.5"}, "slow down")])) as server:
        asyncio.run(main(server))


def test_a_damaged_cache_begins_anew_and_one_that_cannot_be_made_is_done_without(tmp_path, caplog):
    path = tmp_path / "web.sqlite"
    path.write_bytes(b"this is no database " * 100)
    cache = DiskCache(60.0, path)
    assert cache.get("k") is None
    cache.put("k", "text")
    assert cache.get("k") == "text"
    assert "begins anew" in caplog.text
    cache.close()
    (tmp_path / "file").write_text("x")
    blocked = DiskCache(60.0, tmp_path / "file" / "web.sqlite")
    blocked.put("k", "text")
    assert blocked.get("k") is None
    assert not blocked.usable
    assert "not remembered" in caplog.text
    blocked.close()


def test_a_locked_cache_is_a_miss_and_not_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(web_cache, "BUSY_S", 0.05)
    cache = DiskCache(60.0, tmp_path / "web.sqlite")
    cache.put("k", "text")
    other = sqlite3.connect(tmp_path / "web.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    cache.put("l", "text")
    other.execute("ROLLBACK")
    other.close()
    assert (cache.get("k"), cache.get("l")) == ("text", None)
    cache.put("l", "text")
    assert cache.get("l") == "text"
    cache.close()


def test_what_a_cache_holds_that_is_no_answer_is_asked_again():
    with running(FakeProvider([FOUND])) as server:
        ask("a", url=server.url)
        cache = DiskCache(60.0)
        cache._do("UPDATE said SET text = ?", ("[[1]]",))
        cache.close()
        assert ask("a", url=server.url)[0][0][0] == "Lima"
        assert len(server.asked) == 2


# ---- Redis


def redis_cache(url: str, **options: Any):
    pytest.importorskip("redis", reason="redis is not installed: pip install 'agentfly[search]'")
    from agentfly.envs.search.web.redis_cache import RedisCache

    return RedisCache(url, 60.0, **options)


def test_answers_are_remembered_in_redis_where_its_address_is_set(monkeypatch):
    pytest.importorskip("redis", reason="redis is not installed: pip install 'agentfly[search]'")
    monkeypatch.setattr("agentfly.envs.search.web.redis_cache.TIMEOUT_S", 30.0)  # a loaded machine is not a dead Redis
    with running(FakeRedis()) as redis, running(FakeProvider([FOUND])) as server:
        monkeypatch.setenv("REDIS_URL", redis.url)
        first = ask("a", url=server.url, ttl_s=3600.0)
        assert ask("a", url=server.url, ttl_s=3600.0) == first
        assert len(server.asked) == 1
        (value,) = redis.data.values()
        assert json.loads(value)[0][1] == "Lima"
        assert all(key.startswith(b"agentfly:search:") and b"capital" not in key for key in redis.data)
        disk = DiskCache(60.0)
        assert disk._do("SELECT count(*) FROM said", ()) == (0,), "the disk keeps nothing while Redis answers"
        disk.close()


def test_a_dead_redis_makes_it_slower_and_never_failed(monkeypatch, caplog):
    pytest.importorskip("redis", reason="redis is not installed: pip install 'agentfly[search]'")
    with running(FakeRedis()) as redis:
        monkeypatch.setenv("REDIS_URL", redis.url)
    with running(FakeProvider([FOUND])) as server:
        first = ask("a", "a", url=server.url)
        assert ask("a", url=server.url) == [first[0]]
        assert len(server.asked) == 1, "the disk remembers what Redis could not"
    assert "Redis does not answer" in caplog.text
    assert "sesame-secret" not in caplog.text


def test_redis_that_dies_in_the_middle_is_left_alone_for_a_while():
    with running(FakeRedis()) as redis:
        found = redis_cache(redis.url, timeout_s=30.0, rest_s=3600.0)
        found.put("k", "text")
        assert found.get("k") == "text"
    assert found.get("k") is None
    assert not found.usable
    with running(FakeRedis()) as other:
        found.put("k", "text")
        assert other.commands == []
    found.close()


def test_a_silent_redis_is_given_up_and_asked_again_after_its_rest():
    with running(FakeRedis()) as redis:
        found = redis_cache(redis.url, timeout_s=0.2, rest_s=0.05)
        redis.silent = True
        assert found.get("k") is None
        redis.silent = False
        redis.data[b"agentfly:search:k"] = b"text"
        deadline, seen = time.monotonic() + 60, None
        while seen != "text" and time.monotonic() < deadline:
            time.sleep(0.01)
            seen = found.get("k")
        assert seen == "text"
        found.close()


def test_an_address_of_redis_that_is_none_is_refused_without_repeating_it():
    with pytest.raises(ConfigError, match="REDIS_URL is not an address") as found:
        redis_cache("sesame-secret")
    assert "sesame" not in str(found.value)


def test_of_two_caches_the_second_serves_while_the_first_is_down(tmp_path):
    class Down:
        usable = False

        def get(self, key):
            pytest.fail("it is down")

        put = close = lambda self, *args: None

    both = Layered(Down(), DiskCache(60.0, tmp_path / "web.sqlite"))
    both.put("k", "text")
    assert both.get("k") == "text"
    assert both.usable
    both.close()


def test_without_the_package_redis_is_a_warning_and_the_disk_is_used(monkeypatch, caplog):
    from agentfly import plugins
    from agentfly.errors import MissingExtra

    monkeypatch.setenv("REDIS_URL", "redis://localhost")
    monkeypatch.setitem(plugins.BUILTIN["caches"], "redis", "agentfly.envs.search.web.redis_cache_missing:X")

    def missing(module: str, name: str) -> Any:
        raise plugins.missing_extra(repr(name), "redis")

    monkeypatch.setattr(plugins, "_import", missing)
    found = open_cache()
    assert isinstance(found, DiskCache)
    assert "pip install 'agentfly[search]'" in caplog.text
    found.close()
    with pytest.raises(MissingExtra):
        open_cache("redis")
