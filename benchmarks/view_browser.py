"""How fast the dashboard is in a browser over a large run: first paint, list, filters, a far scroll, tokens.

    python benchmarks/view.py --chains 100000 --keep runs/large
    python benchmarks/view_browser.py runs/large [--json PATH] [--repeats 5]

Needs `pip install 'agentfly[view,browser]'` and Chromium. First paint is the browser's own `first-contentful-paint`; the others
are measured in the page, from the event to the animation frame after the new content is in the document. `cpu` is the time that
the page's main thread, and this process (the server and the driver of the browser) computed: other programs change it little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from agentfly.runs import RunReader
from agentfly.view.app import Dashboard

BARS = {"first paint": 1000.0, "filter": 200.0, "tokens": 300.0}
"""Milliseconds that must not be exceeded, by the beginning of a figure's name."""
CHANGE = """
async ({act, done}) => {
  const shown = () => document.querySelector(done)?.textContent;
  const before = shown();
  const start = performance.now();
  const [kind, selector, value] = act;
  const element = document.querySelector(selector);
  if (kind === "click") element.click();
  else { element.value = value; element.dispatchEvent(new Event(kind, {bubbles: true})); }
  while (shown() === before || document.querySelector(".loading")) {
    if (performance.now() - start > 20000) return -1;
    await new Promise(requestAnimationFrame);
  }
  await new Promise(requestAnimationFrame);
  return performance.now() - start;
}
"""
LIST = ".chain-list"
FILTERS = {
    "filter outcome": (["change", "select[aria-label=Outcome]", "max_turns"], ["change", "select[aria-label=Outcome]", ""]),
    "filter sort": (["change", "select[aria-label=Sort]", "-reward"], ["change", "select[aria-label=Sort]", "-added"]),
    "filter tool": (["change", "select[aria-label=Tool]", "python"], ["change", "select[aria-label=Tool]", ""]),
    "filter text": (["input", "input[data-search]", "task-17"], ["input", "input[data-search]", ""]),
    "filter reward bar": (["click", ".bar:not([disabled])", ""], ["click", ".bar[aria-pressed=true]", ""]),
    "filter step": (["change", "input.w-step", "5"], ["change", "input.w-step", ""]),
}


async def measure(run: Path, repeats: int) -> dict[str, float]:
    """Medians in milliseconds, and the bytes and nodes of the list of chains."""
    from playwright.async_api import async_playwright

    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("no chromium on PATH: apt-get install chromium")
    figures: dict[str, list[float]] = {}
    rows, _ = RunReader(run).page(sort="-tokens", limit=1)
    async with Dashboard(run.parent, port=0) as dashboard, async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        base = f"{dashboard.url}/run/{quote(run.name, safe='')}"
        for _ in range(repeats):
            context = await browser.new_context(viewport={"width": 1440, "height": 900})
            page = await context.new_page()
            probe = await context.new_cdp_session(page)
            await probe.send("Performance.enable", {"timeDomain": "threadTicks"})
            await page.goto(dashboard.address)
            for name, address, ready in (
                ("runs", dashboard.url, "tbody tr"),
                ("overview", base, ".chart canvas"),
                ("chains", f"{base}/chains", ".chain-list .vrow"),
            ):
                await page.goto(address)
                await page.locator(ready).first.wait_for()
                note(
                    figures,
                    f"first paint {name}",
                    await page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"),
                )
                note(figures, f"usable {name}", await page.evaluate("performance.now()"))
            note(figures, "nodes chains", await page.evaluate("document.querySelectorAll('*').length"))
            sent = "performance.getEntriesByType('resource').reduce((sum, each) => sum + each.transferSize, 0)"
            note(figures, "bytes chains", await page.evaluate(sent))
            await page.wait_for_timeout(500)
            for name, (act, undo) in FILTERS.items():
                await timed(figures, name, page, probe, {"act": act, "done": LIST})
                await page.wait_for_timeout(200)
                await page.evaluate(CHANGE, {"act": undo, "done": LIST})
                await page.wait_for_timeout(200)
            await page.goto(f"{base}/chain/{quote(rows[0].id, safe='')}?tab=talk")
            await page.locator(".message").first.wait_for()
            await page.wait_for_timeout(300)
            act = ["click", ".tabs a[href*='tab=tokens']", ""]
            await timed(figures, "tokens of the longest chain", page, probe, {"act": act, "done": ".token-list"})
            await context.close()
        await browser.close()
    return {name: round(statistics.median(values), 1) for name, values in figures.items()}


async def timed(figures: dict[str, list[float]], name: str, page: Any, probe: Any, change: dict[str, Any]) -> None:
    """Add wall time and CPU time of a change in the page."""
    before = await _cpu(probe)
    note(figures, name, await page.evaluate(CHANGE, change))
    after = await _cpu(probe)
    note(figures, "  cpu of the page, " + name, after[0] - before[0])
    note(figures, "  cpu of the server, " + name, after[1] - before[1])


async def _cpu(probe: Any) -> tuple[float, float]:
    metrics = {each["name"]: each["value"] for each in (await probe.send("Performance.getMetrics"))["metrics"]}
    return 1000 * float(metrics["TaskDuration"]), 1000 * time.process_time()


def note(figures: dict[str, list[float]], name: str, value: Any) -> None:
    """Add a value to a figure."""
    figures.setdefault(name, []).append(float(value))


def main() -> int:
    """Prints a table; the status is 1 if a bar is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.run, options.repeats))
    late = []
    for name, value in figures.items():
        bar = next((limit for begin, limit in BARS.items() if name.startswith(begin)), None)
        late += [name] if bar is not None and not 0 <= value <= bar else []
        print(f"{name:52}{value:10.1f}{'' if bar is None else f'   bar {bar:g} ms'}{'   EXCEEDED' if name in late else ''}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
