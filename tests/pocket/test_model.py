"""The model that ships: small, loadable like any other, and warm enough to speak the format."""

from __future__ import annotations

import json

from agentfly.pocket import model_dir
from agentfly.pocket.build import SHAPE


def test_it_takes_at_most_16_megabytes_on_disk():
    files = list(model_dir().iterdir())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        file.name for file in files
    }
    assert sum(file.stat().st_size for file in files) <= 16 * 2**20


def test_it_loads_through_from_pretrained_and_is_what_the_script_builds(tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_dir())
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert {name: getattr(model.config, name) for name in SHAPE} == SHAPE


def test_it_uses_a_tool_to_answer_the_first_example(tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    from agentfly.pocket.build_evaluate import held_out, play

    torch.set_num_threads(1)
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
