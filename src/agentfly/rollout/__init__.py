"""Rollouts: one chain, and many of them at once."""

from .chain import AgentLike, Limits, Plan, run_chain
from .scheduler import controller, most_in_flight, prepare, run_chains

__all__ = ["AgentLike", "Limits", "Plan", "controller", "most_in_flight", "prepare", "run_chain", "run_chains"]
