"""The HTTP client: what is retried, what is not, and what a caller learns. The server side is httpx's own fake transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from agentfly.net.client import (
    HttpAnswer,
    HttpClient,
    OutOfAttempts,
    OutOfTime,
    Rejected,
    RetryPolicy,
    Transient,
    retry,
    retry_after,
)

FAST = RetryPolicy(retries=2, pause_s=0.0, deadline_s=30.0)


def client_of(handler: Callable[[httpx.Request], httpx.Response], **options: object) -> HttpClient:
    client = HttpClient("http://127.0.0.1:9", **options)  # type: ignore[arg-type]
    fake = httpx.AsyncClient(transport=httpx.MockTransport(handler), headers=client._headers)
    client.client = lambda: fake  # type: ignore[method-assign]
    return client


async def get(client: HttpClient, policy: RetryPolicy = FAST) -> HttpAnswer:
    return await retry(lambda: client.send("GET", client.base_url), policy)


def test_a_busy_server_is_asked_again_until_it_answers() -> None:
    answers = iter([httpx.Response(503), httpx.Response(429, headers={"retry-after": "0"}), httpx.Response(200, json={"a": 1})])
    found = asyncio.run(get(client_of(lambda request: next(answers))))
    assert found.json() == {"a": 1}


def test_attempts_are_counted_and_the_last_failure_is_named() -> None:
    calls = []

    def refuse(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(500, json={"error": {"message": "out of\nmemory"}})

    with pytest.raises(OutOfAttempts, match="HTTP 500: out of memory"):
        asyncio.run(get(client_of(refuse)))
    assert len(calls) == 3


def test_a_broken_connection_is_transient() -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route")

    with pytest.raises(OutOfAttempts, match="ConnectError: no route"):
        asyncio.run(get(client_of(fail)))


def test_a_refusal_is_not_retried() -> None:
    calls = []

    def refuse(request: httpx.Request) -> httpx.Response:
        calls.append(request)
        return httpx.Response(403, text="no")

    with pytest.raises(Rejected, match="HTTP 403: no") as raised:
        asyncio.run(get(client_of(refuse)))
    assert raised.value.status == 403
    assert len(calls) == 1


def test_the_deadline_covers_all_attempts() -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(OutOfTime):
        asyncio.run(retry(never, RetryPolicy(deadline_s=0.05)))


def test_a_secret_is_removed_from_every_text_also_percent_encoded() -> None:
    client = client_of(lambda request: httpx.Response(400, text="your key a+b/c or a%2Bb%2Fc is bad"), secret="a+b/c")
    with pytest.raises(Rejected, match=r"your key \*\*\* or \*\*\* is bad"):
        asyncio.run(get(client))
    assert "a+b/c" not in repr(client)


def test_an_answer_larger_than_the_bound_is_refused_while_it_is_read() -> None:
    client = client_of(lambda request: httpx.Response(200, content=b"x" * 3000), max_body=1000)
    with pytest.raises(Rejected, match="the answer has more than"):
        asyncio.run(get(client))


def test_deeply_nested_json_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested"):
        HttpAnswer(200, {}, b"[" * 200_000).json()


@pytest.mark.parametrize(
    ("header", "seconds"), [(None, None), ("", None), ("2", 2.0), ("-5", 0.0), ("1e9", 60.0), ("Tue, 1 Jan", None)]
)
def test_retry_after_is_bounded(header: str | None, seconds: float | None) -> None:
    assert retry_after(header) == seconds


def test_a_thread_without_a_loop_gets_the_same_errors() -> None:
    with pytest.raises(Transient, match="ConnectError"):
        HttpClient("http://127.0.0.1:9").send_blocking("GET", "http://127.0.0.1:9/", timeout_s=5)
