"""The code world passes the conformance kit that users get."""

from __future__ import annotations

from agentfly import check_env
from agentfly.envs.code.env import CodeInterpreter


def test_the_code_world_is_a_good_environment() -> None:
    report = check_env("code", **CodeInterpreter.conformance())
    assert report.ok, str(report)
    assert report["the solver's score is full"].status == "passed"
    assert report["reset leaves no trace"].status == "passed"
