"""Train the bundled model on two-step arithmetic with tools. Run: python examples/train_arithmetic.py"""

from __future__ import annotations

from typing import Any

import agentfly
from agentfly.training import TrainResult


def main(steps: int = 20, num_tasks: int = 16, num_chains: int = 8, **settings: Any) -> TrainResult:
    agent = agentfly.ReactAgent(
        "pocket",
        tools=["add", "subtract", "multiply"],
        reward="exact_match",
        max_turns=4,
        sampling={"max_tokens": 64},
    )
    result = agentfly.train(
        agent,
        data="arithmetic",
        algorithm="grpo",
        steps=steps,
        lr=2e-4,
        warmup_steps=3,
        num_tasks=num_tasks,
        num_chains=num_chains,
        validate_every=0,
        **settings,
    )
    print(f"success on held-out tasks: {result.before['validation/success']:.2f} -> {result.after['validation/success']:.2f}")
    print(f"checkpoint: {result.checkpoint}")
    return result


if __name__ == "__main__":
    main()
