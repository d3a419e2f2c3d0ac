"""`agentfly chat`: messages, tasks and forks of stored chains, as text and as JSON."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from agentfly.cli import main

from ..engines.fake_server import chat_server, piece, said

RECIPE = """
[agent]
model = "pocket"
tools = ["add"]
reward = "exact_match"
max_turns = 2
[data]
train = "arithmetic"
train_count = 20
validation_count = 4
[sampling]
max_tokens = 16
seed = 1
"""


def out(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 0) -> str:
    assert main([str(word) for word in words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def events_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_model_is_talked_to_and_a_task_is_scored(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", "pocket", "--recipe", recipe]
    found = events_of(out(capsys, *words, "--message", "1 + 2?", "--message", "And 3 + 4?", "--json"))
    kinds = [event["event"] for event in found]
    assert kinds[0] == "opened" and kinds.count("finished") == 2 and "text" in kinds and "score" not in kinds
    found = events_of(out(capsys, *words, "--task", "0", "--message", "/score", "--json"))  # a command, not a message
    assert found[-1]["event"] == "error" and "needs" in found[-1]["text"]
    told = out(capsys, *words, "--message", "1 + 2?", "sampling.max_tokens=4")
    assert "ReactAgent with the tools: add" in told and " tokens so far" in told and "-> add" in told


def test_lines_of_stdin_are_messages(recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("1 + 2?\n\n/new\n2 + 2?\n/quit\nnever said\n"))
    found = events_of(out(capsys, "chat", "pocket", "--recipe", recipe, "--json"))
    assert [event["event"] for event in found if event["event"] in ("opened", "finished")] == [
        "opened", "finished", "opened", "finished",
    ]  # fmt: skip


def test_a_stored_chain_is_forked_and_played_from_a_turn(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentfly.config import Config
    from agentfly.training.evaluation import evaluate_run

    done = evaluate_run(Config.load(recipe, [f"run.dir={tmp_path}/runs", "run.name=mine"]))
    stored = done.trajectories[0]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    words = ["chat", "pocket", "--recipe", recipe, "--fork", stored.id, "--run", done.directory, "--json"]
    found = events_of(out(capsys, *words))
    assert [message["role"] for message in found[0]["messages"]] == ["system", "user"]
    again = "".join(event["text"] for event in found if event["event"] == "text")
    assert again.startswith(stored.turns[0].text)  # the same seed at the same place gives the same reply
    assert found[-1]["event"] == "score"
    assert "fork it at 0 to 1" in out(capsys, *words, "--turn", "99", code=2)
    assert "no trajectory 'none'" in out(capsys, *[word if word != stored.id else "none" for word in words], code=2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["pocket"], "give the recipe that describes its agent"),
        (["pocket", "--recipe", "{recipe}", "--task", "99"], "has no task '99'"),
        (["pocket", "--recipe", "{recipe}", "--turn", "1"], "belong to --fork"),
        (["pocket", "--recipe", "{recipe}", "--fork", "a", "--task", "0"], "remove --task or --fork"),
        (["pocket", "--recipe", "{recipe}", "--fork", "a"], "give --run RUN"),
        (["pocket", "--recipe", "nowhere"], "no such config file"),
    ],
)
def test_a_conversation_that_cannot_begin_is_refused(
    words: list[str], sentence: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in out(capsys, "chat", *[word.format(recipe=recipe) for word in words], code=2)


def test_a_model_behind_an_address_is_talked_to_evaluated_and_listed_by_its_name(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stream = [piece({"role": "assistant", "content": "Answer: 3"}), piece({}, "stop"), "data: [DONE]"]
    with chat_server(stream, *[said("Answer: 3")] * 20) as server:
        model = f"openai:org/mine@{server.url}"
        found = events_of(out(capsys, "chat", model, "--recipe", recipe, "--message", "1 + 2?", "--json"))
        assert [event["text"] for event in found if event["event"] == "text"] == ["Answer: 3"]
        out(capsys, "eval", recipe, "--model", model, f"run.dir={tmp_path}/runs")
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("eval-openai-mine")
    listed = out(capsys, "runs", tmp_path / "runs")
    assert "openai:mine" in listed
    assert "v1" not in listed
