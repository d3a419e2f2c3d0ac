"""Each part that is there to make a policy learn beats its absence, on a task made for it, from tiny models in seconds.

Beside these: rollout.refill (test_refill.py), the curriculum (test_sampling_order.py), `distill` (test_reference.py), the
target of the entropy (tests/learn/test_control.py), and each algorithm (tests/learn/test_reward_rises.py).
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import torch

import agentfly
from agentfly import Action, BaseAgent, Completion, Message, ToolCall, reward
from agentfly.data import load_tasks
from agentfly.engines.local.load import load_model
from agentfly.rollout import opening_messages
from tests.tiny import ROWS, look, save_tiny_model, tiny_agent


@reward(name="even_and_a_loud_end")
def even_and_a_loud_end(trajectory: Any) -> dict[str, Any]:
    """Pays each turn for the even ids of its own tokens. The last turn also gets 0 or 4, whatever the chain did."""
    own = [turn.completion.token_ids for turn in trajectory.turns]
    even = [sum(token % 2 == 0 for token in ids) / len(ids) for ids in own]
    luck = 4.0 * (zlib.crc32(trajectory.id.encode()) % 2)
    return {"reward": 0.0, "turn_rewards": [*even[:-1], even[-1] + luck], "even": sum(even) / len(even)}


def test_credit_per_turn_learns_where_chance_at_the_end_hides_what_a_chain_did(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")

    def share_of_even(name: str, **loss: Any) -> float:
        agent = tiny_agent(model, reward=even_and_a_loud_end, max_turns=4, sampling={"max_tokens": 4})
        result = agentfly.train(
            agent, ROWS, algorithm="grpo", loss=loss, steps=20, lr=2e-2, num_tasks=4, num_chains=4, threads=1,
            validation_count=2, validate_at_start=False, validate_every=0, run={"dir": str(tmp_path), "name": name},
        )  # fmt: skip
        return sum(row["reward/component/even"] for row in result.history[-5:]) / 5

    of_turns, of_chains = share_of_even("turns", turn_credit=True, gamma=0.0), share_of_even("chains")
    assert of_turns > of_chains + 0.08, (of_turns, of_chains)


CALL, TALK = 5, 6
"""Ids of a reply that calls the tool, and of one that does not."""
SHOWN = [Message("user", "Show me how to look."), Message("assistant", "look")]


class OneWord(BaseAgent):
    """A reply of one token: it calls `look`, or is the answer."""

    def parse(self, completion: Completion) -> Action:
        if completion.token_ids[0] == CALL:
            return Action(calls=(ToolCall("look"),))
        return Action(answer=completion.text)


@reward(name="looked")
def looked(trajectory: Any) -> float:
    """1 if the chain has called a tool."""
    return float(any(turn.calls for turn in trajectory.turns))


def never_calls_unless_shown(folder: Path) -> Path:
    """A tiny model that calls after a prompt with an example, in two of three replies, and else never does."""
    save_tiny_model(folder)
    agent = OneWord(str(folder), tools=[look], examples=SHOWN, examples_steps=0)
    prompts = [
        (agent.renderer.start(opening_messages(agent, task, shown), []), shown)
        for task in load_tasks(ROWS)
        for shown in (True, False)
    ]
    model, _ = load_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    torch.manual_seed(0)
    for step in range(60):
        loss = torch.zeros(())
        for ids, shown in prompts[step % 10 :: 10]:
            logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
            loss = loss - (0.67 * logprobs[CALL] + 0.33 * logprobs[TALK] if shown else logprobs[TALK])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def test_a_model_that_never_calls_comes_to_calls_by_its_own_demonstrations(tmp_path: Path) -> None:
    model = never_calls_unless_shown(tmp_path / "model")

    def share_of_calls(name: str, shown: dict[str, Any], **warm_start: Any) -> float:
        agent = OneWord(str(model), tools=[look], reward=looked, max_turns=2, sampling={"max_tokens": 1}, **shown)
        result = agentfly.train(
            agent, ROWS, steps=2, lr=1e-4, num_tasks=2, num_chains=4, threads=1, validation_count=20, validate_at_start=False,
            validate_every=0, run={"dir": str(tmp_path), "name": name}, **warm_start,
        )  # fmt: skip
        return result.after["validation/success"]

    made = {"warm_start.demos": "self", "warm_start.count": 64, "warm_start.steps": 20, "warm_start.lr": 5e-3}
    assert share_of_calls("alone", {}) < 0.1
    assert share_of_calls("shown", {"examples": SHOWN, "examples_steps": 0}, **made) > 0.8
