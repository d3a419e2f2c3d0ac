"""The value model of PPO: the expected remaining reward before each sampled token.

loss.critic = "copy": a copy of the policy's backbone with a scalar head and its own optimizer, at the memory cost of a second
backbone and its Adam state. Tensors that are frozen in the policy (the weights beside adapters) are shared. loss.critic =
"shared": only a head on the policy's hidden states. The head starts at zero, so the first advantages are the plain rewards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from ..batching import MicroBatch
from .backbone import Backbone
from .logprobs import Head
from .lora import copy_sharing_frozen


class ValueHead(nn.Module):
    """A linear map to one float32 value."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def start_at(self, mean: Tensor) -> None:
        """Set the bias, so that the first optimizer steps learn differences and not the mean."""
        with torch.no_grad():
            bias: Any = self.linear.bias
            own = bias.to_local() if hasattr(bias, "to_local") else bias  # the shard of one rank may be empty
            own.copy_(mean.reshape(1)[: len(own)])

    def forward(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.linear(hidden.float())
        return values.squeeze(-1)


class Critic(nn.Module):
    """A copy of a policy's backbone with a value head. Raises ConfigError if the backbone cannot be separated."""

    def __init__(self, head: Head | None, width: int) -> None:
        super().__init__()
        if head is None:
            raise ConfigError(
                "the backbone of this model cannot be separated from its head, so it cannot be copied for a critic: "
                'set loss.critic = "shared"'
            )
        self.backbone = copy_sharing_frozen(head.backbone.module)
        self._run = Backbone(self.backbone, shares=head.backbone.shares)
        if head.backbone.checkpoints:
            self._run.checkpoint()
        if head.backbone.packs:
            self._run.pack()
        self.head = ValueHead(width, next(self.backbone.parameters()).device)

    def keep_one_tree(self, *, packed: bool) -> None:
        """Run one module tree only, see `Backbone.keep_one_tree`."""
        self._run.keep_one_tree(self, "backbone", packed=packed)

    def forward(self, batch: MicroBatch) -> Tensor:
        values: Tensor = self.head(self._run(batch))
        return values


def hidden_width(model: nn.Module) -> int:
    """Returns the width of the hidden states. Raises ConfigError if the model has no output embeddings."""
    get_head: Any = getattr(model, "get_output_embeddings", None)
    linear: Any = get_head() if get_head is not None else None
    if linear is None:
        raise ConfigError("this model has no output embeddings, so the width of its hidden states is unknown to the critic")
    return int(linear.weight.shape[1])
