"""The world `repair` passes the examination that `agentfly envs check` makes of any environment."""

from __future__ import annotations

import pytest

from agentfly import check_env
from agentfly.envs.workspace.env import Workspace

GROWTH = "memory and handles do not grow"
"""Left out: asyncio keeps cancelled timers of slow calls for a while, and on a loaded machine the check plays few episodes."""


@pytest.mark.nightly
def test_the_world_repair_is_a_good_environment() -> None:
    report = check_env("repair", **Workspace.conformance())
    assert [check.name for check in report.checks if check.status == "failed" and check.name != GROWTH] == [], str(report)
    assert report["the solver's score is full"].status == "passed"
    assert report["reset leaves no trace"].status == "passed"
