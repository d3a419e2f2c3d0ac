"""The script that makes the model, end to end at a few steps."""

from __future__ import annotations

import json
from typing import Any

import build as script
import pytest


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and a corpus small enough to build in seconds; the path through the code is the same."""

    monkeypatch.setattr(
        script, "SHAPE", {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32, "num_attention_heads": 2}
    )
    monkeypatch.setattr(script, "CORPUS", 150)


@pytest.mark.usefixtures("small")
def test_it_builds_a_model_that_loads(tmp_path, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    arguments = [
        "--device",
        "cpu",
        "--steps",
        "5",
        "--batch",
        "4",
        "--workers",
        "0",
        "--evaluations",
        "4",
        "--out",
        str(tmp_path),
    ]
    assert script.main(arguments) == 0
    figures: dict[str, Any] = json.loads((tmp_path / "build.json").read_text(encoding="utf-8"))
    assert figures["good"]["steps"] == 5
    assert figures["mixed"]["steps"] == 1
    assert set(figures["mixed"]["success"]) == {"one_step", "readme", "two_step", "two_step_native", "lookup", "code"}
    assert "after mixed:" in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(tokenizer) == figures["vocabulary"]
    assert tokenizer.chat_template


@pytest.mark.usefixtures("small")
def test_the_same_seed_builds_the_same_weights(tmp_path):
    from safetensors.torch import load_file

    weights = []
    for name in ("one", "two"):
        script.build(tmp_path / name, device="cpu", steps=3, batch=4, workers=0, evaluations=0)
        weights.append(load_file(tmp_path / name / "model.safetensors"))
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_an_unknown_device_is_refused_in_one_sentence(tmp_path, capsys):
    assert script.main(["--device", "abacus", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.strip() == "--device is auto, cpu or cuda, not 'abacus'"


def test_the_evaluation_runs_the_code_of_a_chain_and_reads_its_answer():
    from build_evaluate import Chain, held_out, read

    from agentfly.envs.code.solver import solve
    from agentfly.envs.code.tasks import easy_code_tasks

    cases, rows = held_out("code", 3), easy_code_tasks("test", 3)
    for case, row in zip(cases, rows, strict=True):
        chain = Chain([1], case.answer, case.observe, case.form)
        seen = read(chain, f"```python\n{solve(row)[0]}\n```")
        assert seen == row["answer"]
        assert not chain.right
        assert read(chain, f"Answer: {seen}") is None
        assert chain.right
    assert "SyntaxError" in str(read(chain, "```python\nprint((1)\n```"))
    assert read(chain, "neither") is None
    assert not chain.right
