"""The limits of one chain, and what is said of a chain that one of its time limits ended."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..aio.deadline import TimeLimit
from ..errors import ConfigError, DeadlineError
from ..tools import Context
from ..types import Trajectory
from .activity import told


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one chain. A tool's deadline is shorter than `chain_timeout_s`; scoring then has `score_timeout_s`.

    `turn_timeout_s` limits one turn, that is a reply and its tool calls (None: no limit but that of the chain).
    `group_timeout_s` limits the chains of one task together, from the start of the first.
    """

    max_turns: int = 8
    max_context: int = 1 << 30
    chain_timeout_s: float = 600.0
    score_timeout_s: float = 120.0
    turn_timeout_s: float | None = None
    group_timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(f"max_turns must be at least 1, not {self.max_turns}")
        if min(self.chain_timeout_s, self.score_timeout_s) <= 0:
            raise ConfigError("chain_timeout_s and score_timeout_s must be above 0")
        for name in ("turn_timeout_s", "group_timeout_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ConfigError(f"{name} must be above 0, not {value}")


def deadline(limits: Limits, until: float | None) -> tuple[float, bool]:
    """Returns when a chain that starts now must end, and whether that is the deadline of its group."""
    ends = time.monotonic() + limits.chain_timeout_s
    return (ends, False) if until is None or ends <= until else (until, True)


class EndedLate(TimeoutError):
    """The turn ended after its deadline, because a tool or the engine swallowed the cancellation."""


def check_ended(limit: TimeLimit) -> None:
    """Raises EndedLate if the limit has passed."""
    if limit.expired():
        raise EndedLate


def where_ended(trajectory: Trajectory, ended_late: bool) -> str:
    """What a chain waited for when its time was up, for example `tools: python (turn 4)`."""
    turns = trajectory.turns
    if turns and turns[-1].calls and (ended_late or not turns[-1].results):
        return f"{told('tools', turns[-1].calls)} (turn {len(turns)})"
    return f"sampling (turn {len(turns) + (not ended_late)})"


def used_by_chain(limits: Limits, whose: str, context: Context, started: float) -> bool:
    """Whether replies and tools used up at least half of the limit, and not the world.

    The world's part are the waits for environments and, of the time of a group, that before the start of this chain.
    """
    waited = context.trajectory.waited_s
    if whose == "turn":
        limit_s, waited, used = limits.turn_timeout_s, waited - context.waited_before_turn_s, limits.turn_timeout_s
    else:
        limit_s = limits.chain_timeout_s if whose == "chain" else limits.group_timeout_s
        used = time.perf_counter() - started
    return limit_s is None or used is None or used - waited >= limit_s / 2


def late_error(limits: Limits, whose: str, where: str, error: TimeoutError | None) -> DeadlineError:
    """The sentence about a time limit. `error` is one that another part raised before the limit was reached."""
    if error is not None:
        return DeadlineError(f"{where}: TimeoutError: {error}")
    if whose == "group":
        return DeadlineError(f"the group of the chain exceeded its time limit, in {where}")
    limit_s = limits.chain_timeout_s if whose == "chain" else limits.turn_timeout_s
    return DeadlineError(f"the {whose} exceeded its time limit of {limit_s:g} s, in {where}")
