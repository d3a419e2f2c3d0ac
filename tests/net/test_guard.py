"""A server on loopback answers this machine's programs, not web pages; a server beyond loopback asks for a token."""

from __future__ import annotations

import pytest

from agentfly.errors import ConfigError
from agentfly.net.address import is_loopback, is_url, url_of
from agentfly.net.guard import Guard

LOCAL = ("Host", "127.0.0.1:8000")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "LOCALHOST:65535", "[::1]:8000", "[::1]", "127.0.0.1:"])
def test_requests_for_this_machine_pass(host: str) -> None:
    assert Guard("127.0.0.1").refuse([("Host", host)]) is None


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "", "0.0.0.0"]
)
def test_a_foreign_host_is_refused(host: str) -> None:
    status, sentence = Guard("localhost").refuse([("host", host)]) or (0, "")
    assert status == 403
    assert "localhost" in sentence


@pytest.mark.parametrize("headers", [[], [LOCAL, ("host", "evil.example")]])
def test_a_request_has_exactly_one_host(headers: list[tuple[str, str]]) -> None:
    assert (Guard("127.0.0.1").refuse(headers) or (0,))[0] == 400


def test_any_origin_is_refused_unless_the_server_has_pages() -> None:
    same, other = ("Origin", "http://127.0.0.1:8000"), ("Origin", "http://evil.example")
    assert (Guard("127.0.0.1").refuse([LOCAL, same]) or (0,))[0] == 403
    assert Guard("127.0.0.1", own_pages=True).refuse([LOCAL, same]) is None
    for origin in (other, ("Origin", "null"), ("Origin", "http://127.0.0.1:8001")):
        assert (Guard("127.0.0.1", own_pages=True).refuse([LOCAL, origin]) or (0,))[0] == 403
    assert (Guard("127.0.0.1", own_pages=True).refuse([LOCAL, same, other]) or (0,))[0] == 403


def test_a_token_is_asked_for_in_constant_time_and_never_repeated() -> None:
    guard = Guard("0.0.0.0", "secret-token", cure="set TOKEN")
    host = ("Host", "gpu-7.cluster:9000")
    assert guard.refuse([host, ("Authorization", "Bearer secret-token")]) is None
    for given in ("Bearer wrong-token", "secret-token", "Bearer secret-tokenx", "Bearer \u00e9", ""):
        status, sentence = guard.refuse([host, ("Authorization", given)]) or (0, "")
        assert status == 401
        assert "secret" not in sentence
        assert "set TOKEN" in sentence


def test_beyond_loopback_a_usable_token_is_required() -> None:
    for host, token in [("0.0.0.0", None), ("0.0.0.0", ""), ("10.0.0.1", "short"), ("127.0.0.1", "with a space")]:
        with pytest.raises(ConfigError, match="token"):
            Guard(host, token)


def test_addresses() -> None:
    assert is_loopback("localhost")
    assert is_loopback("[::1]")
    assert not is_loopback("localhost.example")
    assert not is_loopback(None)
    assert is_url("http://host:1/v1")
    for text in ("host:1", "ftp://host", "http://user:pass@host", "http://host:port", "http://host:0", "http://"):
        assert not is_url(text), text
    assert url_of("ws", "::1", 80) == "ws://[::1]:80"


def test_a_browser_shows_the_token_in_its_cookie_or_in_the_address() -> None:
    guard = Guard("127.0.0.1", "secret-token", own_pages=True, cookie="c", cure="open the address")
    origin = ("Origin", "http://127.0.0.1:8000")
    assert guard.refuse([LOCAL, ("Cookie", "a=b; c=secret-token")]) is None
    assert guard.refuse([LOCAL, ("Cookie", "a=b"), ("Cookie", "c=secret-token")]) is None
    assert guard.refuse([LOCAL], "GET", "x=1&token=secret-token") is None
    assert guard.in_query("token=secret-token")
    assert not guard.in_query("token=secret-tokenx")
    for headers, query in (
        ([("Cookie", "c=secret-tokenx")], ""),
        ([("Cookie", "d=secret-token")], ""),
        ([("Cookie", "xc=secret-token")], ""),
        ([("Cookie", "c")], ""),
        ([], "token="),
        ([], "tokens=secret-token"),
    ):
        assert (guard.refuse([LOCAL, *headers], "GET", query) or (0,))[0] == 401
    # What can change something must come from the server's own page, or from a program that shows the token itself.
    cookie = ("Cookie", "c=secret-token")
    assert (guard.refuse([LOCAL, cookie], "POST") or (0,))[0] == 403
    assert guard.refuse([LOCAL, cookie, origin], "POST") is None
    assert guard.refuse([LOCAL, ("Authorization", "Bearer secret-token")], "POST") is None


def test_without_a_cookie_the_token_counts_only_in_the_header() -> None:
    guard = Guard("127.0.0.1", "secret-token")
    assert (guard.refuse([LOCAL, ("Cookie", "c=secret-token")]) or (0,))[0] == 401
    assert (guard.refuse([LOCAL], "GET", "token=secret-token") or (0,))[0] == 401


def test_a_server_that_checks_keys_itself_needs_no_token_beyond_loopback() -> None:
    guard = Guard("0.0.0.0", keyed=True)
    assert guard.refuse([("Host", "machine.example")]) is None
    assert guard.refuse([("Host", "machine.example"), ("Origin", "http://evil.example")]) is not None
