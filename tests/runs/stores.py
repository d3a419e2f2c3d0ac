"""Random chains for the tests of queries."""

from __future__ import annotations

import random

from agentfly.types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn

Stored = tuple[int, str, Trajectory]


def random_chains(seed: int, count: int = 120, steps: int = 5) -> list[Stored]:
    """Chains of several steps with equal and different rewards, all outcomes, some without calls, texts or tokens."""
    rng = random.Random(seed)
    found: list[Stored] = []
    for number in range(count):
        step = 1 + number * steps // count
        outcome = rng.choice([Outcome.FINISHED, Outcome.FINISHED, Outcome.MAX_TURNS, Outcome.WORLD_FAILURE])
        task = Task(f"task {rng.randrange(6)}", (Message("user", "100% of_it?"),), {"answer": "x"})
        turns = [_turn(rng, step, place) for place in range(rng.randrange(3))]
        prediction = rng.choice(["", "Forty_two", "a 50% guess", "ÄÖÜ"]) * rng.randrange(3)
        reward = None if outcome is Outcome.WORLD_FAILURE else rng.choice([0.0, 1.0, 1.0, round(rng.random(), 3)])
        each = Trajectory(
            f"t{step}-{number}-0", task, number % 4, [Message("user", "100% of_it?")], turns, outcome,
            "WorldError: gone" if reward is None else None, prediction, reward,
            {} if reward is None else {"exact": reward}, rng.choice([0.5, 1.0, 2.5]), draw=rng.randrange(2),
        )  # fmt: skip
        found.append((step, "train" if rng.random() < 0.8 else "validation", each))
    return found


def _turn(rng: random.Random, step: int, place: int) -> Turn:
    count = rng.randrange(4)
    reply = Completion(
        text="hm", token_ids=list(range(count)), logprobs=[-0.5] * count, versions=[step - 1] * count
    )  # fmt: skip
    call = ToolCall(rng.choice(["add", "search", "search"]), {"q": "needle" if rng.random() < 0.2 else "hay"})
    calls = (call,) if rng.random() < 0.7 else ()
    results = tuple(ToolResult(observation="ok", error="raised" if rng.random() < 0.2 else None) for _ in calls)
    return Turn([7] * (3 - place), place == 0, reply, calls, results, sampled_s=0.25, tools_s=0.5, calls_s=[0.5 for _ in calls])
