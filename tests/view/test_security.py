"""Who may read the dashboard, and what a hostile run, page or path can do: nothing."""

from __future__ import annotations

import asyncio
import socket
import zlib
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed: pip install 'agentfly[serve]'")

from agentfly.errors import ConfigError
from agentfly.net.guard import Guard
from agentfly.runs import RunReader, RunStore
from agentfly.runs.bodies import packed
from agentfly.view.app import Dashboard, cookie_name
from agentfly.view.library import Library

from .stored import BEARER, SCRIPT, TOKEN, ask, make_chain, make_run

COOKIE = {"Cookie": f"{cookie_name(TOKEN)}={TOKEN}"}
ORIGIN = {"Origin": "http://127.0.0.1:8360"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("security")
    make_run(folder / "runs" / "one")
    (folder / "secret.txt").write_text("secret")
    return folder / "runs"


@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/index.html", "/api/changes", "/run/one", "/api/chat"])
def test_without_the_token_nothing_is_shown(runs: Path, path: str) -> None:
    response = ask(runs, path, headers={})
    assert response.status_code == 401
    assert "agentfly view" in response.json()["error"]
    assert TOKEN not in response.text


def test_a_wrong_token_is_refused_wherever_it_stands(runs: Path) -> None:
    wrong = [
        {"Authorization": "Bearer a-token-for-testz"},
        {"Authorization": TOKEN},
        {"Cookie": f"{cookie_name(TOKEN)}=a-token-for-testz"},
        {"Cookie": f"other={TOKEN}"},
    ]
    assert [ask(runs, "/api/runs", headers=each).status_code for each in wrong] == [401] * 4
    assert ask(runs, "/?token=a-token-for-testz", headers={}).status_code == 401


def test_the_printed_address_gives_a_cookie_and_is_left(runs: Path) -> None:
    response = ask(runs, f"/run/one%2Ftwo?token={TOKEN}&step=3", headers={})
    assert response.status_code == 303
    assert response.headers["location"] == "/run/one%2Ftwo?step=3"
    cookie = response.headers["set-cookie"]
    assert cookie.startswith(f"{cookie_name(TOKEN)}={TOKEN};")
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert ask(runs, "/api/runs", headers=COOKIE).status_code == 200


def test_the_redirect_stays_on_this_server(runs: Path) -> None:
    for path in ("//evil.example/x", "/%5Cevil.example"):
        response = ask(runs, f"http://127.0.0.1:8360{path}?token={TOKEN}", headers={})
        assert not response.headers.get("location", "").startswith(("//", "/\\", "http"))


def test_a_foreign_host_is_refused_also_with_the_token(runs: Path) -> None:
    for host in ("evil.example", "evil.example:8360", "127.0.0.1.evil.example", "0.0.0.0"):
        assert ask(runs, "/api/runs", headers={**BEARER, "Host": host}).status_code == 403


def test_a_page_of_another_origin_is_refused_also_with_the_cookie(runs: Path) -> None:
    for origin in ("http://evil.example", "null", "https://127.0.0.1:8360", "http://127.0.0.1:8361"):
        assert ask(runs, "/api/runs", headers={**COOKIE, "Origin": origin}).status_code == 403
        assert ask(runs, "/api/chat", headers={**COOKIE, "Origin": origin}, method="POST", json={}).status_code == 403
    assert ask(runs, "/api/runs", headers={**COOKIE, **ORIGIN}).status_code == 200


def test_a_browser_that_changes_something_must_name_its_origin(runs: Path) -> None:
    assert ask(runs, "/api/chat", headers=COOKIE, method="POST", json={}).status_code == 403
    assert ask(runs, "/api/chat", headers={**COOKIE, **ORIGIN}, method="POST", json={}).status_code == 400
    assert ask(runs, "/api/chat/x", headers=COOKIE, method="DELETE").status_code == 403


def test_a_form_of_another_page_cannot_open_a_chat(runs: Path) -> None:
    """A form can send only these content types without asking; the server takes JSON alone."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        response = ask(runs, "/api/chat", method="POST", content=b'{"run": "one"}', headers={**BEARER, "Content-Type": kind})
        assert response.status_code == 400
        assert "application/json" in response.json()["error"]


def test_nothing_but_a_chat_can_be_written(runs: Path) -> None:
    paths = ["/api/runs", "/api/runs/one", "/api/runs/one/chains", "/api/compare", "/api/changes", "/", "/static/index.html"]
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        for path in paths:
            assert ask(runs, path, method=method).status_code in (404, 405), (method, path)
    assert ask(runs, "/api/chat", method="PUT").status_code in (404, 405)


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/..%2fapp.py",
        "/static/..%5capp.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/api/runs/..",
        "/api/runs/%2e%2e/config",
        "/api/runs/..%2fone/config",
        "/api/runs/one%2f..%2fone/config",
        "/api/runs/%2fetc/config",
        "/api/runs/one%00/config",
        "/api/runs/.%2fone/config",
    ],
)
def test_no_path_leaves_the_folder(runs: Path, path: str) -> None:
    response = ask(runs, "http://127.0.0.1:8360" + path)
    assert response.status_code == 404
    assert "secret" not in response.text
    assert "root:" not in response.text


def test_links_to_other_folders_are_not_runs(runs: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "elsewhere" / "hidden")
    inside = tmp_path / "runs"
    inside.mkdir()
    (inside / "linked").symlink_to(other)
    (inside / "real").mkdir()
    (inside / "real" / "run.db").symlink_to(other / "run.db")
    assert ask(inside, "/api/runs").json() == []
    assert ask(inside, "/api/runs/linked").status_code == 404
    assert ask(inside, "/api/runs/real").status_code == 404


def test_hostile_texts_come_back_as_json_and_nothing_else(tmp_path: Path) -> None:
    hostile = make_chain(f"{SCRIPT}-x", task=f"</script>{SCRIPT}", answer=f"{SCRIPT}\x1b[31m\ud800", error=SCRIPT)
    make_run(tmp_path / "runs" / "one", chains=[hostile])
    found = ask(
        tmp_path / "runs",
        "/api/runs/one/chains?limit=1",
        "/api/runs/one/chain/%3Cscript%3Ealert(1)%3C%2Fscript%3E-x",
        "/api/runs/one/chain/%3Cscript%3Ealert(1)%3C%2Fscript%3E-x/tokens",
        f"/api/runs/{SCRIPT}",
        f"/api/runs/one/chains?sort={SCRIPT}",
        f"/api/runs/one/chains?{SCRIPT}=1",
        f"/api/{SCRIPT}",
    )
    assert [response.status_code for response in found] == [200, 200, 200, 404, 400, 400, 404]
    for response in found:
        assert response.headers["content-type"] == "application/json"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert "script-src 'self'" in response.headers["content-security-policy"]
    assert found[0].json()["rows"][0]["id"] == f"{SCRIPT}-x"
    assert found[1].json()["messages"][-1]["content"].startswith(f"Answer: {SCRIPT}\x1b[31m")


def test_the_content_policy_allows_no_inline_script_and_no_other_origin(runs: Path) -> None:
    for path in ("/", "/run/one/chains", "/compare", "/static/index.html", "/api/runs"):
        response = ask(runs, path)
        policy = response.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["cross-origin-resource-policy"] == "same-origin"


def test_beyond_loopback_there_is_always_a_token(runs: Path) -> None:
    dashboard = Dashboard(runs, host="0.0.0.0", port=0)
    assert len(dashboard.token) >= 24
    with pytest.raises(ConfigError, match="token"):
        Guard("0.0.0.0", None, own_pages=True, cookie="c")
    asyncio.run(dashboard.release())


def test_two_dashboards_do_not_share_a_cookie() -> None:
    assert cookie_name("one-token-abc") != cookie_name("two-token-abc")


def test_a_body_that_expands_to_gigabytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller limit than the real one, which takes seconds to exceed."""
    assert packed.MAX_RECORDS <= 1 << 28
    monkeypatch.setattr(packed, "MAX_RECORDS", 1 << 20)
    folder = make_run(tmp_path / "runs" / "one")
    records = zlib.compress(bytes(1 << 24), level=9)
    data = packed.MARK + len(records).to_bytes(4, "little") + records
    with RunStore(folder / "run.db") as store, store.transaction() as db:
        db.execute("UPDATE bodies SET body = ? WHERE key = 1", (data,))
        name = db.execute("SELECT id FROM trajectories WHERE key = 1").fetchone()[0]
    response = ask(tmp_path / "runs", f"/api/runs/one/chain/{name}")
    assert response.status_code == 400
    assert "MiB" in response.json()["error"]


def test_a_statement_is_interrupted_and_the_next_one_works(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    monkeypatch.setattr(RunReader, "groups", lambda self, step, split: self._fetch(slow))
    first, second = ask(runs, "/api/runs/one/groups?step=1", "/api/runs/one/steps")
    assert first.status_code == 503
    assert "longer than" in first.json()["error"]
    assert second.status_code == 200


def test_the_store_is_opened_read_only(runs: Path) -> None:
    library = Library(runs)

    def write(reader: RunReader) -> None:
        with pytest.raises(Exception, match="readonly|query_only|attempt to write"):
            reader._fetch("DELETE FROM trajectories")

    asyncio.run(library.ask("one", write))
    library.close()


def test_numbers_that_sqlite_cannot_hold_are_an_error_of_the_request(runs: Path) -> None:
    for query in (
        f"step={10**30}",
        "step=x",
        "low=nan",
        "limit=0",
        "limit=1001",
        "cursor=[1",
        "trained=2",
        "in=all",
        "q=a&q=b",
    ):
        response = ask(runs, f"/api/runs/one/chains?{query}")
        assert response.status_code == 400, query
        assert response.json()["error"]


def test_the_real_server_keeps_the_rules(runs: Path) -> None:
    """One round trip over a socket: the guard stands before the application."""

    async def work() -> list[bytes]:
        async with Dashboard(runs, port=0, token=TOKEN) as dashboard:
            port = int(dashboard.url.rpartition(":")[2])

            async def send(head: str) -> bytes:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n")
                found = await reader.read()
                writer.close()
                return found

            good = f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {TOKEN}"
            return [
                await send(f"GET /api/runs HTTP/1.1\r\n{good}"),
                await send(f"GET /api/runs HTTP/1.1\r\nHost: 127.0.0.1:{port}"),
                await send(f"GET /api/runs HTTP/1.1\r\n{good.replace('127.0.0.1', 'evil.example')}"),
                await send(f"GET /static/../../../pyproject.toml HTTP/1.1\r\n{good}"),
            ]

    async def limited() -> list[bytes]:
        async with asyncio.timeout(60):
            return await work()

    statuses = [answer.split(b" ", 2)[1] for answer in asyncio.run(limited())]
    assert statuses == [b"200", b"401", b"403", b"404"]


def test_a_port_in_use_is_an_error_only_if_it_was_named(runs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        async def work() -> None:
            async with Dashboard(runs, port=taken.getsockname()[1]):
                pass

        with pytest.raises(ConfigError, match="cannot listen"):
            asyncio.run(work())
