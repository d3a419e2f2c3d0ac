"""Rewards for the form of a chain: format and tool use (0 to 1), length and truncation (penalties from -1 to 0).

They do not check the answer, so use them in a mix: `math_equal + format_reward() * 0.1`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

from ..errors import ConfigError
from ..types import Outcome, Trajectory
from .base import Reward
from .function import FunctionReward
from .lookup import factory

CHARACTERS_PER_TOKEN = 4
TRUNCATED = tuple(outcome.value for outcome in Outcome if outcome.truncated)


@factory("format")
def format_reward(pattern: str | re.Pattern[str] | Callable[[str], Any] | None = None) -> Reward:
    """1 if the last reply has the right form.

    `pattern` is a regular expression that must match the whole last reply (white space around it apart, `.` matches
    newlines), or a function of the reply that says yes or no. Without one: the chain ended in an answer that is not empty,
    by itself and not by a limit, and no call of a tool was invalid. A pattern that backtracks without end stalls the run:
    keep it simple.
    """
    if pattern is None:
        return FunctionReward(_clean_answer, name="format")
    if callable(pattern):
        test = pattern
    else:
        try:
            compiled = re.compile(pattern, 0 if isinstance(pattern, re.Pattern) else re.DOTALL)
        except (re.error, TypeError) as error:
            raise ConfigError(f"reward 'format': {pattern!r} is not a regular expression: {error}") from error
        test = compiled.fullmatch

    def matches(trajectory: Trajectory) -> float:
        return float(bool(trajectory.turns) and bool(test(trajectory.turns[-1].completion.text.strip())))

    return FunctionReward(matches, name="format")


@factory("none")
def no_reward() -> Reward:
    """0 for every chain: for training by a teacher (`algorithm = "distill"`) on rows without answers."""
    return FunctionReward(lambda trajectory: 0.0, name="none")


def _clean_answer(trajectory: Trajectory) -> float:
    """1 if the chain ended in an answer of its own, with no invalid call on the way."""
    finished = trajectory.outcome is Outcome.FINISHED and bool(trajectory.prediction.strip())
    return float(finished and trajectory.num_invalid_calls == 0)


@factory("tool_use")
def tool_use_reward(min_calls: int = 1, tools: str | Iterable[str] | None = None) -> Reward:
    """The share of tool calls that were valid, or 0 with fewer than `min_calls` valid ones.

    A call is valid when it reached its tool: a known name and arguments that fit. `tools` counts only valid calls of these
    towards `min_calls`. Components: `calls` and `invalid_calls`.
    """
    if min_calls < 0:
        raise ConfigError(f"reward 'tool_use': min_calls must be 0 or more, not {min_calls}")
    wanted = None if tools is None else frozenset([tools] if isinstance(tools, str) else tools)

    def tool_use(trajectory: Trajectory) -> dict[str, float]:
        counts = trajectory.tool_counts
        valid, invalid = sum(counts.values()), trajectory.num_invalid_calls
        enough = sum(count for name, count in counts.items() if wanted is None or name in wanted) >= min_calls
        share = valid / (valid + invalid) if valid + invalid else 1.0
        return {"reward": share if enough else 0.0, "calls": valid + invalid, "invalid_calls": invalid}

    return FunctionReward(tool_use, name="tool_use")


@factory("length")
def length_reward(max_tokens: int = 512, buffer: int | None = None, of: Literal["chain", "reply"] = "chain") -> Reward:
    """0 within a budget of sampled tokens; beyond it falling in a line, to -1 at `max_tokens + buffer`.

    The soft overlong penalty of DAPO (arXiv:2503.14476) over all replies of the chain or, with `of` "reply", its longest one;
    `buffer` is a quarter of the budget when not given. With DAPO's L_max and L_cache: max_tokens = L_max - L_cache, buffer =
    L_cache. Where an engine gives no token ids, a token is taken to be 4 characters. Component: `tokens`.
    """
    if of not in ("chain", "reply"):
        raise ConfigError(f"reward 'length': of is 'chain' or 'reply', not {of!r}")
    total: Callable[[Iterable[int]], int] = sum if of == "chain" else functools.partial(max, default=0)
    if max_tokens < 1 or (buffer is not None and buffer < 1):
        raise ConfigError(f"reward 'length': max_tokens and buffer must be at least 1, not {max_tokens} and {buffer}")
    slope = buffer if buffer is not None else max(1, max_tokens // 4)

    def length(trajectory: Trajectory) -> dict[str, float]:
        tokens = total(turn.completion.num_sampled for turn in trajectory.turns)
        if not tokens:
            tokens = total(len(turn.completion.text) for turn in trajectory.turns) // CHARACTERS_PER_TOKEN
        return {"reward": 0.0 - min(1.0, max(0, tokens - max_tokens) / slope), "tokens": tokens}

    return FunctionReward(length, name="length")


@factory("truncated")
def truncated_reward(ends: Iterable[str] = TRUNCATED) -> Reward:
    """-1 for a chain that a limit ended, else 0.

    `ends` are the limits that count: "max_tokens" (of a reply or the context), "max_turns" and "max_time" (all when not given).
    """
    counted = frozenset([ends] if isinstance(ends, str) else ends)
    if not counted or not counted <= set(TRUNCATED):
        given = ", ".join(sorted(map(str, counted))) or "none"
        raise ConfigError(f"reward 'truncated': ends are some of {', '.join(TRUNCATED)}, not {given}")
    return FunctionReward(lambda trajectory: 0.0 - (trajectory.outcome in counted), name="truncated")
