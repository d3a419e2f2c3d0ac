"""Rollouts: one chain, many of them at once, and what a run needs before its first chain."""

from .activity import Activities, Activity, describe, watchdog
from .chain import AgentLike, Plan, opening_messages, run_chain
from .limits import Limits
from .scheduler import check_prompts, controller, most_in_flight, open_task, run_chains
from .setup import make_plan, open_environments
from .stream import Group, GroupStream, Pace, as_groups

__all__ = [
    "Activities", "Activity", "AgentLike", "Group", "GroupStream", "Limits", "Pace", "Plan", "as_groups",
    "check_prompts", "controller", "describe", "make_plan", "most_in_flight", "open_environments", "open_task",
    "opening_messages", "run_chain", "run_chains", "watchdog",
]  # fmt: skip
