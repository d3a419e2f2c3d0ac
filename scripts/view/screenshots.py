"""Makes the pictures of the dashboard in docs/assets: python scripts/view/screenshots.py [--runs DIR] [--out DIR] [--only NAME]

Needs `pip install 'agentfly[view,browser]'`, Pillow and Chromium (apt-get install chromium fonts-inter). Without `--runs` it
first trains short runs of the bundled models on the CPU, which takes a few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.async_api import async_playwright

from agentfly.runs import ChainFilter, RunReader
from agentfly.view.app import Dashboard

ROOT = Path(__file__).resolve().parents[2]
WIDE, TALL, PHONE = {"width": 1280, "height": 800}, {"width": 1280, "height": 960}, {"width": 390, "height": 780}
MAX_BYTES = 200_000
TRAINED = (
    ("quickstart", "run.name=quickstart-seed0", "seed=0", "train.steps=14", "train.validate_every=3"),
    ("quickstart", "run.name=quickstart-seed1", "seed=1", "train.steps=14", "train.validate_every=3"),
    ("quickstart", "run.name=quickstart-rloo", "algorithm=rloo", "train.steps=14", "train.validate_every=3"),
    ("alfworld", "run.name=alfworld", "train.steps=8", "train.validate_every=4", "data.validation_count=60"),
)


def pictures(folder: Path) -> dict[str, tuple[str, str, dict[str, int]]]:
    """Name of the file -> (path of the page, theme, size)."""
    reader = RunReader(folder / "quickstart-seed0")
    rows, _ = reader.page(ChainFilter(step=2, split="train", outcome="finished"), sort="-turns", limit=50)
    group = next(row for row in reader.groups(2) if row.teaches)
    chain = max((row for row in rows if row.advantage), key=lambda row: row.num_tokens)
    run = "/run/quickstart-seed0"
    return {
        "view-overview": ("/run/alfworld", "light", WIDE),
        "view-metrics": (f"{run}/metrics?with=quickstart-seed1,quickstart-rloo&bands=1", "light", WIDE),
        "view-chains": (f"{run}/chains?split=train&sort=-advantage", "light", WIDE),
        "view-talk": (f"{run}/chain/{chain.id}", "dark", WIDE),
        "view-tokens": (f"{run}/chain/{chain.id}?tab=tokens&colour=entropy", "light", TALL),
        "view-group": (f"{run}/group/2/{group.task_id}", "light", TALL),
        "view-health": (f"{run}/checks", "dark", WIDE),
        "view-compare": ("/compare?runs=quickstart-seed0,quickstart-rloo", "light", WIDE),
        "view-phone": (f"{run}/chain/{chain.id}?tab=tokens&colour=advantage", "light", PHONE),
    }


async def shoot(folder: Path, out: Path, only: list[str]) -> None:
    """Takes every picture, or those that are named."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise SystemExit("no chromium on PATH: apt-get install chromium")
    chosen = pictures(folder)
    if unknown := set(only) - {*chosen, "view-chat"}:
        raise SystemExit(f"there is no picture {', '.join(sorted(unknown))}; there are {', '.join([*chosen, 'view-chat'])}")
    async with Dashboard(folder, port=0) as dashboard, async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for name, (path, theme, size) in chosen.items():
            if only and name not in only:
                continue
            context = await browser.new_context(viewport=size, color_scheme=theme)
            page = await context.new_page()
            await page.goto(dashboard.address)
            await page.goto(dashboard.url + path)
            await settle(page)
            save(await page.screenshot(), out / f"{name}.png")
            await context.close()
        if not only or "view-chat" in only:
            await chat(browser, dashboard, out)
        await browser.close()


async def chat(browser: Any, dashboard: Dashboard, out: Path) -> None:
    """A conversation with the newest checkpoint."""
    context = await browser.new_context(viewport=WIDE, color_scheme="light")
    page = await context.new_page()
    page.set_default_timeout(180_000)
    await page.goto(dashboard.address)
    await page.goto(dashboard.url + "/run/quickstart-seed0/chat")
    await page.get_by_role("button", name="Start").click()
    await page.get_by_label("Message").fill("What is 12 times 7, plus 5?")
    await page.keyboard.press("Enter")
    await page.locator(".chat .note", has_text="token").wait_for()
    await page.get_by_role("button", name="Tokens").first.click()
    await page.wait_for_timeout(300)
    save(await page.screenshot(), out / "view-chat.png")
    await context.close()


async def settle(page: Any) -> None:
    """Waits until the page has what it asked for."""
    await page.locator("h1").first.wait_for()
    await page.wait_for_timeout(1500)
    await page.locator(".loading").first.wait_for(state="detached")
    await page.wait_for_timeout(500)


def save(data: bytes, path: Path) -> None:
    """Writes the picture with an adaptive palette, which halves the file."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.quantize(256, kmeans=2, dither=Image.Dither.NONE).save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path}: {size // 1000} KB")
    if size > MAX_BYTES:
        raise SystemExit(f"{path} has {size} bytes, more than {MAX_BYTES}")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="a folder with the runs; without it, they are trained first")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/assets")
    parser.add_argument("--only", action="append", default=[], help="make this picture alone; repeatable")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = options.runs or Path(name) / "runs"
        if options.runs is None or not folder.exists():
            for recipe, *overrides in TRAINED:
                command = [sys.executable, "-m", "agentfly", "train", recipe, *overrides]
                subprocess.run(command, cwd=folder.parent, check=True)
        asyncio.run(shoot(folder, options.out, options.only))
    return 0


if __name__ == "__main__":
    sys.exit(main())
