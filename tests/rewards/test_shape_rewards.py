"""Format, tool use and length."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from agentfly.errors import ConfigError
from agentfly.rewards import Score, as_reward
from agentfly.rewards.shape import format_reward, length_reward, tool_use_reward
from agentfly.types import Completion, Outcome, ToolResult, Turn

GOOD = ToolResult(observation="84")
UNKNOWN = ToolResult(observation="no such tool", error="unknown_tool")
RAISED = ToolResult(observation="broke", error="raised")


def score(reward: Any, trajectory: Any) -> Score:
    return asyncio.run(as_reward(reward).score(trajectory))


def test_by_default_the_format_is_right_when_the_chain_ended_in_a_clean_answer(chain: Any) -> None:
    assert score("format", chain("84")).reward == 1.0
    assert score("format", chain("84", results=[GOOD, RAISED])).reward == 1.0
    assert score("format", chain("84", results=[GOOD, UNKNOWN])).reward == 0.0
    assert score("format", chain("84", outcome=Outcome.MAX_TOKENS)).reward == 0.0
    assert score("format", chain("  ")).reward == 0.0


@pytest.mark.parametrize(
    "pattern",
    [
        r"<think>.*</think>\s*<answer>.*</answer>",
        re.compile("<think>.*</answer>", re.DOTALL),
        lambda reply: reply.startswith("<think>"),
    ],
)
def test_a_pattern_must_match_the_whole_last_reply(chain: Any, pattern: Any) -> None:
    right = "<think>a\nb</think>\n<answer>84</answer>\n"
    assert score(format_reward(pattern), chain(replies=("junk", right))).reward == 1.0
    assert score(format_reward(pattern), chain(replies=(right, "junk"))).reward == 0.0
    assert score(format_reward(pattern), chain(replies=())).reward == 0.0


def test_a_pattern_that_matches_only_a_part_is_not_enough(chain: Any) -> None:
    assert score(format_reward("a+"), chain(replies=("aab",))).reward == 0.0


def test_a_broken_pattern_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="not a regular expression"):
        format_reward("(")
    with pytest.raises(ConfigError, match="not a regular expression"):
        as_reward({"format": {"pattern": 3}})


def test_tool_use_is_the_share_of_valid_calls_once_there_are_enough(chain: Any) -> None:
    assert score("tool_use", chain()).reward == 0.0
    assert score("tool_use", chain(results=[GOOD])).reward == 1.0
    mixed = score("tool_use", chain(results=[GOOD, UNKNOWN, RAISED, GOOD]))
    assert mixed == Score(0.75, {"tool_use": 0.75, "calls": 4.0, "invalid_calls": 1.0})
    assert score(tool_use_reward(min_calls=0), chain()).reward == 1.0
    assert score(tool_use_reward(min_calls=2), chain(results=[GOOD, UNKNOWN])).reward == 0.0
    assert score(tool_use_reward(tools="search"), chain(results=[GOOD])).reward == 0.0
    assert score(tool_use_reward(tools=["search", "multiply"]), chain(results=[GOOD])).reward == 1.0
    with pytest.raises(ConfigError, match="min_calls"):
        tool_use_reward(min_calls=-1)


@pytest.mark.parametrize(("tokens", "expected"), [(50, 0.0), (100, 0.0), (110, -0.25), (120, -0.5), (140, -1.0), (1000, -1.0)])
def test_length_falls_in_a_line_beyond_the_budget(chain: Any, tokens: int, expected: float) -> None:
    given = score(length_reward(max_tokens=100, buffer=40), chain(replies=("a", "b"), tokens=tokens // 2))
    assert given == Score(expected, {"length": expected, "tokens": float(tokens)})


@pytest.mark.parametrize(
    ("tokens", "expected"), [(16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0)]
)
def test_length_is_the_soft_overlong_punishment_of_dapo(chain: Any, tokens: int, expected: float) -> None:
    """Its equation 13 with L_max = 20480 and L_cache = 4096."""
    reward = length_reward(max_tokens=20480 - 4096, buffer=4096)
    assert score(reward, chain(tokens=tokens)) == Score(expected, {"length": expected, "tokens": float(tokens)})


def test_length_of_the_longest_reply_and_in_a_mix(chain: Any) -> None:
    trajectory = chain(replies=("a", "b"), tokens=110)
    longest = {"max_tokens": 100, "buffer": 40, "of": "reply"}
    assert score(length_reward(**longest), trajectory) == Score(-0.25, {"length": -0.25, "tokens": 110.0})
    assert score(length_reward(**longest), chain(replies=())) == Score(0.0, {"length": 0.0, "tokens": 0.0})
    mixed = score({"none": 1.0, "length": {"weight": 0.5, **longest}}, trajectory)
    assert mixed == Score(-0.125, {"none": 0.0, "length": -0.25, "length/tokens": 110.0})
    words = chain()
    words.turns = [Turn([], True, Completion(text="x" * 440)), Turn([], True, Completion(text="x" * 80))]
    assert score(length_reward(**longest), words).reward == -0.25
    with pytest.raises(ConfigError, match="of is 'chain' or 'reply', not 'turn'"):
        as_reward({"length": {"of": "turn"}})


@pytest.mark.parametrize("outcome", list(Outcome))
def test_truncated_is_a_penalty_for_the_limits_that_count(chain: Any, outcome: Outcome) -> None:
    expected = -1.0 if outcome in ("max_tokens", "max_turns", "max_time") else 0.0
    assert score("truncated", chain(outcome=outcome)) == Score(expected, {"truncated": expected})
    only = as_reward({"truncated": {"ends": ["max_tokens"], "weight": 0.5}})
    assert score(only, chain(outcome=outcome)).reward == (-0.5 if outcome == "max_tokens" else 0.0)


@pytest.mark.parametrize("ends", ["finished", [], ["max_turns", "slow"]])
def test_truncated_refuses_what_is_no_limit(ends: Any) -> None:
    with pytest.raises(ConfigError, match="ends are some of max_turns, max_tokens, max_time"):
        as_reward({"truncated": {"ends": ends}})


def test_length_counts_characters_where_there_are_no_ids(chain: Any) -> None:
    trajectory = chain()
    trajectory.turns = [Turn([], True, Completion(text="x" * 600))]
    assert score(length_reward(max_tokens=100, buffer=100), trajectory).reward == -0.5


def test_length_refuses_a_budget_of_nothing() -> None:
    for wrong in ({"max_tokens": 0}, {"buffer": 0}):
        with pytest.raises(ConfigError, match="at least 1"):
            length_reward(**wrong)
