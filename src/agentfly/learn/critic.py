"""The value model of PPO: how much reward is still to come, before each sampled token.

In: a policy and a micro batch. Out: one value per sampled token. Two kinds. "copy": its own copy of the policy's backbone
with a scalar head, learning with its own optimizer, which leaves the policy's features alone and costs the memory of a
second backbone with its Adam state (nothing for a small model, a lot for a large one). What is frozen in the policy, such as
the weights beside adapters, is frozen in the copy and held once. "shared": only a head on the
policy's hidden states. The head begins at zero, so that the first advantages are the plain rewards and not noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .backbone import Backbone
from .batching import MicroBatch
from .logprobs import Head
from .lora import copy_sharing_frozen


class ValueHead(nn.Module):
    """A linear map to one number, in float32."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.linear(hidden.float())
        return values.squeeze(-1)


class Critic(nn.Module):
    """A copy of a policy's backbone, and a head on it."""

    def __init__(self, head: Head | None, width: int) -> None:
        super().__init__()
        if head is None:
            raise ConfigError(
                "the backbone of this model cannot be told apart from its head, so it cannot be copied for a critic: "
                'set loss.critic = "shared"'
            )
        self.backbone = copy_sharing_frozen(head.backbone.module)
        self._run = Backbone(self.backbone, shares=head.backbone.shares)
        if head.backbone.checkpoints:
            self._run.checkpoint()
        if head.backbone.packs:
            self._run.pack()
        self.head = ValueHead(width, next(self.backbone.parameters()).device)

    def forward(self, batch: MicroBatch) -> Tensor:
        values: Tensor = self.head(self._run(batch))
        return values


def hidden_width(model: nn.Module) -> int:
    """The width of the hidden states that the output head reads."""
    get_head: Any = getattr(model, "get_output_embeddings", None)
    linear: Any = get_head() if get_head is not None else None
    if linear is None:
        raise ConfigError("this model has no output embeddings, so a critic cannot know the width of its hidden states")
    return int(linear.weight.shape[1])
