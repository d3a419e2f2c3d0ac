"""The whole algorithm in one file: multi-turn GRPO with tools, in torch and transformers only. Run: python examples/rl_loop.py

Only the folder of the bundled model comes from the package. The model learns to answer "What is 12 times 7, plus 5?" with two
tool calls. One step: sample groups of chains, score them, compare siblings, update the weights that drew exactly those tokens.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentfly.pocket import model_dir

TOOLS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}
SYSTEM = """You solve tasks step by step with tools.
Tools:
- add(a: number, b: number): Add two numbers.
- multiply(a: number, b: number): Multiply two numbers.
To use a tool, reply:
Thought: what to do next
Action: the tool's name
Input: its arguments as JSON
When you know the answer, reply:
Thought: why
Answer: the answer"""
START = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
GO_ON = "\n<|im_start|>user\nObservation: {observation}<|im_end|>\n<|im_start|>assistant\n"


@dataclass
class Chain:
    """One attempt at a task. Ids are only appended; the mask is 1 exactly on sampled tokens."""

    answer: str
    ids: list[int]
    mask: list[int] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False

    def __post_init__(self) -> None:
        self.mask = [0] * len(self.ids)

    def extend(self, ids: list[int], mask: int) -> None:
        self.ids += ids
        self.mask += [mask] * len(ids)


def task(rng: random.Random) -> tuple[str, str]:
    a, b, c = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 30)
    return f"What is {a} times {b}, plus {c}?", str(a * b + c)


def encode(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def act(text: str) -> tuple[str | None, str | None]:
    """Parse one reply. Returns (observation, answer), one of them None. The model reads its mistakes as observations."""
    if call := re.search(r"Action: (\w+)\nInput: (\{.*\})", text):
        try:
            return str(TOOLS[call[1]](**json.loads(call[2]))), None
        except (KeyError, TypeError, ValueError) as error:
            return f"Error: {type(error).__name__}: {error}", None
    found = re.search(r"Answer: (.*)", text)
    return None, found[1].strip() if found else ""


@torch.no_grad()
def rollout(model: Any, tokenizer: Any, chains: list[Chain], max_turns: int = 4, max_tokens: int = 48) -> None:
    """Play all chains to their end as one batch, turn by turn."""
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for _ in range(max_turns):
        going = [chain for chain in chains if not chain.done]
        if not going:
            return
        width = max(len(chain.ids) for chain in going)
        prompt = torch.tensor([[end] * (width - len(chain.ids)) + chain.ids for chain in going])
        attention = torch.tensor([[0] * (width - len(chain.ids)) + [1] * len(chain.ids) for chain in going])
        output = model.generate(
            input_ids=prompt, attention_mask=attention, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            max_new_tokens=max_tokens, eos_token_id=end, pad_token_id=end,
        )  # fmt: skip
        for chain, sampled in zip(going, output[:, width:].tolist(), strict=True):
            if end in sampled:
                sampled = sampled[: sampled.index(end) + 1]
            chain.extend(sampled, mask=1)  # the sampled ids themselves; no reply is decoded and encoded again
            observation, answer = act(tokenizer.decode(sampled, skip_special_tokens=True))
            if observation is None or sampled[-1] != end:
                chain.done, chain.reward = True, float(answer == chain.answer)
            else:
                chain.extend(encode(tokenizer, GO_ON.format(observation=observation)), mask=0)


def logprobs(model: Any, chains: list[Chain]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-prob of every token under the current weights, and the mask, both aligned to the predicted token."""
    width = max(len(chain.ids) for chain in chains)
    ids = torch.tensor([chain.ids + [0] * (width - len(chain.ids)) for chain in chains])
    mask = torch.tensor([chain.mask + [0] * (width - len(chain.ids)) for chain in chains])
    logits = model(input_ids=ids).logits[:, :-1].float()  # padding is on the right, so no attention mask is needed
    return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0], mask[:, 1:]


def main(steps: int = 15, num_tasks: int = 8, num_chains: int = 8, lr: float = 2e-4, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir())
    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    history = []
    for step in range(steps):
        # 1. Sample: num_chains siblings of each task.
        model.eval()
        groups = []
        for _ in range(num_tasks):
            question, answer = task(rng)
            ids = encode(tokenizer, START.format(system=SYSTEM, question=question))
            groups.append([Chain(answer, list(ids)) for _ in range(num_chains)])
        chains = [chain for group in groups for chain in group]
        rollout(model, tokenizer, chains)
        # 2. Advantages: a chain against its siblings (GRPO, arXiv:2402.03300).
        rewards = torch.tensor([[chain.reward for chain in group] for group in groups])
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
        # 3. Update. With one on-policy step the ratio is 1, so the clipped loss has the gradient of advantage times log-prob.
        total = sum(sum(chain.mask) for chain in chains)
        for i in range(0, len(chains), 16):
            scores, mask = logprobs(model, chains[i : i + 16])
            loss = -(scores * mask * advantages[i : i + 16, None]).sum() / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        # 4. The updated model is the model that samples: there is nothing to publish.
        history.append(rewards.mean().item())
        print(f"step {step + 1:3}  reward {history[-1]:.2f}", flush=True)
    return history


if __name__ == "__main__":
    main()
