"""A dashboard in a thread and a real Chromium in front of it. Without playwright or Chromium the tests are skipped."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import stored

WIDE, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
WAIT_MS = 30_000


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


class Site:
    """A running dashboard over a folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = self.address = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="dashboard")
        self._thread.start()
        assert self._ready.wait(60), "the dashboard did not start"

    async def _serve(self) -> None:
        from agentfly.view.app import Dashboard

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with Dashboard(self.folder, port=0) as dashboard:
            self.url, self.address = dashboard.url, dashboard.address
            self._ready.set()
            await self._stop.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(60)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Runs "full", "again-seed1", "again-seed2" and "hostile"."""
    pytest.importorskip("starlette", reason="no starlette: pip install 'agentfly[view]'")
    folder = tmp_path_factory.mktemp("browser") / "runs"
    stored.make_run(folder / "full", nodes=2)
    for seed in (1, 2):
        stored.make_run(folder / f"again-seed{seed}", algorithm="rloo", seed=seed, lr="1e-4", lift=0.05 * seed)
    stored.make_hostile_run(folder / "hostile")
    made = Site(folder)
    yield made
    made.close()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install 'agentfly[browser]'")
    found = (
        os.environ.get("CHROMIUM")
        or shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if found is None:
        pytest.skip("no chromium on PATH: apt-get install chromium fonts-dejavu-core")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


class Tab:
    """A page that has shown its token, and what went wrong on it."""

    def __init__(self, browser: Any, site: Site, viewport: dict[str, int], scheme: str) -> None:
        self.site = site
        self.context = browser.new_context(viewport=viewport, color_scheme=scheme)
        self.page = self.context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.faults: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.faults.append(f"page error: {error}"))
        self.page.on("dialog", lambda dialog: (self.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", self._request)
        self.page.goto(site.address)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "net::ERR_ABORTED" not in message.text:
            self.faults.append(f"console {message.type}: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.site.url + "/", "blob:")):
            self.faults.append(f"foreign request: {request.url}")

    def open(self, path: str) -> Any:
        self.page.goto(self.site.url + path)
        return self.page

    def visit(self, path: str) -> Any:
        """Goes to a page as a link does, without loading the application again."""
        script = "path => { history.pushState({inside: true}, '', path); dispatchEvent(new PopStateEvent('popstate')); }"
        self.page.evaluate(script, path)
        return self.page

    def close(self) -> None:
        self.context.close()


@pytest.fixture
def open_tab(browser: Any, site: Site) -> Iterator[Callable[..., Tab]]:
    """Opens tabs; at the end, none may have logged an error, shown a dialog or asked another host."""
    tabs: list[Tab] = []

    def open_one(viewport: dict[str, int] = WIDE, scheme: str = "light") -> Tab:
        tabs.append(Tab(browser, site, viewport, scheme))
        return tabs[-1]

    yield open_one
    faults = [fault for tab in tabs for fault in tab.faults]
    for tab in tabs:
        tab.close()
    assert not faults, faults


@pytest.fixture
def tab(open_tab: Callable[..., Tab]) -> Tab:
    return open_tab()
