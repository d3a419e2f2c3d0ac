"""The runner that verl's worker processes open from a run's folder."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentfly import ConfigError
from agentfly.codec import encode
from agentfly.runs import RunDirectory
from agentfly.verl import launch
from agentfly.verl.verl_chains import SPLIT, TASK
from agentfly.verl.worker import open_session_runner
from agentfly.watch.progress import Progress

from .test_verl_translate import config_of
from .verl_world import FakeClient


def written_run(folder: Path, *overrides: str) -> RunDirectory:
    config = config_of("rollout.num_tasks=4", "rollout.num_chains=2", *overrides)
    directory = RunDirectory.create(folder)
    launch.write_run(config, directory, Progress(1), resumes=False)
    return directory


def test_a_worker_plays_the_recipe_of_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written_run(tmp_path / "r")
    monkeypatch.chdir("/")

    async def run() -> None:
        runner = await open_session_runner(str(tmp_path / "r"))
        assert Path.cwd() == tmp_path
        tokenizer = runner._tokenizer
        client = FakeClient(
            lambda text: [*tokenizer.encode(text, add_special_tokens=False), min(runner._stop_ids)],
            lambda session, turn: "Answer: 7",
        )
        from agentfly import Task
        from agentfly.types import Message

        task = Task("t", (Message("user", "What is 3 + 4?"),), {"answer": "7"})
        rows = [{"uid": "u", "session_id": chain, "global_steps": 1, TASK: encode(task), SPLIT: "train"} for chain in range(2)]
        found = await asyncio.gather(*(runner.run(client, {"temperature": 1.0}, row, f"u-{row['session_id']}") for row in rows))
        assert [each[0].reward for each in found] == [1.0, 1.0]
        assert tokenizer.decode(found[0][0].response_ids[:-1]) == "Answer: 7"
        await runner.close()

    asyncio.run(run())


def test_a_folder_that_is_not_shared_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir must be a shared folder"):
        asyncio.run(open_session_runner(str(tmp_path / "elsewhere")))


def test_a_worker_that_cannot_open_the_agent_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = tmp_path / "start"
    start.mkdir()
    monkeypatch.chdir(start)
    directory = written_run(tmp_path / "r")
    monkeypatch.chdir(tmp_path)
    start.rmdir()
    with pytest.raises(ConfigError, match="start the run in a folder that all machines share"):
        asyncio.run(open_session_runner(str(directory.path)))
    assert "all machines share" in (directory.path / "verl" / "stopped.txt").read_text()
