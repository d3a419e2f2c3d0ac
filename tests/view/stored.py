"""Runs on the disk for the tests of the dashboard, and clients of its application."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from agentfly.runs import RunStore
from agentfly.types import Completion, Message, Outcome, Task, TokenRecord, ToolCall, ToolResult, Trajectory, Turn
from agentfly.view.app import Dashboard

TOKEN = "a-token-for-tests"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
SCRIPT = "<script>alert(1)</script>"
CONFIG = """
algorithm = "grpo"
[agent]
model = "pocket"
tools = ["add"]
[rollout]
num_tasks = 2
num_chains = 2
[train]
steps = 4
lr = {lr}
"""


def make_chain(
    name: str = "t1-0-0",
    *,
    task: str = "7",
    chain: int = 0,
    answer: str = "5",
    reward: float | None = 1.0,
    outcome: Outcome = Outcome.FINISHED,
    error: str | None = None,
    reply_ids: list[int] | None = None,
    observation: str = "5",
) -> Trajectory:
    """Two turns: a call of `add`, then an answer. Ids are those of the bundled model's tokenizer."""
    call = ToolCall("add", {"a": 2, "b": 3})
    last = [403, 33, 2] if reply_ids is None else reply_ids
    turns = [
        Turn(
            [1, 297, 33, 2, 1, 298],
            True,
            Completion(text="Action: add", token_ids=[374, 382, 2], logprobs=[-0.1, -0.2, -0.3], versions=[0, 0, 0]),
            (call,),
            (ToolResult(observation=observation),),
            sampled_s=0.5,
            tools_s=0.1,
        ),
        Turn(
            [211, 1, 368, 33, 2],
            False,
            Completion(
                text=f"Answer: {answer}", token_ids=last, logprobs=[-0.5] * len(last), versions=[1] * len(last), stop="stop"
            ),
            sampled_s=0.25,
        ),
    ]
    messages = [
        Message("user", "What is 2 plus 3?"),
        Message("assistant", "Action: add", (call,)),
        Message("user", f"Observation: {observation}"),
        Message("assistant", f"Answer: {answer}"),
    ]
    fields = {"question": "What is 2 plus 3?", "answer": "5"}
    return Trajectory(
        name,
        Task(task, (messages[0],), fields),
        chain,
        messages,
        turns,
        outcome,
        error,
        answer,
        reward,
        {} if reward is None else {"exact_match": reward},
        seconds=1.0,
    )


def make_run(folder: Path, *, steps: int = 3, lr: str = "1e-4", chains: list[Trajectory] | None = None) -> Path:
    """A finished run: two tasks with two chains each in every step, one of them better, and a validation of two tasks."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(lr=lr))
    with RunStore(folder / "run.db") as store:
        store.set_meta(
            {"status": "finished", "model": "pocket", "world": "arithmetic", "algorithm": "grpo", "total_steps": steps}
        )
        for step in range(1, steps + 1):
            own = [
                make_chain(f"t{step}-{task}-{chain}", task=str(task), chain=chain, reward=float(chain), answer=str(4 + chain),
                           reply_ids=[403, 32 + chain, 2])
                for task in range(2)
                for chain in range(2)
            ]  # fmt: skip
            store.add_trajectories(step, "train", own)
            metrics = {"reward/mean": 0.25 * step, "train/skipped": 0.0, "train/logprob_gap": 1e-6, "time/step_s": 2.0}
            store.add_metrics(step, metrics | {"time/decode_s": 1.5, "time/learn_s": 0.5, "rollout/outcome/finished": 1.0})
            store.add_checks(step, {"logprob_gap": (True, 1e-6, 0.05), "lag": (step != 2, float(step == 2), 0.0)})
        held = [make_chain(f"v{steps}-{task}-0", task=f"held-{task}", reward=float(task)) for task in range(2)]
        store.add_trajectories(steps, "validation", held)
        store.add_metrics(steps, {"validation/success": 0.5, "validation/reward": 0.5})
        store.add_trajectories(steps, "train", chains or [])
    return folder


def add_token_record(folder: Path, step: int, record: TokenRecord) -> None:
    with RunStore(folder / "run.db") as store:
        store.add_tokens(step, [record])


@asynccontextmanager
async def open_client(folder: Path, headers: dict[str, str] | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application behind its guard, without a network."""
    dashboard = Dashboard(folder, token=TOKEN, **options)
    transport = httpx.ASGITransport(app=dashboard.app)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8360", headers=BEARER if headers is None else headers
        ) as client:
            yield client
    finally:
        await dashboard.release()


def ask(folder: Path, *paths: str, headers: dict[str, str] | None = None, method: str = "GET", **request: Any) -> Any:
    """The response to a request, or the list of those to several."""

    async def work() -> list[httpx.Response]:
        async with open_client(folder, headers) as client:
            return [await client.request(method, path, **request) for path in paths]

    found = asyncio.run(work())
    return found[0] if len(paths) == 1 else found


def data(folder: Path, path: str) -> Any:
    """The JSON of a GET that succeeds."""
    response = ask(folder, path)
    assert response.status_code == 200, response.text
    return response.json()


def events_of(text: str) -> list[tuple[str, Any]]:
    """The events of a stream: name and data."""
    found = []
    for block in text.split("\n\n"):
        lines = dict(line.partition(": ")[::2] for line in block.splitlines())
        if "event" in lines:
            found.append((lines["event"], json.loads(lines["data"])))
    return found
