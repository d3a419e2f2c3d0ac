"""The optimizer: float32 masters behind parameters of low precision."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from agentfly.learn import optim
from agentfly.learn.settings import OptimSettings
from tests.close import assert_close_to_norm


def module() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 3)).to(torch.bfloat16)
    made[1].weight.requires_grad_(False)
    made[2].float()  # full precision: its own master
    return made


def trained(steps: int) -> tuple[nn.Module, optim.Optimizer, list[float]]:
    made = module()
    optimizer = optim.Optimizer([(made, 1e-2)], OptimSettings(max_grad_norm=0.5))
    lengths = []
    for step in range(steps):
        for number, parameter in enumerate(p for p in made.parameters() if p.requires_grad):
            if (step, number) != (1, 0):  # one without a gradient, once
                parameter.grad = torch.full_like(parameter, 0.1 * (number + 1) * (-1) ** step)
        lengths.append(float(optimizer.clip()))
        optimizer.step()
    return made, optimizer, lengths


@pytest.mark.parametrize("limit", [1, 31, 2**28])
def test_however_many_are_copied_at_a_time_the_step_is_the_same(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "MAX_COPIED", limit)
    made, optimizer, lengths = trained(3)
    assert lengths[0] == pytest.approx(
        sum(n * x**2 for n, x in ((30, 0.1), (5, 0.2), (4, 0.3), (12, 0.4), (3, 0.5))) ** 0.5, 5e-3
    )
    masters = optimizer.state_dict()["masters"]
    short = [p for p in made.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
    assert [master.dtype for master in masters] == [torch.float32] * len(short) == [torch.float32] * 3
    before = dict(module().named_parameters())
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, before[name]) == (not parameter.requires_grad)
        assert parameter.grad is None
    for parameter, master in zip(short, masters, strict=True):
        assert torch.equal(parameter.detach(), master.to(torch.bfloat16))
    # Adam by hand, on the first weight: of three gradients it saw the first and the third, and both were shortened.
    first = nn.Parameter(before["0.weight"].detach().float())
    adam = torch.optim.AdamW([first], lr=1e-2, betas=OptimSettings().betas, weight_decay=OptimSettings().weight_decay)
    for length in (lengths[0], lengths[2]):
        first.grad = torch.full_like(first, 0.1).bfloat16().float() * (0.5 / length)
        adam.step()
    assert_close_to_norm(masters[0], first.detach())


@pytest.mark.parametrize("count", [15, 128])
def test_gradients_of_many_micro_batches_add_up_in_float32(count: int) -> None:
    """The reference is the sum of the same gradients in float64. Added up in bfloat16, the error is near one percent."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    optimizer = optim.Optimizer([(layer, 1e-2)], OptimSettings(max_grad_norm=1e9))
    exact = torch.zeros(64, 64, dtype=torch.float64)
    for _ in range(count):
        loss = (layer(torch.rand(4, 64, dtype=torch.bfloat16)).float() * torch.rand(4, 64)).sum()
        exact += torch.autograd.grad(loss, layer.weight, retain_graph=True)[0].double()
        optimizer.backward(loss)
        assert layer.weight.grad is None, "the short gradient is freed at once"
    optimizer.clip()
    found = optimizer._masters[0].grad
    assert found is not None
    assert found.dtype == torch.float32
    assert (found.double() - exact).norm() / exact.norm() < 1e-6


def test_two_optimizers_on_one_model_do_not_take_each_other_s_gradients() -> None:
    layer = nn.Linear(4, 4).to(torch.bfloat16)
    first = optim.Optimizer([(layer, 1e-2)], OptimSettings())
    second = optim.Optimizer([(layer, 1e-2)], OptimSettings())
    first.backward(layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
    assert second._masters[0].grad is None
    layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad is not None, "no hook is left behind"
