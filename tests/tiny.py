"""A tiny random model on disk with the bundled model's tokenizer, and a task it can learn from nothing in seconds.

The task has two turns: a reply, a tool's observation, another reply. The reward is the share of sampled tokens with an even
id, so a random model starts near one half and every algorithm can raise it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentfly import Action, BaseAgent, Completion, ToolCall, reward, tool
from agentfly.pocket import model_dir

ROWS = [{"question": f"Say something about {i}.", "answer": str(i)} for i in range(40)]


def save_tiny_model(folder: Path, seed: int = 0, head_dim: int = 16, context: int = 512) -> Path:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def sample_in_float64(patch: Any) -> None:
    """Load all models in float64, so that two trainings draw the same tokens however their chains are batched.

    The last bit of a log-prob depends on the rows of its batch, and these on how busy the machine is. In float32 about one
    token in a million lies so close to its random number that it is then another one.
    """
    import torch

    from agentfly.engines.local import load

    patch.setattr(load, "_dtype", lambda dtype, device: torch.float64)


@tool(name="look", register=False)
async def look() -> str:
    """Look around."""
    return "nothing here"


@reward(name="even")
def even(trajectory: Any) -> dict[str, float]:
    ids = [token for turn in trajectory.turns for token in turn.completion.token_ids]
    share = sum(token % 2 == 0 for token in ids) / len(ids)
    return {"reward": share, "tokens": float(len(ids))}


class TwoTurns(BaseAgent):
    """Every reply but the last is a call of `look`."""

    def parse(self, completion: Completion) -> Action:
        return Action(calls=(ToolCall("look"),))


def tiny_agent(model: Path | str, **options: Any) -> TwoTurns:
    options = {"tools": [look], "reward": even, "max_turns": 2, "sampling": {"max_tokens": 12}} | options
    return TwoTurns(str(model), **options)
