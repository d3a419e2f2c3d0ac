"""A reference that reads a hint: its own prompt, then the very ids that were sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import agentfly
from agentfly.config import Config
from agentfly.engines.local.load import load_model
from agentfly.errors import ConfigError, DataError
from agentfly.health import replay
from agentfly.learn.hint import with_prompt
from agentfly.learn.samples import to_samples
from agentfly.runs import RunReader
from tests.learn.chains import chain
from tests.tiny import ROWS, save_tiny_model, tiny_agent

SMALL: dict[str, Any] = {
    "num_tasks": 4, "num_chains": 4, "threads": 1, "lr": 1e-2, "steps": 2, "validation_count": 2, "validate_at_start": False,
    "validate_every": 0,
}  # fmt: skip
HINT = "The answer is {answer}."


def drawn(sample: Any) -> tuple[str, str]:
    return "".join(map(chr, sample.token_ids)), "".join("^" if each else " " for each in sample.mask)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_the_hint_goes_into_the_prompt_and_the_sampled_tokens_stay() -> None:
    (row,) = to_samples(chain(("question? >", "call"), ("[seen]>", "answer")))
    assert drawn(row) == (
        "question? >call[seen]>answer",
        "           ^^^^       ^^^^^^",
    )
    hinted = with_prompt(row, ids("question? >"), ids("question? It is 7. >"))
    assert drawn(hinted) == (
        "question? It is 7. >call[seen]>answer",
        "                    ^^^^       ^^^^^^",
    )
    assert np.array_equal(hinted.token_ids[hinted.mask], row.token_ids[row.mask])


def test_a_row_after_a_rewritten_history_has_the_prompt_too_or_is_refused() -> None:
    first, second = to_samples(chain(("q >", "ab"), ("q <ab> t >", "cd", "restarts")))
    assert drawn(with_prompt(second, ids("q >"), ids("q h >"))) == ("q h <ab> t >cd", "            ^^")
    assert drawn(with_prompt(first, ids("q >"), ids("q h >"))) == ("q h >ab", "     ^^")
    (_, other) = to_samples(chain(("q >", "ab"), ("rest t >", "cd", "restarts")))
    with pytest.raises(ConfigError, match="rewrites the prompt of chain g/0 in a later turn"):
        with_prompt(other, ids("q >"), ids("q h >"))


def test_equal_prompts_change_nothing() -> None:
    (row,) = to_samples(chain(("question? >", "call")))
    assert drawn(with_prompt(row, ids("question? >"), ids("question? >"))) == drawn(row)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def test_the_stored_log_probs_are_those_of_the_hinted_prompt_and_the_sampled_ids(model: Path, tmp_path: Path) -> None:
    agent = tiny_agent(model)
    agentfly.train(
        agent, ROWS, loss={"kl_coef": 0.1, "reference_hint": HINT}, run={"dir": str(tmp_path), "name": "run"}, **SMALL
    )
    assert {check.name: (check.problems, check.skipped) for check in replay(tmp_path / "run").checks if check.problems} == {}
    weights, tokenizer = load_model(model)
    compared = 0
    with RunReader(tmp_path / "run") as reader:
        for row in reader.page(sort="added", limit=40)[0]:
            series = reader.token_series(row.id).others
            if "reference_logprob" not in series:
                continue
            played = reader.trajectory(row.id)
            text = tokenizer.decode(played.turns[0].context_ids)
            question = played.task.messages[-1].content
            assert question in text and "The answer is" not in text
            told = tokenizer.encode(text.replace(question, f"{question}\nThe answer is {played.task.fields['answer']}."))
            line, scored = list(told), []
            for number, turn in enumerate(played.turns):
                line += list(turn.context_ids) if number else []
                scored += range(len(line), len(line) + len(turn.completion.token_ids))
                line += turn.completion.token_ids
            with torch.no_grad():
                logs = torch.log_softmax(weights(torch.tensor([line])).logits[0].float(), -1)
            expected = [float(logs[place - 1, line[place]]) for place in scored]
            assert series["reference_logprob"] == pytest.approx(expected, abs=1e-4)
            compared += 1
    assert compared >= 16


def test_a_policy_learns_without_the_hint_what_it_does_with_it(model: Path, tmp_path: Path) -> None:
    rows = [{**row, "answer": "zebra " * 8} for row in ROWS]
    result = agentfly.train(
        tiny_agent(model, reward="none"), rows, algorithm="distill", loss={"reference_hint": HINT},
        run={"dir": str(tmp_path), "name": "run"}, **SMALL | {"steps": 8, "num_tasks": 8},
    )  # fmt: skip
    apart = [row["train/reference_kl"] for row in result.history]
    assert apart[0] > 0
    assert sum(apart[-4:]) / 4 < 0.5 * apart[0], apart


def test_a_hint_that_cannot_be_written_gets_a_sentence(model: Path, tmp_path: Path) -> None:
    def train(hint: str) -> None:
        loss = {"kl_coef": 0.1, "reference_hint": hint}
        agentfly.train(tiny_agent(model), ROWS, loss=loss, run={"dir": str(tmp_path), "name": "run"}, **SMALL)

    with pytest.raises(DataError, match=r"has no field 'solution', which loss.reference_hint asks for"):
        train("It is {solution}")
    for hint in ("It is {", "{answer.real}", "{}"):
        with pytest.raises(ConfigError, match=r"loss.reference_hint: .*a brace that is text is doubled"):
            train(hint)
    with pytest.raises(ConfigError, match="loss.reference_hint makes chain .* tokens long, and the model reads 512"):
        train("{answer} " + "word " * 600)
    with pytest.raises(ConfigError, match="loss.reference_hint works on one learner rank"):
        Config.from_dict({"loss": {"kl_coef": 0.1, "reference_hint": "x"}, "learner": {"ranks": 2}})
