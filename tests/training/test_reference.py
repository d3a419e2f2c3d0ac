"""The reference model: what it may be, what it costs, what a resumed run does with it, and a student that follows a teacher."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import agentfly
from agentfly.build import build_reference
from agentfly.config import Config
from agentfly.engines.local.load import load_model
from agentfly.errors import ConfigError
from agentfly.health import replay
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.model.lora import adapt
from agentfly.learn.settings import LoraSettings, LossSettings
from agentfly.planning.memory import memory_of
from agentfly.planning.shapes import find_shape
from agentfly.training import sft
from agentfly.training.idle import without_effect
from tests.tiny import ROWS, sample_in_float64, save_tiny_model, tiny_agent

SMALL: dict[str, Any] = {
    "num_tasks": 3, "num_chains": 4, "threads": 1, "lr": 1e-2, "steps": 2, "validation_count": 2, "validate_at_start": False,
    "validate_every": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), seed=7)


def config_of(model: Path, reference: Path | str, **tables: Any) -> Config:
    loss = {"kl_coef": 0.1, "reference": str(reference)}
    return Config.from_dict({"agent": {"model": str(model)}, "data": {"train": "rows.jsonl"}, "loss": loss, **tables})


def train(model: Path, folder: Path, **options: Any) -> Any:
    name = options.pop("name", "run")
    return agentfly.train(tiny_agent(model), ROWS, run={"dir": str(folder), "name": name}, **(SMALL | options))


def test_a_student_reaches_its_teacher_without_a_reward(student: Path, teacher: Path, tmp_path: Path) -> None:
    agent = tiny_agent(student, reward="none", sampling={"max_tokens": 12})
    rows = [{"question": row["question"]} for row in ROWS]
    result = agentfly.train(
        agent, rows, algorithm="distill", loss={"reference": str(teacher)}, run={"dir": str(tmp_path), "name": "run"},
        **SMALL | {"steps": 40, "num_tasks": 8},
    )  # fmt: skip
    apart = [row["train/reference_kl"] for row in result.history]
    assert apart[0] > 0.3
    assert sum(apart[-5:]) / 5 < 0.6 * apart[0]
    assert all(row["train/optimizer_steps"] == 1 for row in result.history)
    assert {check.name: check.problems for check in replay(tmp_path / "run").checks if check.problems} == {}


def test_a_distilled_student_solves_what_its_teacher_solves(tmp_path: Path) -> None:
    """The teacher is the bundled model after demonstrations; the student sees none of them, and no reward."""
    tools = {"tools": ["add", "subtract", "multiply"], "max_turns": 4}
    described = {
        "agent": tools, "data": {"train": "arithmetic", "train_count": 600}, "train": {"steps": 30, "lr": 1e-3},
        "rollout": {"num_tasks": 32}, "run": {"dir": str(tmp_path), "name": "teacher", "threads": 1},
    }  # fmt: skip
    sft(Config.from_dict(described))
    agent = agentfly.ReactAgent("pocket", reward="exact_match", sampling={"max_tokens": 64}, **tools)
    result = agentfly.train(
        agent, "arithmetic", algorithm="distill", loss={"reference": str(tmp_path / "teacher")}, steps=5, lr=5e-4,
        num_tasks=16, num_chains=4, threads=1, num_minibatches=2, validation_count=60, validate_every=0,
        run={"dir": str(tmp_path), "name": "run"},
    )  # fmt: skip
    assert result.before["validation/success"] < 0.5
    assert result.after["validation/success"] > 0.7
    assert result.history[-1]["train/reference_kl"] < 0.3 * result.history[0]["train/reference_kl"]


def test_distillation_without_a_teacher_is_refused(student: Path) -> None:
    with pytest.raises(ConfigError, match="distill learns from the reference model: set loss.reference"):
        Config.from_dict({"algorithm": "distill"})
    with pytest.raises(ConfigError, match=r"distill does not use loss.kl_in"):
        Config.from_dict({"algorithm": "distill", "loss": {"reference": "x", "kl_in": "loss"}})


def test_the_reference_may_be_a_directory_a_run_or_one_of_its_checkpoints(student: Path, teacher: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(student)
    run = train(student, tmp_path)
    scored = [load_model(name)[0].state_dict() for name in (teacher, run.checkpoint)]
    for name, weights in ((teacher, scored[0]), (tmp_path / "run", scored[1]), (run.checkpoint, scored[1])):
        reference = build_reference(config_of(student, name), model, tokenizer)
        assert all(torch.equal(weight, weights[key]) for key, weight in reference.state_dict().items())
    assert build_reference(Config.from_dict({"loss": {"kl_coef": 0.1}}), model, tokenizer) is None, "the learner copies"


def test_adapters_share_the_base_with_the_reference(student: Path) -> None:
    model, tokenizer = load_model(student)
    adapt(model, LoraSettings(rank=4))
    for name, weight in model.named_parameters():
        if "lora_b" in name:
            torch.nn.init.normal_(weight)
    config = config_of(student, student, lora={"rank": 4})
    reference = build_reference(config, model, tokenizer)
    ids, base = torch.arange(20)[None], load_model(student)[0]
    torch.testing.assert_close(reference(ids).logits, base(ids).logits)
    assert (model(ids).logits - base(ids).logits).abs().max() > 0.1
    owned = {weight.data_ptr() for weight in model.parameters() if not weight.requires_grad}
    own = sum(weight.numel() for weight in reference.parameters() if weight.data_ptr() not in owned)
    assert own == sum(weight.numel() for weight in model.parameters() if weight.requires_grad)


def test_a_reference_that_cannot_score_the_policys_tokens_gets_a_sentence(student: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(student)
    worlds = config_of(student, "pocket-worlds")
    with pytest.raises(ConfigError, match="has another tokenizer than the policy, whose token"):
        build_reference(worlds, model, tokenizer)
    short = save_tiny_model(tmp_path / "short", context=64)
    with pytest.raises(ConfigError, match="was made for 64 tokens, fewer than max_context = 512"):
        build_reference(config_of(student, short), model, tokenizer)
    assert build_reference(config_of(student, short, agent={"model": str(student), "max_context": 64}), model, tokenizer)
    with pytest.raises(ConfigError, match="no such model directory"):
        build_reference(config_of(student, "./nothing"), model, tokenizer)


def test_a_resumed_run_goes_on_with_the_same_reference_and_refuses_another(
    student: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample_in_float64(monkeypatch)
    loss = {"kl_coef": 0.1, "reference": str(teacher)}
    whole = train(student, tmp_path, name="whole", loss=loss, steps=4)
    train(student, tmp_path, loss=loss)
    again = train(student, tmp_path, loss=loss, steps=4, resume=tmp_path / "run")
    compared = [[row["train/reference_kl"] for row in result.history][-2:] for result in (whole, again)]
    assert compared[0] == pytest.approx(compared[1], rel=1e-6)
    assert {check.name: check.problems for check in replay(tmp_path / "run").checks if check.problems} == {}
    other = save_tiny_model(tmp_path / "other", seed=8)
    with pytest.raises(ConfigError, match="not the reference that the run began with"):
        train(student, tmp_path, loss=loss | {"reference": str(other)}, steps=5, resume=tmp_path / "run")
    with pytest.raises(ConfigError, match="lacks a reference, unlike this run"):
        train(student, tmp_path, loss={"kl_coef": 0.1}, steps=5, resume=tmp_path / "run")


def test_a_reference_passed_to_a_learner_is_not_the_one_that_it_copied() -> None:
    from tests.learn.chains import tiny_llama

    loss = LossSettings(kl_coef=0.1)
    saved = PolicyLearner(tiny_llama(), loss=loss).state_dict()
    with pytest.raises(ConfigError, match="not the reference that the run began with"):
        PolicyLearner(tiny_llama(), loss=loss, reference=tiny_llama(seed=3)).load_state_dict(saved)


def test_what_a_reference_takes_is_planned_and_one_that_is_not_read_is_said() -> None:
    shape, large = find_shape("7B"), find_shape("32B")
    assert memory_of(shape, reference=large).reference == pytest.approx(2 * large.weights / 2**30)
    assert memory_of(shape, lora_rank=8, reference=large).reference == pytest.approx(2 * large.weights / 2**30)
    idle = dataclasses.replace(Config(), loss=LossSettings(reference="pocket"))
    assert without_effect(idle) == ["loss.reference cannot act: loss.kl_coef is 0, or remove it"]
