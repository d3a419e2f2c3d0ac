"""Chains made by hand for the tests of the learner, and tiny models to train on them."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from agentfly.types import Completion, Outcome, Task, Trajectory, Turn


def chain(*turns, reward=1.0, turn_rewards=(), outcome=Outcome.FINISHED, group="g", number=0, version=0) -> Trajectory:
    """Each turn is (context, reply) or (context, reply, "restarts"): text, one id per character."""
    made = []
    for i, (context, reply, *flags) in enumerate(turns):
        ids = [ord(c) for c in reply]
        completion = Completion(text=reply, token_ids=ids, logprobs=[-0.5 - i] * len(ids), versions=[version] * len(ids))
        step_reward = turn_rewards[i] if i < len(turn_rewards) else 0.0
        made.append(Turn([ord(c) for c in context], i == 0 or bool(flags), completion, reward=step_reward))
    return Trajectory(f"{group}/{number}", Task(group, ()), number, turns=made, outcome=outcome, reward=reward)


def chain_of_ids(context, reply, reward, *, logprobs=None, group="g", number=0, version=0) -> Trajectory:
    completion = Completion(
        text="", token_ids=list(reply), logprobs=list(logprobs or [0.0] * len(reply)), versions=[version] * len(reply)
    )
    turns = [Turn(list(context), True, completion)]
    return Trajectory(f"{group}/{number}", Task(group, ()), number, turns=turns, outcome=Outcome.FINISHED, reward=reward)


def tiny_llama(vocabulary: int = 64, width: int = 32, layers: int = 2, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).eval()
