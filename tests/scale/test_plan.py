"""`agentfly plan`: memory and time are those that were measured where there are measurements, and bad input is a sentence."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from agentfly import ConfigError
from agentfly.cli import main
from agentfly.config import Config
from agentfly.planning import CARDS, find_shape, fitted, make_plan, memory_of, show_plan, step_of
from agentfly.planning.shapes import SHAPES, shape_of
from agentfly.planning.throughput import Work, held_back_errors, read_fit

ROOT = Path(__file__).parents[2]
RECIPE = ["agent.model=pocket", "agent.max_turns=4", "sampling.max_tokens=128", "rollout.num_tasks=32", "rollout.num_chains=8"]


def plan_of(gpus: int, size: str, *overrides: str, **options: Any) -> Any:
    return make_plan(Config.load(None, [*RECIPE, *overrides]), gpus, size, **options)


def test_the_fit_is_what_the_measurements_give() -> None:
    program = runpy.run_path(str(ROOT / "benchmarks" / "plan.py"))
    made = program["made"]()
    for ours, again in zip(read_fit()["points"], made["points"], strict=True):
        assert ours["name"] == again["name"]
        assert ours["predicted"] == pytest.approx(again["predicted"], rel=1e-3)
    assert read_fit()["parameters"] == pytest.approx(made["parameters"], rel=1e-3)


def test_points_that_were_held_back_are_predicted() -> None:
    worst = held_back_errors()
    assert set(worst) == {"memory", "decode", "agent", "learn"}
    assert max(worst.values()) < 0.15
    assert all(any(not point["held_back"] for point in read_fit()["points"] if point["part"] == part) for part in worst)


def test_memory_is_that_of_the_measured_updates() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu_learner.json").read_text())["learner"]
    measured = {row["way"]: row["peak_gib"] for row in rows if row["shape"] == "3B"}
    shape = find_shape("3B")
    for way, options in (
        ("packed", {}), ("packed, layers again", {"again": True}), ("packed, LoRA 32", {"lora_rank": 32}),
    ):  # fmt: skip
        found = memory_of(shape, batch_tokens=12288, **options)
        assert found.total - found.runtime == pytest.approx(measured[way], rel=0.1), way


@pytest.mark.parametrize(
    ("size", "billions"), [("135M", 0.1345), ("0.5B", 0.494), ("3B", 3.086), ("7B", 7.616), ("32B", 32.76), ("70B", 70.55)]
)
def test_shapes_have_the_published_number_of_weights(size: str, billions: float) -> None:
    assert find_shape(size).weights / 1e9 == pytest.approx(billions, rel=0.005)


def test_the_shape_of_a_model_is_read_from_its_config() -> None:
    from transformers import AutoConfig

    from agentfly.pocket import model_dir

    config = AutoConfig.from_pretrained(model_dir())
    found = shape_of(config, "pocket")
    assert found.layers == config.num_hidden_layers
    assert found.weights == 1_574_208


def test_ranks_divide_what_is_sharded_and_nothing_else() -> None:
    shape = find_shape("7B")
    one, eight = memory_of(shape, shares=False), memory_of(shape, ranks=8)
    for name in ("masters", "moments", "gradients"):
        assert getattr(eight, name) == pytest.approx(getattr(one, name) / 8)
    assert eight.activations == one.activations
    assert eight.sampler == one.sampler == pytest.approx(14.18, abs=0.1)
    assert memory_of(shape).sampler == 0.0  # one process: the sampler uses the learner's weights


def test_adapters_take_little_and_need_no_reference() -> None:
    shape = find_shape("7B")
    full, lora = memory_of(shape, reference=True), memory_of(shape, lora_rank=32, reference=True)
    assert lora.masters + lora.moments + lora.gradients < 0.02 * (full.masters + full.moments + full.gradients)
    assert full.reference == pytest.approx(14.18, abs=0.1)
    assert lora.reference == 0.0
    assert memory_of(shape, critic=True).critic > 100


def test_what_does_not_fit_says_so_and_what_helps() -> None:
    large = plan_of(1, "32B")
    assert not large.fits
    assert "does not fit" in show_plan(large)
    assert "lora.rank = 32" in show_plan(large)
    adapted = plan_of(8, "32B", "lora.rank=32", "train.gradient_checkpointing=true")
    assert adapted.fits


def test_a_sampler_that_one_gpu_cannot_hold_is_spread_by_verl() -> None:
    plan = plan_of(64, "70B", "train.gradient_checkpointing=true")
    assert plan.sampler_gpus == 4
    assert plan.fits
    text = show_plan(plan)
    assert "verl.tensor_parallel = 4" in text
    assert "verl.nodes = 8" in text
    assert "learner.ranks = 8" in show_plan(plan_of(8, "7B"))


def work(**changes: Any) -> Work:
    base = Work(chains=512, turns=8, reply=100, row=1000, latency_s=0.1, turn_cpu_s=0.001, cores=16)
    return dataclasses.replace(base, **changes)


def test_the_bottleneck_is_the_part_that_takes_longest() -> None:
    shape, card = find_shape("3B"), CARDS["H200"]
    assert step_of(shape, card, 8, work(turn_cpu_s=1.0)).bottleneck == "environments"
    assert step_of(shape, card, 8, work(row=20_000)).bottleneck == "learning"
    assert step_of(shape, card, 8, work(latency_s=5.0)).bottleneck == "sampling"
    in_turn, overlapped = step_of(shape, card, 8, work()), step_of(shape, card, 8, work(asynchronous=True))
    assert in_turn.total == pytest.approx(2 * in_turn.sample + in_turn.learn + in_turn.publish)
    assert overlapped.total == pytest.approx(max(overlapped.sample, overlapped.learn + overlapped.publish))


def test_more_of_anything_never_makes_it_faster_than_it_should() -> None:
    shape, card = find_shape("7B"), CARDS["H200"]
    base = step_of(shape, card, 8, work())
    assert step_of(shape, card, 16, work()).total < base.total
    assert step_of(shape, card, 8, work(chains=1024)).total < 2 * base.total  # a fuller sampler
    assert step_of(shape, card, 8, work(at_once=64)).sample > base.sample
    assert step_of(find_shape("32B"), card, 8, work()).total > base.total
    assert fitted().decode_s(shape, card, 64, 500) < fitted().decode_s(shape, card, 64, 5000)


def test_the_command_prints_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", "--gpus", "8", "--model-size", "7B"]) == 0
    printed = capsys.readouterr().out
    for words in (
        "7.62 billion weights",
        "memory of one GPU",
        "sampler's copy",
        "bottleneck:",
        "held back: memory",
        "not measured",
    ):
        assert words in printed
    assert main(["plan", "quickstart"]) == 0
    assert "one GPU is the default" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "0"], "--gpus must be 1 or more"),
        (["--gpus", "12"], "a multiple of --gpus-per-node"),
        (["--model-size", "7 B"], "no model size is called '7 B'; did you mean '7B'?"),
        (["--gpu", "B200"], "no GPU is called 'B200'; known: H200"),
        (["--turns", "0"], "--turns must be at least 1"),
        (["--cores", "0"], "--cores 1 or more"),
        (["--tool-s", "-1"], "--tool-s and --turn-cpu-s must be 0 or more"),
        (["nonsense=1"], "unknown config key 'nonsense'"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "quickstart", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_a_chat_servers_model_needs_a_size() -> None:
    config = Config.load(None, ["agent.model=openai:x@http://h:1/v1"])
    with pytest.raises(ConfigError, match="give --model-size"):
        make_plan(config, 1)
    assert make_plan(config, 1, "3B").shape is SHAPES["3B"]
