"""Rollouts: one chain, and many of them at once."""

from .chain import AgentLike, Limits, Plan, run_chain
from .scheduler import controller, prepare, run_chains

__all__ = ["AgentLike", "Limits", "Plan", "controller", "prepare", "run_chain", "run_chains"]
