"""The script that makes a model for the text worlds, end to end at a few steps; prompts and ids are the real agents' own."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import build_worlds as script
import pytest
import world_demos
from build import new_model
from tokens import encode_demo
from world_demos import WORLDS, as_demo, chunk, dialogues, prompt_of, worlds_named

import agentfly
from agentfly.build import build_agent
from agentfly.config import Config
from agentfly.data import load_tasks
from agentfly.envs.scienceworld import java
from agentfly.envs.search.generated.easy import easy_questions
from agentfly.errors import ConfigError
from agentfly.learn.samples import to_samples
from agentfly.pocket import model_dir
from agentfly.render import HFRenderer
from agentfly.training.demonstrations import to_trajectory
from agentfly.watch.progress import Progress
from tests.close import assert_close_to_norm

RECIPES = Path(__file__).parents[2] / "recipes"
PLAYED = ("alfworld", "webshop", "search")  # ScienceWorld's dialogues need Java and time: one is written out here
STEPS = (("one", ["--minutes", "0.02"]), ("two", ["--steps", "10"]))
SCIENCE = [
    {"role": "user", "content": "Find a plant. Focus on it. Then move it to the blue box in the bedroom."},
    {
        "role": "assistant",
        "content": 'Thought: go there\nAction: scienceworld_explorer\nInput: {"action": "teleport to greenhouse"}',
    },
    {"role": "user", "content": "Observation: You teleport to the greenhouse."},
    {"role": "assistant", "content": "Thought: that is it\nAnswer: done"},
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three worlds, small enough to build in seconds; the path through the code is the same."""

    folder = tmp_path_factory.mktemp("worlds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "SHAPE", {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2})
        arguments = f"--out {folder} --device cpu --layers 1 --steps 5 --batch 4 --workers 0 --dialogues 250 --evaluations 1"
        assert script.main([*arguments.split(), "--fresh", "--worlds", ",".join(PLAYED)]) == 0
    return folder


@pytest.fixture(scope="module")
def tokenizer(built: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(built)


def recipe_agent(name: str, *overrides: str) -> Any:
    return build_agent(Config.load(RECIPES / f"{name}.toml", list(overrides)))


def test_it_builds_a_model_that_loads_and_tells_how_it_did(built):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    figures = json.loads((built / "build.json").read_text(encoding="utf-8"))
    assert (figures["good"]["steps"], figures["mixed"]["steps"]) == (5, 1)
    assert figures["good"]["dialogues"] == dict.fromkeys(PLAYED, 250)
    assert set(figures["mixed"]["success"]) == set(PLAYED)
    assert figures["left_out"] == []
    tokenizer, model = AutoTokenizer.from_pretrained(built), AutoModelForCausalLM.from_pretrained(built)
    assert model.config.vocab_size == len(tokenizer) == figures["vocabulary"]
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_it_begins_with_what_the_bundled_model_knows(tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    bundled = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    raw, models = tokenizer.backend_tokenizer, []
    for layers in (bundled.config.num_hidden_layers, bundled.config.num_hidden_layers + 1):
        models.append(new_model(raw.get_vocab_size(), 2, 0, {**script.SHAPE, "num_hidden_layers": layers}).eval())
        script.begin_from_bundled(models[-1], raw)
    ids = raw.encode("The boss of Nami is Pava.", add_special_tokens=False).ids
    with torch.inference_mode():
        same, longer = (model(input_ids=torch.tensor([ids])).logits for model in models)
    assert_close_to_norm(longer, same)
    for token in ("<|im_end|>", "1", "."):
        mine, theirs = raw.token_to_id(token), bundled_id(token)
        assert torch.equal(models[0].get_input_embeddings().weight[mine], bundled.get_input_embeddings().weight[theirs])
    ours, known = models[1].model.layers[2], bundled.model.layers[2]
    assert torch.equal(ours.mlp.up_proj.weight, known.mlp.up_proj.weight)


def bundled_id(token: str) -> int:
    from transformers import AutoTokenizer

    return int(AutoTokenizer.from_pretrained(model_dir()).convert_tokens_to_ids(token))


def test_a_recipe_trains_it_without_a_warm_start(built, tmp_path):
    small = ["train.steps=1", "rollout.num_tasks=2", "rollout.num_chains=2", "data.train_count=8", "data.validation_count=2"]
    places = [f"agent.model={built}", f"run.dir={tmp_path}", "run.name=mini", "run.threads=1"]
    result = agentfly.train(Config.load(RECIPES / "search.toml", [*small, *places]), progress=Progress(1))
    assert result.steps == 1


@pytest.mark.parametrize("name", list(WORLDS))
def test_what_is_known_of_a_world_is_what_its_recipe_says(name):
    world, agent = WORLDS[name], recipe_agent(name)
    assert prompt_of(name) == agent.prompt
    assert list(agent.tools) == [world.tool]
    assert list(agent.tools[world.tool].schema["function"]["parameters"]["properties"]) == [world.argument]
    assert (agent.limits.max_turns, agent.sampling.max_tokens) == (world.max_turns, world.max_tokens)
    assert agent.sampling.temperature == script.agent_of(name).sampling.temperature == 1.0


@pytest.mark.parametrize("name", list(WORLDS))
def test_the_real_agent_meets_exactly_the_ids_that_were_trained_on(name, built, tokenizer):
    agent, renderer = recipe_agent(name, f"agent.model={built}"), HFRenderer(tokenizer)
    rows = [SCIENCE] if name == "scienceworld" else chunk(name, "mixed", 0, 0, 30)
    for number, messages in enumerate(rows):
        ids, mask = encode_demo(tokenizer.backend_tokenizer, as_demo(name, agent.prompt, messages))
        (sample,) = to_samples(to_trajectory({"messages": messages}, number, agent, renderer, agent.schemas))
        assert list(sample.token_ids) == ids
        assert [bool(bit) for bit in sample.mask] == [bool(bit) for bit in mask]


def test_dialogues_are_short_and_names_are_one_or_two_tokens_wherever_they_stand(tokenizer):
    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    names = sorted({name for question in easy_questions("test")[:200] for name in question.pages})
    assert names
    for name in names:
        alone = tokens(name)
        assert len(alone) <= 3
        for text in (f"What is the boss of {name}?", f'Input: {{"query": "{name}"}}', f"Thought: done\nAnswer: {name}"):
            told = tokens(text)
            assert any(told[at : at + len(alone)] == alone for at in range(len(told))), text
    assert sum(len(tokens(name)) for name in names) / len(names) < 2.2
    assert len(tokens("go to fridge 1")) <= 4
    for world in PLAYED:
        for messages in chunk(world, "mixed", 1, 0, 100):
            ids, _ = encode_demo(tokenizer.backend_tokenizer, as_demo(world, prompt_of(world), messages))
            assert len(ids) < 300


@pytest.mark.parametrize("name", PLAYED)
def test_nothing_that_is_held_out_was_demonstrated(name):
    shown = {messages[0]["content"] for phase in script.PHASES for messages in chunk(name, phase, 0, 0, 500)}
    tasks = {split: load_tasks(f"easy_{name}", split=split, count=400, seed=0) for split in ("train", "validation", "test")}
    asked = {split: {task.messages[0].content for task in each} for split, each in tasks.items()}
    assert shown & asked["train"]
    assert not shown & (asked["validation"] | asked["test"])
    assert not asked["train"] & (asked["validation"] | asked["test"])


def test_workers_make_the_same_dialogues_as_this_process():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        apart = dialogues(("search", "webshop"), "mixed", 3, 40, pool)
    assert apart == dialogues(("search", "webshop"), "mixed", 3, 40)
    assert apart != dialogues(("search", "webshop"), "good", 3, 40)


def test_every_chunk_is_another_one(monkeypatch):
    monkeypatch.setattr(world_demos, "CHUNK", 20)
    rows = dialogues(("search",), "good", 0, 50)["search"]
    assert len(rows) == 50
    assert rows[:20] != rows[20:40]


def test_the_same_seed_draws_the_same_batches():
    rows = {"search": [([1, 2, 3], [0, 1, 1]), ([4, 5], [0, 1])], "webshop": [([6], [1])]}
    one, two = (list(script.draws(rows, 9, 0, "good", 3, 4)) for _ in range(2))
    assert all((a == b).all() for first, second in zip(one, two, strict=True) for a, b in zip(first, second, strict=True))
    ids, marks = one[0]
    assert ((ids == 9) == (marks == -1)).all()


def test_a_world_that_cannot_be_played_here_is_left_out_with_a_word(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java, "packaged_java", lambda: None)
    assert list(dialogues(("scienceworld", "search"), "good", 0, 3)) == ["search"]
    assert capsys.readouterr().out.startswith("scienceworld is left out: ")
    with pytest.raises(ConfigError, match="nothing to learn from"):
        dialogues(("scienceworld",), "good", 0, 3)


def test_the_whole_model_keeps_within_its_size():
    model = new_model(script.VOCABULARY, 2, 0, {**script.SHAPE, "num_hidden_layers": script.LAYERS})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters <= 2_200_000
    assert 4 * parameters < 8.5e6  # float32, and the tokenizer beside it


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--worlds", "search,mars"], "--worlds is a list of alfworld, webshop, scienceworld, search, not 'search,mars'"),
        (["--minutes", "0"], "--minutes must be more than 0, not 0"),
        (["--layers", "0"], "--layers must be at least 1, not 0"),
        (["--evaluations", "900"], "--evaluations must be from 0 to 400, not 900"),
        (["--device", "abacus"], "--device is auto, cpu or cuda, not 'abacus'"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_sentence(arguments, sentence, tmp_path, capsys):
    assert script.main(["--out", str(tmp_path / "out"), *arguments]) == 2
    assert capsys.readouterr().err.strip() == sentence
    assert not (tmp_path / "out").exists()


def test_the_bundled_model_is_never_written_over(capsys):
    assert script.main(["--out", str(model_dir())]) == 2
    assert "the folder of the model 'pocket'" in capsys.readouterr().err


def test_the_first_phase_is_kept_and_the_second_can_begin_with_it_again(tmp_path, monkeypatch):
    monkeypatch.setattr(script, "SHAPE", {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2})
    common = f"--good {tmp_path / 'good'} --device cpu --layers 1 --batch 4 --workers 0 --dialogues 40 --evaluations 1 --fresh"
    runs = [["--out", str(tmp_path / out), "--worlds", "search", *common.split(), *steps] for out, steps in STEPS]
    assert [script.main(arguments) for arguments in runs] == [0, 0]
    kept, first, again = (json.loads((tmp_path / name / "build.json").read_text()) for name in ("good", "one", "two"))
    assert "mixed" not in kept
    assert "search" in kept["good"]["success"]
    assert kept["good"] == first["good"] == again["good"]
    assert 1 <= first["good"]["steps"] < script.AT_MOST
    assert again["mixed"]["steps"] == 2
    names = ("tokenizer.json", script.WEIGHTS)
    kept_files, made_files = ([(tmp_path / folder / name).read_bytes() for name in names] for folder in ("good", "two"))
    assert kept_files[0] == made_files[0]
    assert kept_files[1] != made_files[1]
    assert script.main(["--out", str(tmp_path / "good"), *common.split()]) == 2


def test_a_world_whose_evaluation_fails_has_no_figure_and_costs_nothing_else(built, monkeypatch, caplog):
    def success(folder: Path, name: str, count: int, device: str) -> float:
        if name == "webshop":
            raise OSError("the shop has burnt down")
        return 0.5

    monkeypatch.setattr(script, "success", success)
    assert script.evaluate(built, PLAYED, 1, "cpu", "after:") == {"alfworld": 0.5, "search": 0.5}
    assert "the shop has burnt down" in caplog.text


def test_worlds_are_named_once_each():
    assert worlds_named(" search, alfworld,search") == ("search", "alfworld")
