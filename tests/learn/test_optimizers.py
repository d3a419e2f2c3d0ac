"""The optimizers by name: what they compute, that a wrong step is found, and that a resumed learner steps on alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import agentfly
from agentfly.config import Config
from agentfly.errors import ConfigError, InvariantError
from agentfly.health import diagnose
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.lora import adapt
from agentfly.learn.optim import Optimizer, moments, rules
from agentfly.learn.settings import MOMENT_BYTES, LoraSettings, OptimSettings
from agentfly.training.ledger import MAX_STEP_ERROR
from tests.close import assert_close_to_norm
from tests.learn.chains import tiny_llama
from tests.learn.test_learner import VOCABULARY, learner_of, make_groups, weights_of
from tests.tiny import ROWS, save_tiny_model, tiny_agent

SHORT = ("adamw_bf16", "adamw_8bit")
NAMED = tuple(MOMENT_BYTES)


def trained(name: str, steps: int = 40) -> tuple[torch.Tensor, Optimizer]:
    """How far a small regression moves its weights, with noisy gradients of very different sizes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(72, 96), nn.Tanh(), nn.Linear(96, 8))
    start = torch.cat([weight.detach().flatten().clone() for weight in net.parameters()])
    inputs = torch.randn(256, 72) * torch.logspace(-2, 0, 72)
    targets = torch.tanh(inputs @ torch.randn(72, 8))
    optimizer = Optimizer([(net, 1e-3)], OptimSettings(optimizer=name, weight_decay=0.01))
    for _ in range(steps):
        chosen = torch.randint(0, 256, (32,))
        optimizer.backward((net(inputs[chosen]) - targets[chosen]).square().mean())
        optimizer.clip()
        expected = optimizer.expected()
        optimizer.step()
        _, error, planned = optimizer.compare(expected)
        assert error <= (MAX_STEP_ERROR * 1e-1) ** 2 * planned
    return torch.cat([weight.detach().flatten() for weight in net.parameters()]) - start, optimizer


# ---- what is computed ----------------------------------------------------------------------------------------------------


def test_short_moments_move_weights_as_float32_ones_do() -> None:
    """An average of size c that is rounded at random to numbers d apart varies by sqrt(c d / 2): d is 2^-7 c for bfloat16, and
    for 8 bits 0.014 of the block's largest number, about 3 c. The errors of steps have no direction: a path has less of them.
    """
    exact, _ = trained("adamw")
    for name, distance in (("adamw_bf16", 2.0**-7), ("adamw_8bit", 3 * moments.WIDEST)):
        path, _ = trained(name)
        assert 0.0 < float((path - exact).norm() / exact.norm()) < (distance / 2) ** 0.5, name


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "8bit"])
def test_moments_are_rounded_without_a_direction_and_alike_on_any_number_of_ranks(kind: str, signed: bool) -> None:
    torch.manual_seed(0)
    value = torch.rand(64, 700) ** 4 + 1e-6
    value = value * torch.randn_like(value).sign() if signed else value
    state = {f"m{part}": tensor for part, tensor in moments.make(value, kind).items()}
    total = torch.zeros_like(value, dtype=torch.float64)
    for seed in range(64):
        moments.write(state, "m", slice(0, 64), value, signed, seed, 0)
        total += moments.read(state, "m", slice(0, 64), signed)
    stored, around = moments.sample(state, "m", signed, 10**9)
    assert (stored - value.flatten().double()).abs().le(around * 1.02 + 1e-7).all(), "to a neighbour"
    away = (total / 64 - value).abs() / around.view(value.shape)
    assert float(away.mean()) < 0.5 * (0.5 / 64**0.5), "the mean of many roundings is the value"
    assert float(((total / 64 - value) / around.view(value.shape)).mean().abs()) < 5 * 0.5 / (64 * value.numel()) ** 0.5
    lower = {f"m{part}": tensor for part, tensor in moments.make(value[40:], kind).items()}
    moments.write(lower, "m", slice(0, 24), value[40:], signed, 63, 40 * 700)
    assert all(torch.equal(lower[name], state[name][40:]) for name in state)


def test_an_average_of_squares_that_shrinks_by_a_thousandth_shrinks() -> None:
    for kind in ("bf16", "8bit"):
        value = torch.full((64, 256), 0.3)
        value[:, 0] = 1.0  # the largest of the block
        state = {f"m{part}": tensor for part, tensor in moments.make(value, kind).items()}
        moments.write(state, "m", slice(0, 64), value, False, 0, 0)
        for step in range(1, 301):
            value = moments.read(state, "m", slice(0, 64), False)
            value[:, 1:] *= 0.999
            moments.write(state, "m", slice(0, 64), value, False, step, 0)
        assert float(moments.read(state, "m", slice(0, 64), False)[:, 1:].mean()) == pytest.approx(
            0.3 * 0.999**300, rel=0.01
        ), kind


def test_eight_bits_never_make_the_square_of_a_gradient_zero() -> None:
    assert float(moments.table_of(False, torch.device("cpu")).min()) > 0.0
    signed = moments.table_of(True, torch.device("cpu"))
    assert torch.equal(signed, -signed.flip(0))
    assert float((signed[1:] - signed[:-1]).max()) <= moments.WIDEST


def plain_muon(weight: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    """Muon as its authors write it (K. Jordan; the size of a step of arXiv:2502.16982), on one matrix in float64."""
    weight, momentum = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient.double()
        update = 0.05 * gradient.double() + 0.95 * momentum
        x = update / (update.norm() + 1e-7)
        flipped = x.shape[0] > x.shape[1]
        x = x.T if flipped else x
        for _ in range(5):
            s = x @ x.T
            x = 3.4445 * x + (-4.7750 * s + 2.0315 * s @ s) @ x
        update = (x.T if flipped else x) * 0.2 * max(weight.shape) ** 0.5
        weight = weight - lr * decay * weight - lr * update
    return weight


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 16, 24)])
def test_muon_is_the_published_iteration(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    weight = nn.Parameter(start.clone())
    optimizer = rules.CompactAdamW([{"params": [weight], "lr": 0.02, "weight_decay": 0.1, "orthogonal": True}], (0.9, 0.999))
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    parts = range(shape[0]) if len(shape) == 3 else [slice(None)]
    for part in parts:
        assert_close_to_norm(
            weight[part].detach(), plain_muon(start[part], [each[part] for each in gradients], 0.02, 0.1).float()
        )
    values = torch.linalg.svdvals(rules.muon_change(gradients[0])) / (0.2 * max(shape[-2:]) ** 0.5)
    assert 0.5 < float(values.min()) < float(values.max()) < 1.3, "all singular values come near 1"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="pip install 'torch>=2.9' for torch.optim.Muon")
def test_muon_is_that_of_torch() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(24, 40), [torch.randn(24, 40) for _ in range(3)]
    own, other = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    groups = [{"params": [own], "lr": 0.02, "weight_decay": 0.1, "orthogonal": True}]
    pair = (
        (own, rules.CompactAdamW(groups, (0.9, 0.999))),
        (other, torch.optim.Muon([other], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")),
    )
    for weight, optimizer in pair:
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
    # torch iterates in bfloat16, whose rounding the five iterations enlarge
    assert float((own - other).detach().norm() / (other.detach() - start).norm()) < 8 * torch.finfo(torch.bfloat16).eps


def test_muon_steps_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, optimizer="muon")
    learner.update(make_groups(model))
    names = {id(weight): name for name, weight in model.named_parameters()}
    for weight, state in learner._optimizer._adam.state.items():
        matrix = ".layers." in names[id(weight)] and weight.dim() == 2
        assert ("exp_avg_sq" not in state) == matrix, names[id(weight)]
    with pytest.raises(ConfigError, match="finds no matrix in a transformer layer of Linear"):
        Optimizer([(nn.Linear(3, 3), 1e-3)], OptimSettings(optimizer="muon"))


@pytest.mark.parametrize("name", NAMED)
def test_the_bytes_of_the_moments_are_those_that_the_plan_counts(name: str) -> None:
    model = tiny_llama(VOCABULARY, width=256)
    learner = learner_of(model, optimizer=name)
    learner.update(make_groups(model))
    optimizer = learner._optimizer
    states = (value for state in optimizer._adam.state.values() for key, value in state.items() if key != "step")
    held = sum(value.numel() * value.element_size() for value in states)
    planned = optimizer.growth - 4 * sum(weight.numel() for weight in model.parameters())
    assert held == pytest.approx(planned, rel=0.01)


# ---- what is found -------------------------------------------------------------------------------------------------------


def scaled(name: str, value: float) -> Callable[[Any], None]:
    def change(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group[name] = group[name] * value if value != 9.0 else 0.1

    return change


def lost_moments(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def other_betas(optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["betas"] = (0.9, 0.9)


FAULTS: dict[str, Callable[[Any], None]] = {
    "no step": scaled("lr", 0.0),
    "a rate 1 % off": scaled("lr", 1.01),
    "a decay that was not set": scaled("weight_decay", 9.0),
    "moments lost between steps": lost_moments,
    "other averages": other_betas,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", [*SHORT, "muon"])
def test_a_wrong_step_of_a_named_optimizer_is_found(name: str, fault: str) -> None:
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, lr=1e-3, optimizer=name)
    assert learner.update(make_groups(model))["train/step_error"] < 0.1 * MAX_STEP_ERROR
    FAULTS[fault](learner._optimizer._adam)
    learner._optimizer.set_lr = lambda factor: None  # type: ignore[method-assign]
    told = ""
    try:
        error = learner.update(make_groups(model, 1))["train/step_error"]
    except InvariantError as raised:
        error, told = 1.0, str(raised)
    assert error > MAX_STEP_ERROR
    assert ("moments" in told) == (fault in ("moments lost between steps", "other averages"))


def test_every_matrix_of_muon_is_computed_again_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, optimizer="muon")
    matrices = sum(learner._optimizer._orthogonal)
    real, wrong = rules._muon, list(model.model.layers)[1].mlp.down_proj.weight

    def step(weight: torch.Tensor, momentum: torch.Tensor, group: Any) -> None:
        real(weight, momentum, {**group, "lr": 2 * group["lr"]} if weight is wrong else group)

    monkeypatch.setattr(rules, "_muon", step)
    errors = [learner.update(make_groups(model, seed))["train/step_error"] for seed in range(matrices)]
    assert sum(error > MAX_STEP_ERROR for error in errors) == 1


# ---- resume, adapters, a critic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "algorithm", "lora"),
    [(name, algorithm, lora) for name in NAMED for algorithm, lora in (("ppo", 0), ("grpo", 4)) if name != "adamw" or lora],
)
def test_a_resumed_learner_goes_on_exactly(tmp_path: Path, name: str, algorithm: str, lora: int) -> None:
    model = tiny_llama(VOCABULARY, width=64)
    if lora:
        adapt(model, LoraSettings(rank=lora), seed=3)
    options: dict[str, Any] = {"optimizer": name, "num_minibatches": 2} | (
        {"critic_warmup_steps": 0, "critic_epochs": 1, "critic_minibatches": 1} if algorithm == "ppo" else {}
    )
    learner = learner_of(model, algorithm, **options)
    for seed in range(2):
        learner.update(make_groups(model, seed))
    torch.save(learner.state_dict(), tmp_path / "state.pt")
    other = copy.deepcopy(model)
    resumed = learner_of(other, algorithm, **options)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    groups = make_groups(model, 7)
    one, two = learner.update(groups), resumed.update(groups)
    assert max(one.pop("train/step_error"), two.pop("train/step_error")) < 1e-6
    assert one == two
    assert torch.equal(weights_of(model), weights_of(other))


def test_moments_of_another_optimizer_are_refused() -> None:
    model = tiny_llama(VOCABULARY)
    for saved, own in (("adamw", "muon"), ("adamw_8bit", "adamw")):
        state = learner_of(model, optimizer=saved).state_dict()
        with pytest.raises(ConfigError, match=f"holds the moments of train.optimizer = '{saved}', not of '{own}'"):
            learner_of(model, optimizer=own).load_state_dict(state)


# ---- an optimizer of the user's ------------------------------------------------------------------------------------------


def momentum(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=7.0, momentum=0.9)


def test_an_optimizer_of_a_user_trains_with_the_rates_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef make(groups):\n    return torch.optim.SGD(groups, lr=7.0, momentum=0.9)\n"
    )
    found = []
    for given in (momentum, f"{tmp_path / 'mine.py'}:make"):
        model = tiny_llama(VOCABULARY)
        start = weights_of(copy.deepcopy(model))
        learner = learner_of(model, optimizer=given, lr=1e-2, warmup_steps=2)
        gradient: list[torch.Tensor] = []
        step = learner._optimizer._adam.step

        def watched(step: Any = step, learner: Any = learner, gradient: Any = gradient) -> None:
            gradient[:] = [torch.cat([each.grad.flatten() for each in learner._optimizer._masters])]
            step()

        learner._optimizer._adam.step = watched
        metrics = learner.update(make_groups(model))
        assert "train/step_error" not in metrics
        assert "train/adam_steps" not in metrics
        assert metrics["train/weight_change"] > 0.0
        assert_close_to_norm(weights_of(model) - start, -0.5e-2 * gradient[0], scale=1e-3)
        found.append(weights_of(model))
        again = learner_of(copy.deepcopy(model), optimizer=given, lr=1e-2, warmup_steps=2)
        again.load_state_dict(copy.deepcopy(learner.state_dict()))
        groups = make_groups(model, 3)
        one, two = learner.update(groups), again.update(groups)
        assert one == two
        assert torch.equal(weights_of(model), weights_of(again.model))
    assert torch.equal(*found)


def broken(groups: Any) -> torch.optim.Optimizer:
    raise ZeroDivisionError("no")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda groups: 3, "must make a torch.optim.Optimizer of all parameter groups that it is given, not int"),
        (lambda groups: torch.optim.SGD(groups[:1], lr=1.0), "of all parameter groups"),
        (broken, "train.optimizer raised ZeroDivisionError: no"),
    ],
)
def test_what_makes_no_optimizer_is_refused(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        PolicyLearner(tiny_llama(VOCABULARY), optim=OptimSettings(optimizer=given))


def test_names_are_checked_where_they_are_set() -> None:
    with pytest.raises(ConfigError, match="did you mean 'muon'"):
        Config.from_dict({"train": {"optimizer": "moun"}})
    with pytest.raises(ConfigError, match="train.optimizer must be a name or a function, not 5"):
        OptimSettings(optimizer=5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="train.optimizer of your own works on one learner rank"):
        Config.from_dict({"train": {"optimizer": "mine.py:make"}, "learner": {"ranks": 2}})
    Config.from_dict({"train": {"optimizer": "muon"}, "learner": {"ranks": 2}})


@pytest.mark.parametrize("given", ["adamw_8bit", momentum])
def test_a_run_with_it_is_whole_and_goes_on(tmp_path: Path, given: Any) -> None:
    model = save_tiny_model(tmp_path / "model")
    small = {"num_tasks": 2, "num_chains": 3, "threads": 1, "lr": 1e-3, "validation_count": 2, "validate_at_start": False}
    options = {"run": {"dir": str(tmp_path), "name": "run"}, **small, "train.optimizer": given}
    agentfly.train(tiny_agent(model), ROWS, steps=2, **options)
    result = agentfly.train(tiny_agent(model), ROWS, steps=3, resume=tmp_path / "run", **options)
    assert result.steps == 3
    report = diagnose(tmp_path / "run")
    assert {check.name: check.problems for check in report.checks if check.problems} == {}
