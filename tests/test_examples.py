"""Every example runs, at miniature size, and does what it says. One file = one run, short enough to read at once."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly import Outcome

FOLDER = Path(__file__).parent.parent / "examples"
FILES = sorted(FOLDER.glob("*.py"))
LIMITS = {"rl_loop.py": 150}


@pytest.fixture(autouse=True)
def small_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are written to the current folder."""
    monkeypatch.chdir(tmp_path)


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_is_short_and_is_tested_here(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LIMITS.get(path.name, 59)
    assert f'load("{path.stem}")' in Path(__file__).read_text(encoding="utf-8")


def test_multiply_calls_its_tool_and_is_scored() -> None:
    result = load("multiply").main(num_chains=4)
    assert len(result) == 4
    assert all(trajectory.scored for trajectory in result)
    assert any(trajectory.tool_counts["multiply"] for trajectory in result)


def test_train_arithmetic_leaves_a_model_folder() -> None:
    result = load("train_arithmetic").main(steps=1, num_tasks=2, num_chains=2, validation_count=4)
    assert result.steps == 1
    assert (result.checkpoint / "model.safetensors").is_file()
    assert 0.0 <= result.after["validation/success"] <= 1.0


def test_the_guessing_game_is_won_by_halving() -> None:
    result = load("guess_game").main(num_games=3)
    assert result.outcomes == {Outcome.FINISHED.value: 3}
    assert [trajectory.components["guesses"] for trajectory in result] == [6, 6, 2]
    assert result.rewards == pytest.approx([0.7, 0.7, 0.9])


def test_an_agent_of_ones_own_is_warm_started_and_trained() -> None:
    result = load("own_agent").main(warm_steps=1, steps=1, num_rows=12, num_tasks=2, num_chains=2)
    assert result.steps == 1
    assert result.history[0]["rollout/chains"] == 4


def test_own_agents_demonstrations_are_in_its_own_format() -> None:
    from agentfly.types import Completion

    example = load("own_agent")
    agent = example.CalcAgent("pocket", tools=["calculator"])
    task = {"question": "What is 2 times 3, plus 4?", "answer": "10", "expression": "2 * 3 + 4"}
    call, answer = (m["content"] for m in example.demonstration(task)["messages"] if m["role"] == "assistant")
    assert agent.parse(Completion(text=call)).calls[0].arguments == {"expression": "2 * 3 + 4"}
    assert agent.parse(Completion(text=answer)).answer == "10"
    assert agent.parse(Completion(text="hello")).answer is None


def test_the_bare_loop_reads_replies_and_takes_a_step() -> None:
    example = load("rl_loop")
    assert example.act('Thought: x\nAction: add\nInput: {"a": 2, "b": 3}') == ("5", None)
    assert example.act(f"Thought: x\nAction: add\nInput: {json.dumps({'c': 2})}")[0].startswith("Error: TypeError")
    assert example.act("Thought: x\nAnswer: 5") == (None, "5")
    history = example.main(steps=1, num_tasks=2, num_chains=2)
    assert len(history) == 1
    assert 0.0 <= history[0] <= 1.0


def test_the_bare_loop_trains_exactly_what_was_sampled() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    example = load("rl_loop")
    tokenizer = AutoTokenizer.from_pretrained(example.model_dir())
    model = AutoModelForCausalLM.from_pretrained(example.model_dir(), dtype=torch.float32)
    torch.manual_seed(0)
    prompt = example.encode(tokenizer, example.START.format(system=example.SYSTEM, question="What is 2 times 3, plus 4?"))
    chain = example.Chain("10", list(prompt))
    example.rollout(model, tokenizer, [chain])
    assert chain.ids[: len(prompt)] == prompt
    trained = tokenizer.decode([token for token, mask in zip(chain.ids, chain.mask, strict=True) if mask])
    assert "Thought:" in trained
    assert "Observation:" not in trained
    assert "<|im_start|>" not in trained
