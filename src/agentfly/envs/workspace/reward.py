"""The rewards of a workspace: the chain's changes are judged in fresh workspaces (`grade`).

workspace_success   1 if every test that counts passes
workspace_tests     the share of them that passes
"""

from __future__ import annotations

from ...rewards.function import FunctionReward
from .env import LONGEST_S, Workspace


async def _success(work: Workspace) -> dict[str, float]:
    """1 if every test of the task passes in a fresh workspace with the chain's changes."""
    graded = await work.grade()
    return {"reward": float(graded.success), "passed": graded.score, "tests": graded.tests}


async def _tests(work: Workspace) -> dict[str, float]:
    """The share of the task's tests that pass in a fresh workspace with the chain's changes."""
    graded = await work.grade()
    return {"reward": graded.score, "tests": graded.tests}


workspace_success = FunctionReward(_success, name="workspace_success", timeout_s=2 * LONGEST_S)
workspace_tests = FunctionReward(_tests, name="workspace_tests", timeout_s=2 * LONGEST_S)
