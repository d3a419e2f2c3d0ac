"""The world `repair` passes the examination that `agentfly envs check` makes of any environment."""

from __future__ import annotations

import pytest

from agentfly.cli import main


@pytest.mark.nightly
def test_the_world_repair_is_a_good_environment() -> None:
    assert main(["envs", "check", "repair"]) == 0
