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
from agentfly.planning import CARDS, PUBLISHED, Layout, find_plans, find_shape, fitted, make_plan, memory_of, show_plan, step_of
from agentfly.planning.shapes import SHAPES, shape_of
from agentfly.planning.throughput import StepWork, held_back_errors, read_fit

ROOT = Path(__file__).parents[2]
RECIPE = ["agent.model=pocket", "agent.max_turns=4", "sampling.max_tokens=128", "rollout.num_tasks=32", "rollout.num_chains=8"]


def plan_of(gpus: int | None, size: str, *overrides: str, **options: Any) -> Any:
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


@pytest.mark.parametrize("kind", ["gemma4_text", "qwen3_5_moe_text", "gpt2", "mamba2"])
def test_the_shape_of_another_family_has_the_weights_that_its_model_holds(kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    found = shape_of(config, kind)
    assert found.weights == sum(weight.numel() for weight in model.parameters())
    assert memory_of(found, cache_tokens=1000).total > 0


def test_experts_count_as_memory_whole_and_as_work_in_part() -> None:
    from transformers import AutoConfig

    sizes = {"vocab_size": 1000, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 16, "num_experts_per_tok": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 3}
    found = shape_of(AutoConfig.for_model("qwen3_moe", **sizes, **heads), "tiny")
    experts, rest = 3 * 16 * 3 * 64 * 32, 2 * 1000 * 64 + 3 * (64 * 16 * (2 * 4 + 2 * 2) + 16 * 64)
    assert found.weights == pytest.approx(experts + rest, rel=0.005)
    assert found.computed == pytest.approx(experts / 4 + rest - 64_000, rel=0.01)
    assert found.kv_bytes == 2 * 3 * 2 * 16 * 2
    assert found.adapters(8) == 8 * 3 * (64 + 64 + 2 * (64 + 32) + 64 + 64 + 16 * ((64 + 2 * 32) + (32 + 64)))


def test_ranks_divide_what_is_sharded_and_nothing_else() -> None:
    shape = find_shape("7B")
    one, eight = memory_of(shape, shares=False), memory_of(shape, ranks=8)
    for name in ("masters", "moments"):
        assert getattr(eight, name) == pytest.approx(getattr(one, name) / 8)
    tables = 4 * shape.tables / 2**30  # whole until they are reduced
    assert eight.gradients == pytest.approx(one.gradients / 8 + tables)
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
    assert "none fits" in show_plan(large)
    assert "lora.rank = 32" in show_plan(large)
    assert plan_of(8, "32B", "lora.rank=32", "train.gradient_checkpointing=true").fits
    again = plan_of(8, "70B", "train.gradient_checkpointing=true", "learner.ranks=8", "sampler.replicas=8")
    assert "does not fit" in show_plan(again)
    assert "train.gradient_checkpointing = true" not in show_plan(again)  # it is on already


def test_a_plan_leaves_a_margin_and_says_when_it_does_not() -> None:
    plan = plan_of(8, "7B", "learner.ranks=8", "sampler.replicas=8", "rollout.num_tasks=512", row_tokens=8192)
    assert plan.fits
    assert plan.memory.total <= 0.92 * plan.card.gib
    assert plan.memory.cache > 40  # it takes what is there, within the margin
    tight = plan_of(1, "7B", "train.gradient_checkpointing=true")
    assert 0.92 * tight.card.gib < tight.memory.total <= tight.card.gib
    assert not tight.fits
    assert "tight: " in show_plan(tight)
    assert "kv_gib" not in show_plan(tight)  # the engine leaves room for the optimizer, and lends its cache to the update
    assert tight.memory.asleep
    assert tight.memory.total > tight.memory.beside_sampler + tight.memory.cache
    assert "kv_gib" not in show_plan(plan_of(1, "0.5B"))


def test_a_plan_is_that_of_the_recipes_own_layout() -> None:
    shared = plan_of(8, "7B", "learner.ranks=8", "sampler.replicas=8")
    apart = plan_of(8, "7B", "learner.ranks=4", "sampler.replicas=4", "sampler.place=own")
    assert apart.memory.masters == pytest.approx(2 * shared.memory.masters)
    assert apart.memory.sampler == apart.memory.cache == 0.0
    assert apart.samples is not None
    assert apart.samples.masters == 0.0
    assert apart.samples.sampler == pytest.approx(shared.memory.sampler)
    text = show_plan(apart)
    assert "as the recipe says" in text
    assert "a GPU that samples" in text
    assert 'sampler.place = "own"' in text
    with pytest.raises(ConfigError, match=r"takes 8 GPUs, not 16"):
        plan_of(16, "7B", "learner.ranks=4", "sampler.replicas=4", "sampler.place=own")
    assert plan_of(None, "7B", "learner.ranks=4", "sampler.replicas=4", "sampler.place=own").gpus == 8


def test_replicas_that_share_a_gpu_each_hold_a_copy() -> None:
    one, two = (plan_of(2, "3B", "learner.ranks=2", f"sampler.replicas={count}") for count in (2, 4))
    assert two.memory.sampler == pytest.approx(2 * one.memory.sampler)


def test_verls_keys_change_the_plan() -> None:
    words = ["backend=verl", "learner.ranks=8", "verl.tensor_parallel=4", "train.gradient_checkpointing=true"]
    asleep, offloaded = plan_of(8, "32B", *words), plan_of(8, "32B", *words, "verl.offload=true")
    assert asleep.layout.sampler_gpus == offloaded.layout.sampler_gpus == 4
    assert asleep.memory.beside_sampler > 0
    assert offloaded.memory.beside_sampler == 0
    assert offloaded.memory.cache >= asleep.memory.cache
    assert "largest at once" in show_plan(asleep)
    with pytest.raises(ConfigError, match=r"does not divide"):
        plan_of(8, "7B", "backend=verl", "learner.ranks=8", "verl.tensor_parallel=3")


def test_the_search_finds_a_faster_layout_than_a_sampler_without_room() -> None:
    """14B on eight H100: beside a rank of the learner, a sampler has room for few chains."""
    words = ["rollout.num_tasks=64", "train.gradient_checkpointing=true"]
    options: dict[str, Any] = {"card": "H100", "row_tokens": 4096}
    shared = plan_of(8, "14B", *words, "learner.ranks=8", "sampler.replicas=8", **options)
    best, *others = find_plans(Config.load(None, [*RECIPE, *words]), 8, "14B", **options)
    assert best.fits
    assert best.step.total < 0.5 * shared.step.total
    assert any(plan.layout.own for plan in others)
    assert sum(plan.layout == best.layout for plan in [best, *others]) == 1
    fitting = [plan.step.total for plan in others if plan.fits and plan.layout.verl]
    assert fitting == sorted(fitting)


def test_published_runs_lie_in_the_printed_range() -> None:
    table = runpy.run_path(str(ROOT / "docs" / "generate.py"))["published_table"]()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    assert len(rows) == len(PUBLISHED)
    for _run, _gpus, published, planned, _factor in rows:
        low, high = (float(word) for word in planned.removesuffix(" s").split(" to "))
        assert low <= float(published.removesuffix(" s")) <= high


def test_a_single_sampler_in_its_own_process_holds_a_copy() -> None:
    one, two = plan_of(1, "7B"), plan_of(1, "7B", "sampler.place=process")
    assert one.memory.sampler == 0.0
    assert two.memory.sampler == pytest.approx(14.18, abs=0.1)
    assert two.memory.runtime == 2 * one.memory.runtime
    assert not two.measured


def test_over_machines_each_rank_and_each_sampler_has_its_own_gpu() -> None:
    """Ray reserves a GPU for each of them, whatever `sampler.place` says."""
    named = make_plan(Config.load("quickstart", ["cluster.address=auto", "learner.ranks=8", "sampler.replicas=8"]), None, "7B")
    assert (named.gpus, named.samples is not None) == (16, True)
    found = find_plans(Config.load("quickstart", []), 16, "7B", card="H100")
    assert all(plan.layout.own or plan.layout.verl for plan in found)
    assert 'cluster.address = "auto"' in show_plan(found[0])


def test_a_model_that_no_gpu_holds_at_the_start_needs_verl_and_gets_no_keys() -> None:
    text = show_plan(plan_of(1, "70B", card="L4"))
    assert 'does not fit: each GPU holds the model at the start, 131 GiB: take larger GPUs, or backend = "verl"' in text
    assert "keys\n  none: it does not fit" in text


def test_a_plan_needs_no_tokenizer(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("llama").save_pretrained(tmp_path)
    assert make_plan(Config.load("quickstart", [f"agent.model={tmp_path}"])).shape.weights > 6e9


def test_no_gpus_are_refused() -> None:
    with pytest.raises(ConfigError, match="--gpus and --gpus-per-node must be 1 or more, not 0 and 8"):
        plan_of(0, "7B")


def test_long_rows_pay_for_attention() -> None:
    shape, card = find_shape("7B"), CARDS["H100"]
    short, long = (fitted().learn_s(shape, card, row) for row in (0, 32768))
    weights = 6 * shape.computed
    attention = 6 * 32768 * shape.layers * shape.heads * shape.head_dim
    assert attention / weights == pytest.approx(0.45, abs=0.05)
    assert long - short == pytest.approx(fitted().compute * attention / card.matmul)


def test_a_sharded_learner_moves_its_weights_in_every_pass() -> None:
    shape, card = find_shape("7B"), CARDS["A100"]
    layout = Layout(learners=16, samplers=16)
    few, many = (step_of(shape, card, layout, work(batch_tokens=tokens)).learn for tokens in (1 << 20, 1024))
    passes = -(-512 * 1000 // 16 // 1024)
    assert many == pytest.approx(passes * 8 * shape.weights / card.network)
    assert many > few
    halved = step_of(shape, card, layout, work(batch_tokens=1024), reduce_bytes=2).learn
    assert halved == pytest.approx(many * 6 / 8)


def test_a_sampler_that_one_gpu_cannot_hold_is_spread_by_verl() -> None:
    plan = plan_of(64, "70B", "train.gradient_checkpointing=true")
    assert plan.layout.verl
    assert plan.layout.sampler_gpus > 1
    assert plan.fits
    text = show_plan(plan)
    assert f"verl.tensor_parallel = {plan.layout.sampler_gpus}" in text
    assert "verl.nodes = 8" in text
    assert "learner.ranks = 8" in show_plan(plan_of(8, "7B"))


def work(**changes: Any) -> StepWork:
    base = StepWork(chains=512, turns=8, reply=100, row=1000, latency_s=0.1, turn_cpu_s=0.001, cores=16)
    return dataclasses.replace(base, **changes)


def test_the_bottleneck_is_the_part_that_takes_longest() -> None:
    shape, card = find_shape("3B"), CARDS["H200"]
    eight = Layout(learners=8, samplers=8)
    assert step_of(shape, card, eight, work(turn_cpu_s=1.0)).bottleneck == "environments"
    assert step_of(shape, card, eight, work(row=20_000)).bottleneck == "learning"
    assert step_of(shape, card, eight, work(latency_s=5.0)).bottleneck == "sampling"
    in_turn, overlapped = step_of(shape, card, eight, work()), step_of(shape, card, eight, work(asynchronous=True))
    assert in_turn.total == pytest.approx(2 * in_turn.sample + in_turn.learn + in_turn.publish)
    assert overlapped.total == pytest.approx(max(overlapped.sample, overlapped.learn + overlapped.publish))


def test_more_of_anything_never_makes_it_faster_than_it_should() -> None:
    shape, card = find_shape("7B"), CARDS["H200"]
    eight = Layout(learners=8, samplers=8)
    base = step_of(shape, card, eight, work())
    assert step_of(shape, card, Layout(learners=16, samplers=16), work(), per_node=16).total < base.total
    assert step_of(shape, card, eight, work(chains=1024)).total < 2 * base.total  # a fuller sampler
    assert step_of(shape, card, eight, work(at_once=64)).sample > base.sample
    assert step_of(find_shape("32B"), card, eight, work()).total > base.total
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
    assert "the defaults are right" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "-1"], "--gpus and --gpus-per-node must be 1 or more"),
        (["--gpus-per-node", "0"], "--gpus and --gpus-per-node must be 1 or more"),
        (["--model-size", "7 B"], "no model size is called '7 B'; did you mean '7B'?"),
        (["--gpu", "B20"], "no GPU is called 'B20'; known: H200"),
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
