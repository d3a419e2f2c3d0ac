"""What an algorithm computes: advantages (NumPy), losses (torch), and the table that names each algorithm and its paper.

Importing this package loads NumPy but no torch, so that a command line can list the algorithms.
"""

from .table import (
    ALGORITHMS,
    ALWAYS,
    DR_GRPO,
    GRPO,
    PPO,
    REINFORCE_PLUS_PLUS,
    REINFORCE_PLUS_PLUS_BASELINE,
    RLOO,
    Algorithm,
    Chains,
    Credit,
    find_algorithm,
)

__all__ = [
    "ALGORITHMS",
    "ALWAYS",
    "DR_GRPO",
    "GRPO",
    "PPO",
    "REINFORCE_PLUS_PLUS",
    "REINFORCE_PLUS_PLUS_BASELINE",
    "RLOO",
    "Algorithm",
    "Chains",
    "Credit",
    "find_algorithm",
]
