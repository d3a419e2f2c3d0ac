"""A training run that a test holds at a step, so that what the test does next cannot come too late.

    hold_after(folder, run, 4)  ->  the run trains on to checkpoint 4, and the tools of a later step do not return
    release(folder)             ->  they return

Tools of step 5, and at most those of step 6, may return before checkpoint 4 is written: saving takes its time.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from agentfly import tool

GATE = "AGENTFLY_HELD_BY"
"""The environment variable with the name of the file that names the checkpoint."""


@tool(name="look", register=False, timeout_s=900)
async def look() -> str:
    """Look around."""
    while GATE in os.environ and _is_closed(Path(os.environ[GATE])):
        await asyncio.sleep(0.02)
    return "nothing here"


def _is_closed(gate: Path) -> bool:
    try:
        return Path(gate.read_text(encoding="utf-8")).exists()
    except FileNotFoundError:
        return False


def variables(folder: Path) -> dict[str, str]:
    """The environment variables of a run that can be held."""
    return {GATE: f"{folder}/gate"}


def checkpoint(folder: Path, run: str, step: int) -> Path:
    """The folder of a checkpoint. The run must keep all of them."""
    return folder / run / "checkpoints" / f"step-{step:06d}"


def hold_after(folder: Path, run: str, step: int) -> None:
    """Hold the run once it has this checkpoint."""
    (folder / "gate.new").write_text(str(checkpoint(folder, run, step)), encoding="utf-8")
    os.replace(folder / "gate.new", folder / "gate")


def release(folder: Path) -> None:
    """Let a held run go on."""
    (folder / "gate").unlink(missing_ok=True)
