"""`agentfly serve`: a model and an agent behind a key, and what is refused before anything listens."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install 'agentfly[serve]'")

import agentfly
from agentfly.cli import main, serve

KEY = "a-key-of-this-test"
RECIPE = """
[agent]
model = "pocket"
tools = ["add"]
reward = "exact_match"
max_turns = 3
[sampling]
max_tokens = 32
temperature = 0
"""


def serving(monkeypatch: pytest.MonkeyPatch, words: list[str], use: Callable[[str, str], None]) -> list[str]:
    """Run the command in this thread, and `use(url, key)` in another, which then presses Ctrl-C. Returns what was printed."""
    lines: Queue[str] = Queue()
    told: list[str] = []
    failures: list[BaseException] = []

    def say(text: str, **_: Any) -> None:
        told.append(text)
        lines.put(text)

    def visit() -> None:
        try:
            opening = lines.get(timeout=120)
            found = re.search(r"http://[\d.:]+", opening)
            assert found is not None, opening
            key = re.search(r"^key: (\S+)$", opening, re.MULTILINE)
            use(found.group(), key.group(1) if key else KEY)
        except BaseException as error:
            failures.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(serve, "print", say, raising=False)
    visitor = threading.Thread(target=visit)
    visitor.start()
    try:
        assert main(["serve", *words, "--port", "0"]) == 0
    finally:
        visitor.join(60)
    if failures:
        raise failures[0]
    return told


def client(url: str, key: str) -> httpx.Client:
    return httpx.Client(base_url=url, headers={"Authorization": f"Bearer {key}"}, trust_env=False, timeout=60)


def test_a_model_is_served_to_every_place_that_takes_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a random key, which is printed."""
    rows = [{"question": "What is 3 + 4?", "answer": "7"}]

    def use(url: str, key: str) -> None:
        with client(url, key) as asking:
            (model,) = asking.get("/v1/models").json()["data"]
            assert model["id"] == "tiny"
            body = {"max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
            answer = asking.post("/v1/messages", json=body).json()
            assert (answer["model"], answer["role"]) == ("tiny", "assistant")
            assert 0 < answer["usage"]["output_tokens"] <= 4
        monkeypatch.setenv("OPENAI_API_KEY", key)
        agent = agentfly.ReactAgent(f"openai:tiny@{url}/v1", tools=["add"], reward="exact_match", sampling={"max_tokens": 48})
        (chain,) = agent.run_sync(rows).trajectories
        assert chain.outcome.trainable and chain.turns and chain.num_sampled > 0

    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    told = serving(monkeypatch, ["pocket", "--name", "tiny"], use)
    assert told[-1] == "stopped" and "key: af-" in told[0]


def test_an_agent_answers_with_its_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)

    def use(url: str, key: str) -> None:
        with client(url, key) as asking:
            answer = asking.post("/v1/responses", json={"input": "What is 3 + 4?"}).json()
            assert answer["status"] == "completed"
            assert answer["usage"]["output_tokens"] > 4
            refused = asking.post("/v1/responses", json={"input": "hi"}, headers={"Authorization": "Bearer no"})
            assert refused.status_code == 401

    monkeypatch.setenv(serve.KEY_VARIABLE, KEY)
    told = serving(monkeypatch, ["pocket", "--agent", "--recipe", str(recipe)], use)
    assert "ReactAgent with the tools add at http://127.0.0.1:" in told[0] and KEY not in told[0]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["pocket", "--agent"], "pocket is not a checkpoint of a run: --recipe says which agent to serve"),
        (["pocket", "--key", "short"], "a key must have 8 characters or more"),
        (["pocket", "--key", "two words long"], "in ASCII and without spaces"),
        (["pocket", "--port", "70000"], "--port is a number from 0 to 65535"),
        (["pocket", "train.lr=1"], "agentfly serve does not use the config key train.lr"),
        (["pocket", "sampling.temperature=-1"], "temperature"),
        (["no/such/model"], "no/such/model"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *words]) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.startswith("error: ") and told.count("\n") == 1
