"""The models that ship: small, loadable like any other, and warm enough to speak the format."""

from __future__ import annotations

import json

import build_worlds
import pytest
from build import SHAPE
from world_demos import WORLDS

from agentfly.engines.local.load import BUNDLED
from agentfly.pocket import model_dir, worlds_dir

FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "build.json"}


def test_the_two_take_less_than_16_megabytes_on_disk_together():
    folders = [model_dir(), worlds_dir()]
    assert folders == list(BUNDLED.values())
    files = [file for folder in folders for file in folder.iterdir()]
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in files), "every user can read the installed files"
    assert all({file.name for file in folder.iterdir()} >= FILES for folder in folders)
    assert sum(file.stat().st_size for file in files) < 16_000_000


def test_it_loads_through_from_pretrained_and_is_what_the_script_builds(tokenizer):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir())
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert {name: getattr(model.config, name) for name in SHAPE} == SHAPE


def test_it_uses_a_tool_to_answer_the_first_example(tokenizer):
    import torch
    from build_evaluate import held_out, play
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32).eval()
    chains = [case.chain(tokenizer) for case in held_out("readme", 16)]
    play(model, tokenizer, chains)
    # Built to succeed most of the time; fewer than half of 16 would be one chance in many thousands.
    assert sum(chain.right for chain in chains) >= 8
    assert all(len(chain.ids) == len(chain.mask) == len(chain.logprobs) for chain in chains)


def test_its_own_figures_leave_reinforcement_learning_something_to_do():
    success = json.loads((model_dir() / "build.json").read_text(encoding="utf-8"))["mixed"]["success"]
    assert 0.25 <= success["two_step"] <= 0.5
    assert 0.25 <= success["code"] <= 0.5
    assert success["one_step"] >= 0.6


def test_the_model_of_the_text_worlds_is_what_its_script_builds():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(worlds_dir()), AutoTokenizer.from_pretrained(worlds_dir())
    shape = {**build_worlds.SHAPE, "num_hidden_layers": build_worlds.LAYERS, "vocab_size": build_worlds.VOCABULARY}
    assert {name: getattr(model.config, name) for name in shape} == shape
    assert len(tokenizer) == model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("name", list(WORLDS))
def test_in_each_text_world_it_leaves_reinforcement_learning_something_to_do(name):
    figures = json.loads((worlds_dir() / "build.json").read_text(encoding="utf-8"))
    assert 0.2 <= figures["mixed"]["success"][name] <= 0.5
    assert figures["good"]["success"][name] >= figures["mixed"]["success"][name] + 0.25


@pytest.mark.parametrize("name", ["alfworld", "webshop", "search"])
def test_in_the_text_worlds_it_solves_some_tasks_that_it_has_not_seen_and_not_all(name):

    solved = build_worlds.success(worlds_dir(), name, 40, "cpu")
    assert 0.05 <= solved <= 0.75  # built to solve a quarter to two fifths: beyond these bounds is one chance in thousands
