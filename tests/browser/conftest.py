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
WAIT_MS = 120_000


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


class Windows:
    """One browser context for each size and theme, which has shown the token. Its tabs share the cache, so pages load fast."""

    def __init__(self, browser: Any, site: Site) -> None:
        self._browser, self._site = browser, site
        self._contexts: dict[tuple[int, str], Any] = {}

    def context(self, viewport: dict[str, int], scheme: str) -> Any:
        key = (viewport["width"], scheme)
        if key not in self._contexts:
            made = self._browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
            assert made.request.get(self._site.address).ok
            self._contexts[key] = made
        return self._contexts[key]

    def close(self) -> None:
        for context in self._contexts.values():
            context.close()


@pytest.fixture(scope="session")
def windows(browser: Any, site: Site) -> Iterator[Windows]:
    made = Windows(browser, site)
    yield made
    made.close()


class Tab:
    """A page, and what went wrong on it. It shows nothing until it is asked for or told where to go."""

    def __init__(self, context: Any, site: Site) -> None:
        self.site, self.context = site, context
        self._page = context.new_page()
        self._page.set_default_timeout(WAIT_MS)
        self._loaded = False
        self.faults: list[str] = []
        self._page.on("console", self._console)
        self._page.on("pageerror", lambda error: self.faults.append(f"page error: {error}"))
        self._page.on("dialog", lambda dialog: (self.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self._page.on("request", self._request)

    @property
    def page(self) -> Any:
        """The list of runs if nothing else was opened."""
        return self._page if self._loaded else self.open("/")

    def before_load(self, script: str) -> None:
        """Runs a script in every page that is opened, before its own."""
        self._page.add_init_script(script)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning") and "net::ERR_ABORTED" not in message.text:
            self.faults.append(f"console {message.type}: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.site.url + "/", "blob:")):
            self.faults.append(f"foreign request: {request.url}")

    def open(self, path: str) -> Any:
        self._page.goto(self.site.url + path)
        self._loaded = True
        return self._page

    def visit(self, path: str) -> Any:
        """Goes to a page as a link does, without loading the application again."""
        if not self._loaded:
            return self.open(path)
        script = "path => { history.pushState({inside: true}, '', path); dispatchEvent(new PopStateEvent('popstate')); }"
        self._page.evaluate(script, path)
        return self._page

    def close(self) -> None:
        if self._loaded:
            self._page.evaluate("localStorage.clear()")  # the theme is kept there
        self._page.close()


def until(page: Any, condition: str) -> None:
    """Waits until a function of JavaScript returns true. The content policy forbids page.wait_for_function."""
    page.evaluate(
        f"""async () => {{ const ends = Date.now() + {WAIT_MS}; const holds = {condition};
        while (!(await holds())) {{ if (Date.now() > ends) throw new Error("never: " + holds);
            await new Promise((done) => setTimeout(done, 20)); }} }}"""
    )


@pytest.fixture
def open_tab(windows: Windows, site: Site) -> Iterator[Callable[..., Tab]]:
    """Opens tabs; at the end, none may have logged an error, shown a dialog or asked another host."""
    tabs: list[Tab] = []

    def open_one(viewport: dict[str, int] = WIDE, scheme: str = "light") -> Tab:
        tabs.append(Tab(windows.context(viewport, scheme), site))
        return tabs[-1]

    yield open_one
    faults = [fault for tab in tabs for fault in tab.faults]
    for tab in tabs:
        tab.close()
    assert not faults, faults


@pytest.fixture
def tab(open_tab: Callable[..., Tab]) -> Tab:
    return open_tab()
