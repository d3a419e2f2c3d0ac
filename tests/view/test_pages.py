"""Static files, page addresses, and the stream of changes over a real server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette", reason="Starlette is not installed: pip install 'agentfly[serve]'")

from agentfly.runs import RunStore
from agentfly.view import live
from agentfly.view.app import STATIC, Dashboard, StaticFiles, make_app
from agentfly.view.chats import Chats
from agentfly.view.library import Library
from agentfly.view.live import LibraryWatcher

from .stored import BEARER, TOKEN, make_run

DEADLINE_S = 240.0


def fetch(runs: Path, static: Path, *paths: str, **headers: str) -> list[httpx.Response]:
    async def work() -> list[httpx.Response]:
        library = Library(runs)
        app = make_app(library, LibraryWatcher(library), Chats(library), static=static)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            found = [await client.get(path, headers=headers) for path in paths]
        library.close()
        return found

    return asyncio.run(work())


@pytest.fixture
def static(tmp_path: Path) -> Path:
    folder = tmp_path / "static"
    (folder / "js").mkdir(parents=True)
    (folder / "index.html").write_text("<!doctype html><title>AgentFly</title>")
    (folder / "js" / "main.js").write_text("export const a = 1;\n" * 200)
    (folder / "favicon.svg").write_text("<svg/>")
    (folder / "outside").symlink_to("/etc/hostname")
    (tmp_path / "runs").mkdir()
    return folder


def test_every_address_of_a_page_is_the_page(static: Path) -> None:
    paths = ["/", "/run/one", "/run/a%2Fb/chain/t1-0-0?tab=tokens", "/compare?runs=a,b"]
    for response in fetch(static.parent / "runs", static, *paths):
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert "AgentFly" in response.text
    assert [each.status_code for each in fetch(static.parent / "runs", static, "/admin", "/index.html", "/run")] == [404] * 3


def test_files_have_their_type_and_are_asked_for_each_time(static: Path) -> None:
    script, icon = fetch(static.parent / "runs", static, "/static/js/main.js", "/static/favicon.svg")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert icon.headers["content-type"] == "image/svg+xml"
    assert script.headers["cache-control"] == "no-cache"
    assert script.headers["content-encoding"] == "gzip"
    tag = script.headers["etag"]
    (same,) = fetch(static.parent / "runs", static, "/static/js/main.js", **{"If-None-Match": tag})
    assert (same.status_code, same.content) == (304, b"")
    (static / "js" / "main.js").write_text("export const a = 2;")
    (changed,) = fetch(static.parent / "runs", static, "/static/js/main.js", **{"If-None-Match": tag})
    assert changed.status_code == 200


def test_only_files_of_the_folder_are_served(static: Path) -> None:
    paths = ["/static/outside", "/static/js", "/static/", "/static/js/../js/main.js", "/static/js%2f..%2findex.html"]
    statuses = [response.status_code for response in fetch(static.parent / "runs", static, *paths)]
    assert statuses == [404, 404, 404, 200, 404]  # the client resolves the fourth itself


def test_the_pages_of_the_package_name_only_files_that_exist() -> None:
    names = set(StaticFiles(STATIC)._files)
    if "index.html" not in names:
        pytest.skip("the pages are not in this checkout")
    html = (STATIC / "index.html").read_text()
    import re

    wanted = set(re.findall(r'(?:src|href)="/static/([^"]+)"', html))
    assert wanted <= names
    assert not re.search(r"<script(?![^>]*src=)", html), "the content policy forbids inline scripts"


def test_a_change_of_a_run_is_told_within_a_second_and_a_new_run_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "SCAN_S", 0.05)
    monkeypatch.setattr(live, "BEAT_S", 0.2)
    folder = make_run(tmp_path / "runs" / "one")

    async def work() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with (
            asyncio.timeout(DEADLINE_S),
            Dashboard(tmp_path / "runs", port=0, token=TOKEN) as dashboard,
            httpx.AsyncClient(headers=BEARER, timeout=DEADLINE_S) as client,
            client.stream("GET", f"{dashboard.url}/api/changes") as stream,
        ):
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert "content-encoding" not in stream.headers
            beats = 0
            async for line in stream.aiter_lines():
                if line.startswith(":"):
                    beats += 1
                    if beats == 1:  # the stream is open and nothing has happened
                        assert not found
                        with RunStore(folder / "run.db") as store:
                            store.add_metrics(4, {"reward/mean": 1.0})
                elif line.startswith("data:"):
                    found.append(json.loads(line.removeprefix("data:")))
                    if len(found) == 1:
                        make_run(tmp_path / "runs" / "two")
                    if found[-1]["run"] == "two":
                        return found
        return found

    found = asyncio.run(work())
    assert found[0] == {"run": "one", "version": 1}
    assert found[-1]["run"] == "two"


def test_open_streams_do_not_hold_up_the_end(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")

    async def work() -> None:
        async with httpx.AsyncClient(headers=BEARER, timeout=DEADLINE_S) as client:
            async with asyncio.timeout(DEADLINE_S):
                dashboard = Dashboard(tmp_path / "runs", port=0, token=TOKEN)
                await dashboard.__aenter__()
                async with client.stream("GET", f"{dashboard.url}/api/changes") as stream:
                    lines = stream.aiter_lines()
                    assert await anext(lines) == "retry: 1000"
                    await dashboard.__aexit__()
                    assert [line async for line in lines if line] == []

    asyncio.run(work())


def test_only_so_many_pages_may_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_LISTENERS", 1)
    make_run(tmp_path / "runs" / "one")

    async def work() -> int:
        async with (
            asyncio.timeout(DEADLINE_S),
            Dashboard(tmp_path / "runs", port=0, token=TOKEN) as dashboard,
            httpx.AsyncClient(headers=BEARER, timeout=DEADLINE_S) as client,
            client.stream("GET", f"{dashboard.url}/api/changes") as stream,
        ):
            await anext(stream.aiter_lines())
            return (await client.get(f"{dashboard.url}/api/changes")).status_code

    assert asyncio.run(work()) == 503
