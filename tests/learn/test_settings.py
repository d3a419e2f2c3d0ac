"""Settings check themselves, carry help, and an algorithm refuses what it would ignore."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import ConfigError, UnknownName
from agentfly.learn.algorithms import ALGORITHMS, find_algorithm
from agentfly.learn.settings import LossSettings, OptimSettings


@pytest.mark.parametrize("kind", [LossSettings, OptimSettings])
def test_every_setting_says_what_it_is_for(kind):
    for field in dataclasses.fields(kind):
        assert field.metadata["help"].endswith("."), field.name


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        (LossSettings, {"clip_low": -0.1}, "loss.clip_low must be a number from 0 to 1, not -0.1"),
        (LossSettings, {"clip_high": "0.2"}, "loss.clip_high must be a number"),
        (LossSettings, {"dual_clip": 1.0}, "loss.dual_clip must be a number above 1, not 1.0"),
        (LossSettings, {"aggregation": "mean"}, "must be 'token_mean', 'sequence_mean' or 'sequence_sum', not 'mean'"),
        (LossSettings, {"kl_kind": "k4"}, "'k1', 'k2' or 'k3'"),
        (LossSettings, {"gamma": 1.5}, "from 0 to 1"),
        (LossSettings, {"kl_coef": float("nan")}, "loss.kl_coef"),
        (LossSettings, {"normalize_std": 1}, "true or false"),
        (OptimSettings, {"lr": 0}, "train.lr must be a number above 0"),
        (OptimSettings, {"epochs": 1.5}, "train.epochs must be an integer of at least 1"),
        (OptimSettings, {"num_minibatches": True}, "train.num_minibatches"),
        (OptimSettings, {"betas": [0.9]}, "two numbers"),
        (
            OptimSettings,
            {"schedule": "step"},
            "'constant', 'linear', 'cosine', 'wsd' or file.py:NAME of a function, not 'step'",
        ),
        (OptimSettings, {"lr_floor": 0.1}, "train.lr_floor has no effect on a constant learning rate"),
        (OptimSettings, {"lr_floor": 1.0, "schedule": "wsd"}, "train.lr_floor must be a number of at least 0 and below 1"),
        (OptimSettings, {"decay_steps": 5, "schedule": "linear"}, "train.decay_steps has no effect without train.schedule"),
        (OptimSettings, {"schedule": "linear", "total_steps": 5, "warmup_steps": 5}, "must be greater than train.warmup_steps"),
    ],
)
def test_a_bad_value_gets_one_sentence(kind, options, sentence):
    with pytest.raises(ConfigError) as caught:
        kind(**options)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_schedules_by_hand():
    linear = OptimSettings(warmup_steps=2, schedule="linear", total_steps=6)
    assert [linear.lr_factor(step) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    cosine = OptimSettings(schedule="cosine", total_steps=4)
    assert [cosine.lr_factor(step) for step in (0, 2, 4, 9)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert OptimSettings(warmup_steps=4).lr_factor(100) == 1.0
    stable = OptimSettings(warmup_steps=2, schedule="wsd", total_steps=10, decay_steps=4)
    assert [stable.lr_factor(step) for step in (0, 1, 2, 6, 7, 8, 9, 10, 11)] == [0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert [OptimSettings(schedule="wsd", total_steps=40).lr_factor(step) for step in (36, 38, 40)] == [1.0, 0.5, 0.0]
    for name in ("linear", "cosine", "wsd"):
        floored = OptimSettings(schedule=name, total_steps=10, lr_floor=0.2)
        assert [floored.lr_factor(step) for step in (0, 10, 99)] == pytest.approx([1.0, 0.2, 0.2])
    assert OptimSettings(schedule="linear", total_steps=10, lr_floor=0.2).lr_factor(5) == pytest.approx(0.6)


def test_a_schedule_without_an_end_says_what_to_set():
    with pytest.raises(ConfigError, match=r"set train\.total_steps"):
        OptimSettings(schedule="cosine").lr_factor(0)


def test_kl_kind_follows_where_the_kl_goes():
    assert LossSettings().kl_estimator == "k3"
    assert LossSettings(kl_in="reward").kl_estimator == "k1"
    assert LossSettings(kl_in="reward", kl_kind="k2").kl_estimator == "k2"


def test_names_aliases_and_near_misses():
    assert find_algorithm("reinforce_plus_plus") is ALGORITHMS["reinforce++"]
    assert find_algorithm("GRPO") is ALGORITHMS["grpo"]
    assert find_algorithm(ALGORITHMS["ppo"]) is ALGORITHMS["ppo"]
    for name, row in ALGORITHMS.items():
        assert find_algorithm(name) is row
    with pytest.raises(UnknownName, match="did you mean 'grpo'"):
        find_algorithm("grp")
    with pytest.raises(ConfigError, match="is function, not"):
        find_algorithm("agentfly.learn.algorithms.advantages:grpo")


def test_a_setting_that_the_algorithm_would_ignore_is_refused():
    with pytest.raises(ConfigError, match=r"grpo does not use loss\.lam"):
        ALGORITHMS["grpo"].settings({"lam": 0.9})
    with pytest.raises(ConfigError, match="did you mean 'clip_high'"):
        ALGORITHMS["grpo"].settings({"clip_hi": 0.3})
    with pytest.raises(ConfigError, match=r"only used by loss\.aggregation"):
        ALGORITHMS["grpo"].settings({"sequence_divisor": 100})
    with pytest.raises(ConfigError, match=r"only used by loss\.critic"):
        ALGORITHMS["ppo"].settings({"value_coef": 0.1})
    with pytest.raises(ConfigError, match=r"rloo compares whole chains, .* set loss\.turn_credit"):
        ALGORITHMS["rloo"].check(LossSettings(gamma=0.9, kl_in="reward"))


def test_defaults_of_a_row_hold_until_the_user_says_otherwise():
    assert ALGORITHMS["dr_grpo"].settings().aggregation == "sequence_sum"
    assert not ALGORITHMS["dr_grpo"].settings().normalize_std
    assert ALGORITHMS["ppo"].settings().kl_in == "reward"
    assert ALGORITHMS["ppo"].settings({"kl_in": "loss"}).kl_in == "loss"
    for row in ALGORITHMS.values():
        row.check(row.settings())


def test_a_group_of_one_is_refused_where_chains_are_compared():
    with pytest.raises(ConfigError, match=r"set num_chains above 1 \(it is 1\) or use ppo"):
        ALGORITHMS["grpo"].check_num_chains(1)
    ALGORITHMS["ppo"].check_num_chains(1)
    ALGORITHMS["rloo"].check_num_chains(2)


def test_listing_the_algorithms_loads_no_torch():
    code = (
        "import sys, agentfly.learn.algorithms, agentfly.learn.samples, agentfly.learn.metrics; print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.parametrize(
    ("given", "num_weights", "adapters", "lr"),
    [
        ({}, 135_000_000, False, 1e-5),
        ({}, 7_600_000_000, False, 1e-6),
        ({}, 7_600_000_000, True, 1e-4),
        ({}, 135_000_000, True, 1e-4),
        ({"lr": 3e-4}, 7_600_000_000, False, 3e-4),
    ],
)
def test_the_learning_rate_follows_the_size_of_the_model_and_its_adapters(given, num_weights, adapters, lr):
    assert OptimSettings(**given).lr_of(num_weights, adapters) == lr


def test_the_critics_learning_rate_is_at_least_one_in_a_hundred_thousand():
    assert OptimSettings().critic_lr_of(1e-6) == 1e-5
    assert OptimSettings().critic_lr_of(1e-4) == pytest.approx(2.5e-4)
    assert OptimSettings(critic_lr=2e-6).critic_lr_of(1e-6) == 2e-6


def root(step: int, total: int | None) -> float:
    return (1 + step) ** -0.5


def test_a_schedule_of_a_user_is_asked_after_the_warm_up(tmp_path: Path) -> None:
    (tmp_path / "rate.py").write_text("def root(step, total):\n    return (1 + step) ** -0.5\n")
    for given in (root, f"{tmp_path / 'rate.py'}:root"):
        optim = OptimSettings(schedule=given, warmup_steps=2)
        assert [optim.lr_factor(step) for step in range(4)] == [0.5, 1.0, 3**-0.5, 0.5]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("sqrt", "train.schedule must be 'constant', 'linear', 'cosine', 'wsd' or file.py:NAME of a function, not 'sqrt'"),
        (lambda step, total: -1.0, "must give a number of at least 0 for step 0, not -1.0"),
        (lambda step, total: float("nan"), "must give a number of at least 0"),
        (lambda step, total: "fast", "must give a number of at least 0"),
        (lambda step: 1.0, "raised TypeError"),
        ("nothing.py:root", "no such Python file"),
    ],
)
def test_a_schedule_that_gives_no_rate_is_refused(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        OptimSettings(schedule=given).lr_factor(0)


def test_a_floor_is_that_of_a_named_schedule() -> None:
    with pytest.raises(ConfigError, match="train.lr_floor has no effect"):
        OptimSettings(schedule=root, lr_floor=0.1)
