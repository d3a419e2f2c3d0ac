"""An optimizer over a model's parameters, with float32 master weights and, for float16, a scaled loss.

Parameters change in place, so that an engine that shares them sees the new weights. For parameters of low precision the
optimizer works on float32 masters and writes them back: added to a bfloat16 weight directly, a small update is rounded away.
Gradients add up in float32 for the same reason: `backward` moves the gradient of each parameter to its master as soon as it is
known. The sum takes 4 bytes per parameter from the first micro batch to the step; short gradients exist for a moment only.

The gradients of a float16 model are computed from the loss times a factor, because float16 underflows below 6e-8. Callers
therefore run `Optimizer.backward(loss)`, and compute the gradient again if `retry` returns True.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ... import plugins
from ...errors import AgentFlyError, ConfigError, InvariantError
from ..model.evidence import ExpectedStep, local_part, pick, same
from ..model.sharded import layers_of, shard_like
from ..settings import ADAMW, OptimSettings
from .expected import StepCheck
from .rules import Groups, Make, NamedOptimizer

MAX_COPIED = 2**28
"""Numbers converted between precisions at a time: 1 GiB as float32."""
_FULL = (torch.float32, torch.float64)

FIRST_SCALE, LARGEST_SCALE = 2.0**16, 2.0**24
STEPS_TO_DOUBLE = 100
"""Steps without an overflow after which the loss scale is doubled."""


class LossScale:
    """Dynamic loss scaling. The factor is 1 unless a parameter is float16."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        """`parameters` are all tensors that gradients pass through, frozen ones included."""
        self.active = any(parameter.dtype == torch.float16 for parameter in parameters)
        self.factor = FIRST_SCALE if self.active else 1.0
        self._steps = 0

    def lower(self) -> bool:
        """Call after a gradient that is not finite. Returns False if a smaller factor cannot help."""
        self._steps = 0
        if not self.active or self.factor <= 1.0:
            return False
        self.factor = max(1.0, self.factor / 4.0)
        return True

    def stepped(self) -> None:
        """Call after a step with a finite gradient."""
        self._steps += 1
        if self.active and self._steps % STEPS_TO_DOUBLE == 0:
            self.factor = min(LARGEST_SCALE, 2.0 * self.factor)

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.active:
            self.factor, self._steps = float(state["factor"]), int(state["steps"])


def counted_steps(state: Mapping[Any, Any]) -> int:
    """Returns the most steps in Adam's state, which has a "step" for each parameter."""
    counts = [values["step"] for values in state.values() if "step" in values]
    return int(torch.stack([torch.as_tensor(count) for count in counts]).max()) if counts else 0


def _move_gradient(master: Tensor, parameter: Tensor) -> None:
    """Add the gradient of a parameter to that of its float32 master, and free it."""
    if parameter.grad is None:
        return
    if master.grad is None:
        master.grad = parameter.grad.to(master.dtype)
    else:
        master.grad.add_(parameter.grad)
    parameter.grad = None


def _rule_of(settings: OptimSettings) -> NamedOptimizer | Make:
    """The named optimizer, or what a user gives."""
    optimizer = settings.optimizer
    rule: NamedOptimizer | Make = plugins.resolve("optimizers", optimizer) if isinstance(optimizer, str) else optimizer
    return rule


def _of_user(make: Make, groups: Groups) -> torch.optim.Optimizer:
    """The optimizer that a user's function makes of the groups. Raises ConfigError if it fails or makes something else."""
    try:
        made = make(groups)
    except AgentFlyError:
        raise
    except Exception as error:
        raise ConfigError(f"train.optimizer raised {type(error).__name__}: {error}") from error
    held = {id(each) for group in getattr(made, "param_groups", ()) for each in group["params"]}
    if not isinstance(made, torch.optim.Optimizer) or held != {id(each) for group in groups for each in group["params"]}:
        raise ConfigError(
            "train.optimizer must make a torch.optim.Optimizer of all parameter groups that it is given, not "
            f"{type(made).__name__}"
        )
    return made


def _groups_of(masters: list[Tensor], by_newton: list[bool], lr: float, decay: float) -> Groups:
    """The parameter groups of one module: matrices decay, norms and biases do not, and Muon's matrices are apart."""
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    muons: list[Tensor] = []
    for master, newton in zip(masters, by_newton, strict=True):
        (muons if newton else matrices if master.dim() >= 2 else vectors).append(master)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "lr": lr, "weight_decay": decay},
        {"params": vectors, "lr": lr, "weight_decay": 0.0},
        {"params": muons, "lr": lr, "weight_decay": decay, "orthogonal": True},
    ]
    return [group for group in groups if group["params"]]


class Optimizer:
    """The optimizer of the settings on the trainable parameters of some modules."""

    def __init__(
        self, modules: Iterable[tuple[nn.Module, float]], settings: OptimSettings, computed: torch.dtype = torch.float32
    ) -> None:
        """`modules` are pairs of a module and its learning rate. `computed` is the dtype that the modules compute in, if it is
        not that of their parameters.
        """
        self._max_norm = settings.max_grad_norm
        self._settings, self._factor = settings, 1.0  # the factor of `set_lr`
        self._parameters: list[Tensor] = []
        self._masters: list[Tensor] = []
        self._lrs: list[float] = []
        self._orthogonal: list[bool] = []
        rule = _rule_of(settings)
        orthogonal = isinstance(rule, NamedOptimizer) and rule.orthogonal
        groups: list[dict[str, Any]] = []
        modules = list(modules)
        passed = [torch.empty(0, dtype=computed), *(parameter for module, _ in modules for parameter in module.parameters())]
        self._scale = LossScale(passed)
        for module, lr in modules:
            parameters = [p for p in module.parameters() if p.requires_grad]
            masters = [p if p.dtype in _FULL else p.detach().float().requires_grad_() for p in parameters]
            inner = {id(p) for layer in layers_of(module) for p in layer.parameters() if p.dim() >= 2} if orthogonal else set()
            by_newton = [id(p) in inner for p in parameters]
            self._parameters += parameters
            self._masters += masters
            self._orthogonal += by_newton
            self._lrs += [lr] * len(masters)
            groups += _groups_of(masters, by_newton, lr, settings.weight_decay)
        if orthogonal and not any(self._orthogonal):
            names = " and ".join(type(module).__name__ for module, _ in modules)
            raise ConfigError(f'train.optimizer = "muon" finds no matrix in a transformer layer of {names}: choose another one')
        self._adam = rule.make(groups, settings.betas) if isinstance(rule, NamedOptimizer) else _of_user(rule, groups)
        for group in self._adam.param_groups:
            group["base_lr"] = group["lr"]
        named = rule if isinstance(rule, NamedOptimizer) else None
        self._check = StepCheck(self._masters, self._lrs, self._orthogonal, settings, self._adam, named)

    @property
    def growth(self) -> int:
        """Bytes of gradients and moments that the first step allocates on this rank's device."""
        sizes = [(local_part(master), newton) for master, newton in zip(self._masters, self._orthogonal, strict=True)]
        return int(sum(held.numel() * (held.element_size() + self._settings.moment_bytes(newton)) for held, newton in sizes))

    def set_lr(self, factor: float) -> None:
        """Set every learning rate to its base rate times `factor`."""
        self._factor = factor
        for group in self._adam.param_groups:
            group["lr"] = group["base_lr"] * factor

    @property
    def lr(self) -> float:
        """The learning rate that the next step uses for the first module."""
        return float(self._adam.param_groups[0]["lr"])

    @property
    def num_steps(self) -> int | None:
        """The steps that the averages have seen; None for an optimizer of a user's own."""
        return counted_steps(self._adam.state) if self._check.knows else None

    def expected(self) -> ExpectedStep:
        """Returns what `step` must make of a sample of the weights. Call it between `clip` and `step`."""
        return self._check.expected(self._factor)

    def compare(self, expected: ExpectedStep) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the squared norms of `ExpectedStep.compare` after `step`.

        Raises InvariantError if the parameters are not those of the float32 masters.
        """
        pairs = [(m, p) for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        weights = pick(p for _, p in pairs)
        if not same([value.to(each.dtype) for value, each in zip(pick(m for m, _ in pairs), weights, strict=True)], weights):
            raise InvariantError("the weights of the model are not those that the optimizer computed: they were not copied")
        return self._check.compare(expected)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of `loss` to the masters' gradients."""
        scaled: Any = loss * self._scale.factor if self._scale.active else loss
        # Hooks for this call only: another optimizer on the same parameters must find their gradients where it expects them.
        pairs: list[tuple[Any, Tensor]] = [(p, m) for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        hooks = [parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master)) for parameter, master in pairs]
        try:
            scaled.backward()
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def loss_factor(self) -> float:
        """What `backward` multiplies a loss with."""
        return self._scale.factor

    @property
    def loss_scale(self) -> float | None:
        """The factor on the loss; None if no parameter is float16."""
        return self._scale.factor if self._scale.active else None

    @property
    def range_hint(self) -> str:
        """The end of an error sentence: another possible cause of a value that is not finite."""
        return ", or use bfloat16: float16 overflows above 65,504" if self._scale.active else ""

    def retry(self) -> bool:
        """Discard a gradient that is not finite. Returns True if computing it again may give a finite one."""
        self.zero_grad()
        return self._scale.lower()

    def clip(self) -> Tensor:
        """Clip the gradient to `max_grad_norm`. Returns its norm before clipping."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:  # a gradient that did not come through `backward`
                _move_gradient(master, parameter)
        if self._scale.active:
            torch._foreach_div_([m.grad for m in self._masters if m.grad is not None], self._scale.factor)
        self._check.note()
        norm: Any = nn.utils.clip_grad_norm_(self._masters, self._max_norm)
        full: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # of shards: a collective
        self._check.clipped(full)
        return full

    def step(self) -> None:
        """Apply the clipped gradient and clear it."""
        self._adam.step()
        self._scale.stepped()
        with torch.no_grad():
            for pairs in self._pairs():
                torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])
        self.zero_grad()

    def _pairs(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Yield (parameter, master) pairs in groups of at most MAX_COPIED numbers: few launches, little memory used twice."""
        pairs: list[tuple[Tensor, Tensor]] = []
        size = 0
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is parameter:
                continue
            if pairs and size + parameter.numel() > MAX_COPIED:
                yield pairs
                pairs, size = [], 0
            pairs.append((parameter, master))
            size += parameter.numel()
        if pairs:
            yield pairs

    def zero_grad(self) -> None:
        for tensor in (*self._parameters, *self._masters):
            tensor.grad = None

    def state_dict(self) -> dict[str, Any]:
        masters = [m.detach() for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        more: dict[str, object] = {"loss_scale": self._scale.state_dict()} if self._scale.active else {}
        more |= {} if (count := self.num_steps) is None else {"steps": count}
        more |= {} if (name := self._settings.optimizer_name) == ADAMW else {"optimizer": name}
        return {"adam": self._adam.state_dict(), "masters": masters, **more}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, whose tensors are there or are functions that read rows of them (`model.shards.Read`)."""
        if (saved := state.get("optimizer", ADAMW)) != (name := self._settings.optimizer_name):
            raise ConfigError(f"the checkpoint holds the moments of train.optimizer = {saved!r}, not of {name!r}: set that one")
        adam, parameters = state["adam"], [each for group in self._adam.param_groups for each in group["params"]]
        if set(adam["state"]) - set(range(len(parameters))):
            raise ConfigError("the checkpoint's optimizer has other parameters")
        averages = {
            number: {
                key: shard_like(parameters[number], value) if callable(value) or torch.as_tensor(value).dim() else value
                for key, value in values.items()
            }
            for number, values in adam["state"].items()
        }
        # The settings of this run win over the saved ones: only Adam's averages are taken from the state.
        options = [{k: v for k, v in group.items() if k != "params"} for group in self._adam.param_groups]
        self._adam.load_state_dict({**adam, "state": averages})
        self._check.forget()
        for group, option in zip(self._adam.param_groups, options, strict=True):
            group.update(option)
        if "loss_scale" in state:  # absent if the saved run used another number format
            self._scale.load_state_dict(state["loss_scale"])
        masters = [m for p, m in zip(self._parameters, self._masters, strict=True) if m is not p]
        with torch.no_grad():
            for master, saved in zip(masters, state["masters"] if masters else (), strict=True):  # ranks have none
                master.copy_(saved)
