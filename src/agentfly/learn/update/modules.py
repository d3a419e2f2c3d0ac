"""The modules of a learner: the policy, a critic or a value head (PPO), and the reference of the KL term."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError, InvariantError
from ...kernels import launching_on
from ..algorithms import Algorithm
from ..batching import MicroBatch, Shape
from ..group import LearnerGroup
from ..model.critic import Critic, ValueHead, hidden_width
from ..model.evidence import pick, same, weight_sum
from ..model.logprobs import Scorer
from ..model.lora import copy_sharing_frozen
from ..model.shards import ShardedScorer, free, load_tensors, shard_model
from ..settings import LossSettings, OptimSettings

SHAPES: tuple[Shape, ...] = ("padded", "packed", "shared")


def check_critic_keys(algorithm: Algorithm, loss: LossSettings, optim: OptimSettings) -> None:
    """Raises ConfigError for a setting of a critic that would be ignored."""
    keys = optim.critic_keys
    if keys and not algorithm.needs_critic:
        raise ConfigError(f"{algorithm.name} has no critic: remove train.{keys[0]}")
    separate = [key for key in keys if key != "critic_lr"]
    if separate and loss.critic == "shared":
        raise ConfigError(f'train.{separate[0]} is only used by loss.critic = "copy": a shared critic learns with the policy')


class LearnerModules:
    """The modules that an update runs, sharded over the ranks of the group.

    `shape` is the shape of micro batches that the policy and the reference can run. `dtype` is what the policy computes in.
    `width` is the width of its hidden states, if it is sharded.
    """

    def __init__(
        self,
        policy: nn.Module,
        algorithm: Algorithm,
        loss: LossSettings,
        optim: OptimSettings,
        *,
        temperature: float,
        reference: nn.Module | None,
        group: LearnerGroup,
        reduce: torch.dtype,
    ) -> None:
        self.policy, self._algorithm, self.group = policy, algorithm.name, group
        first = next(policy.parameters())
        self.device, self.dtype, self.width = first.device, first.dtype, 0
        self.scorer = Scorer(policy, temperature=temperature, chunk=optim.logprob_chunk)
        self.critic: Critic | None = None
        self.value_head: ValueHead | None = None
        with launching_on(self.device):
            self.shape = self.scorer.prepare(optim, group.size)
            if algorithm.needs_critic and loss.critic == "shared":
                self.value_head = ValueHead(hidden_width(policy), self.device)
            elif algorithm.needs_critic:
                self.critic = Critic(self.scorer.head, hidden_width(policy)).eval()
        # Of a reference that was passed in; one that was copied or is renewed is part of the state.
        self._reference_sum = None if reference is None or loss.reference_every else weight_sum(reference)
        self.reference: Scorer | None = None
        if loss.kl_coef > 0:
            frozen = copy_sharing_frozen(policy) if reference is None else reference.to(self.device)
            frozen.requires_grad_(False).eval()
            self.reference = Scorer(frozen, temperature=temperature, chunk=optim.logprob_chunk)
            with launching_on(self.device):
                if self.reference.prepare(optim, group.size) != self.shape:
                    self.shape = "padded"
        if group.size > 1:
            with launching_on(self.device):
                self._shard(reduce)
        self.mark_reference()

    def _shard(self, reduce: torch.dtype) -> None:
        self.width = hidden_width(self.policy)
        self.shape = SHAPES[self.group.least(SHAPES.index(self.shape))]
        packed = self.shape != "padded"
        for scorer in filter(None, (self.scorer, self.reference)):
            if scorer.head is not None:
                owner: Any = scorer.model
                scorer.head.backbone.keep_one_tree(owner, owner.base_model_prefix, packed=packed)
        if self.critic is not None:
            self.critic.keep_one_tree(packed=packed)
        shard = partial(shard_model, size=self.group.size, reduce=reduce)
        shard(self.policy, dtype=self.dtype)
        self.scorer = ShardedScorer(self.scorer)
        if self.value_head is not None:
            shard(self.value_head, dtype=torch.float32)
        if self.critic is not None:
            shard(self.critic.head, dtype=torch.float32)
            shard(self.critic, dtype=self.dtype)
        if self.reference is not None:
            shard(self.reference.model, dtype=self.dtype)
            self.reference = ShardedScorer(self.reference)

    @property
    def path(self) -> str:
        """How batches are run: over how many ranks, packed or padded, which attention and fused layers, and why not faster."""
        fits = self.reference is None or self.shape != "padded" or not self.scorer.packs
        path = self.scorer.path if fits else "padded rows: the reference model cannot be packed"
        return path if self.group.size == 1 else f"{self.group.size} ranks; {path}"

    def values(self, batch: MicroBatch) -> Tensor:
        """Returns the values of the critic or of the shared value head, in a pass without gradients."""
        module: Any = self.value_head if self.critic is None else self.critic
        values: Tensor = module(self.scorer.hidden(batch) if self.critic is None else batch)
        free(module)
        return values

    def mark_reference(self) -> None:
        """Note some weights of the reference."""
        self._reference_mark = [] if self.reference is None else pick(self.reference.model.parameters())

    def checked_reference(self) -> Scorer:
        """Returns the reference. Raises InvariantError if its weights have changed since `mark_reference`."""
        assert self.reference is not None  # made if kl_coef > 0
        changed = not same(self._reference_mark, pick(self.reference.model.parameters()))
        if float(self.group.sum(torch.tensor(float(changed), device=self.device))):
            raise InvariantError("the reference model has changed since the run began: the KL would follow the policy")
        return self.reference

    def check_renewal(self, mix: float) -> None:
        """Raises ConfigError if the policy's weights cannot be mixed into the reference."""
        pairs = list(self._weights_of_both())
        if any(theirs.shape != weight.shape for theirs, weight in pairs):
            raise ConfigError(
                "loss.reference_every makes the policy its own reference, so loss.reference must be a model of the same size: "
                "choose another one, or remove one of the two keys"
            )
        if mix < 1.0 and (self.dtype.itemsize < 4 or not all(weight.requires_grad for _, weight in pairs)):
            raise ConfigError(
                "loss.reference_mix below 1 adds up small changes of all weights; half precision rounds them away, adapters do "
                'not change them: set agent.engine.dtype = "float32" and no lora.rank, or leave loss.reference_mix at 1'
            )

    def _weights_of_both(self) -> Iterator[tuple[Tensor, Tensor]]:
        assert self.reference is not None
        theirs, weights = list(self.reference.model.parameters()), list(self.policy.parameters())
        if len(theirs) != len(weights):
            raise ConfigError("loss.reference_every needs a reference with the policy's own weights: remove loss.reference")
        return zip(theirs, weights, strict=True)

    @torch.no_grad()
    def renew_reference(self, mix: float) -> None:
        """Move the reference towards the policy, in place; with `mix` = 1 all the way."""
        for theirs, weight in self._weights_of_both():
            if theirs is not weight:  # frozen weights are shared
                theirs.lerp_(weight.to(theirs.dtype), mix)

    @torch.no_grad()
    def check_renewed(self, loss: LossSettings, updates: int) -> None:
        """Note some weights of a reference that is renewed after so many updates. Raises InvariantError if it was not."""
        if self.reference is None or not loss.reference_every or updates % loss.reference_every:
            return
        theirs, weights = (pick(part) for part in zip(*self._weights_of_both(), strict=True))
        triples = zip(theirs, self._reference_mark, weights, strict=True)
        mixed = ((now, old.lerp(weight.to(old.dtype), loss.reference_mix)) for now, old, weight in triples)
        wrong = not all(torch.allclose(now, expected, 5e-7, 1e-9) for now, expected in mixed)
        if float(self.group.sum(torch.tensor(float(wrong), device=self.device))):
            raise InvariantError(
                "the reference model was not renewed with the policy's weights as loss.reference_every and reference_mix say"
            )
        self.mark_reference()

    def _saved(self) -> dict[str, nn.Module | None]:
        """Returns the modules that are part of the learner's state: not the policy, nor a reference that was passed in."""
        modules: dict[str, nn.Module | None] = {"critic": self.critic, "value_head": self.value_head}
        if self._reference_sum is None:
            modules["reference"] = None if self.reference is None else self.reference.model
        return modules

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Returns the weights of the modules beside the policy."""
        state = {name: module.state_dict() for name, module in self._saved().items() if module is not None}
        return state if self._reference_sum is None else state | {"given_reference": {"sum": self._reference_sum}}

    def load_state_dict(self, state: Mapping[str, Any], algorithm: str) -> None:
        """Restore `state_dict` of a learner with `algorithm`. Raises ConfigError if it has other modules."""
        modules, saved = self._saved(), state.get("given_reference")
        if self._reference_sum is not None and (saved is None or not torch.allclose(saved["sum"], self._reference_sum, 1e-9)):
            raise ConfigError(
                "loss.reference is not the reference that the run began with: resume with the same model, and for a run that "
                "is still trained name one of its checkpoints"
            )
        for name, module in modules.items():
            if (name in state) != (module is not None):
                has = "has" if name in state else "lacks"
                raise ConfigError(
                    f"the checkpoint ({algorithm}) {has} a {name.replace('_', ' ')}, unlike this run "
                    f"({self._algorithm}): resume with the algorithm, loss.critic, loss.kl_coef and loss.reference it "
                    "was saved with"
                )
        for name, module in modules.items():
            if module is not None:
                load_tensors(module, state[name])
        self.mark_reference()
