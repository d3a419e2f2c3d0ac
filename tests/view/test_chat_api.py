"""Conversations from the page: with the bundled model end to end, and with a scripted one for limits, forks and failures."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette", reason="Starlette is not installed: pip install 'agentfly[serve]'")

from agentfly import ReactAgent, reward, tool
from agentfly.errors import ConfigError
from agentfly.pocket import model_dir
from agentfly.testing import GuessEnv, ScriptedEngine
from agentfly.types import Completion, Message, Outcome, Task, ToolCall, ToolResult, Trajectory, Turn
from agentfly.view import chats as chats_module
from agentfly.view.app import Dashboard
from agentfly.view.chat import Wish
from agentfly.view.chats import chat_config, find_checkpoint_name

from .stored import BEARER, TOKEN, events_of, make_run

DEADLINE_S = 120.0


@tool(name="guess", register=False)
async def guess(n: int, env: GuessEnv) -> str:
    """Guess the number.

    Args:
        n: your guess
    """
    return env.guess(n)


@tool(name="wait", register=False)
async def wait() -> str:
    """Wait for a long time."""
    await asyncio.sleep(DEADLINE_S)
    return "done"


@reward(name="solved")
def solved(env: GuessEnv) -> float:
    return float(env.solved)


def call(name: str, **arguments: Any) -> str:
    return f"Thought: use it\nAction: {name}\nInput: {json.dumps(arguments)}"


def with_client(folder: Path, body: Callable[[httpx.AsyncClient, Dashboard], Awaitable[Any]], **limits: Any) -> Any:
    """Run `body` with a client of the application, within a deadline; everything is closed afterwards."""

    async def work() -> Any:
        dashboard = Dashboard(folder, token=TOKEN)
        for name, value in limits.items():
            setattr(dashboard.chats, name, value)
        transport = httpx.ASGITransport(app=dashboard.app)
        try:
            async with (
                asyncio.timeout(DEADLINE_S),
                httpx.AsyncClient(
                    transport=transport, base_url="http://127.0.0.1:8360", headers=BEARER, timeout=None
                ) as client,
            ):
                return await body(client, dashboard)
        finally:
            await dashboard.release()

    return asyncio.run(work())


def scripted(monkeypatch: pytest.MonkeyPatch, replies: Any, **options: Any) -> ScriptedEngine:
    """Conversations use a scripted model in place of a loaded one."""
    engine = ScriptedEngine(replies, record=True)
    monkeypatch.setattr(
        chats_module, "build_agent", lambda config: ReactAgent(engine, renderer=engine.renderer, **({"tools": []} | options))
    )
    return engine


async def say(client: httpx.AsyncClient, session: str, text: str | None = None) -> list[tuple[str, Any]]:
    response = await client.post(f"/api/chat/{session}", json={} if text is None else {"text": text})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


# ---- the bundled model ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_answers_with_its_tools_and_shows_its_tokens(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    (folder / "config.toml").write_text(
        '[agent]\nmodel = "nobody/has-this-model"\ntools = ["add", "subtract", "multiply"]\nreward = "exact_match"\n'
        "max_turns = 4\n[sampling]\nmax_tokens = 64\n"
    )
    shutil.copytree(model_dir(), folder / "checkpoints" / "step-000003")

    async def body(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
        opened = await client.post("/api/chat", json={"run": "one", "sampling": {"temperature": 0}})
        assert opened.status_code == 201, opened.text
        chat = opened.json()
        assert (chat["checkpoint"], chat["agent"], chat["scorable"]) == ("step-000003", "ReactAgent", False)
        assert [each["name"] for each in chat["tools"]] == ["add", "subtract", "multiply"]

        events = await say(client, chat["session"], "What is 12 times 7, plus 5?")
        kinds = [kind for kind, _ in events]
        assert {"text", "reply", "call", "result", "end"} <= set(kinds)
        assert kinds[-1] == "end"
        replies = [value for kind, value in events if kind == "reply"]
        for reply in replies:
            assert len(reply["ids"]) == len(reply["pieces"]) == len(reply["logprobs"]) == len(reply["versions"]) > 0
            assert max(reply["logprobs"]) <= 1e-3
            assert "".join(reply["pieces"]).removesuffix("<|im_end|>").strip() == reply["text"].strip()
        assert "".join(value["text"] for kind, value in events if kind == "text") == "".join(each["text"] for each in replies)
        asked = next(value for kind, value in events if kind == "call")
        told = next(value for kind, value in events if kind == "result")
        assert asked["name"] == told["name"] == "multiply"
        assert (asked["arguments"], told["observation"]) == ({"a": 12, "b": 7}, "84")

        await say(client, chat["session"], "What is 3 plus 4?")
        shown = (await client.get(f"/api/chat/{chat['session']}")).json()
        assert next(each["content"] for each in shown["messages"] if each["role"] == "user").startswith("What is 12")
        assert len(shown["turns"]) > len(replies)
        await fork_of_a_stored_chain(client)
        closed = await client.delete(f"/api/chat/{chat['session']}")
        assert closed.json() == {"closed": True}
        assert (await client.get(f"/api/chat/{chat['session']}")).status_code == 404
        assert (await client.post(f"/api/chat/{chat['session']}", json={"text": "x"})).status_code == 404

    with_client(tmp_path / "runs", body)


async def fork_of_a_stored_chain(client: httpx.AsyncClient) -> None:
    """The model goes on after the stored ids, and the chain is scored as its task says."""
    chat = (await client.post("/api/chat", json={"run": "one", "chain": "t1-0-0", "turn": 1})).json()
    assert (chat["forked"], chat["differences"], chat["scorable"]) == ({"chain": "t1-0-0", "turn": 1}, [], True)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant", "user"]
    events = await say(client, chat["session"])
    reply = next(value for kind, value in events if kind == "reply")
    assert (reply["turn"], reply["num_context"]) == (1, 5)  # the context of the stored turn, id for id
    score = next(value for kind, value in events if kind == "score")
    assert set(score["components"]) == {"exact_match"}


# ---- a scripted model ----------------------------------------------------------------------------------------------------


def guess_run(folder: Path) -> Path:
    """A run with one chain that guessed 3, then 5, then 7 in an environment with the number 7."""
    task = Task("g", (Message("user", "Guess my number."),), {"secret": 7})
    chain = Trajectory("t1-0-0", task, outcome=Outcome.FINISHED, reward=1.0)
    chain.messages = [Message("user", "Guess my number.")]
    for n, told in ((3, "higher"), (5, "higher"), (7, "correct")):
        made = ToolCall("guess", {"n": n})
        chain.turns.append(
            Turn(
                [1, 2], not chain.turns, Completion(text=f"guess {n}", token_ids=[n], logprobs=[0.0], versions=[0]), (made,),
                (ToolResult(observation=told),),
            )
        )  # fmt: skip
        chain.messages += [Message("assistant", f"guess {n}", (made,)), Message("user", f"Observation: {told}")]
    return make_run(folder, chains=[chain])


def test_a_fork_makes_the_calls_again_and_says_where_the_world_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [call("guess", n=7), "Answer: 7"], tools=[guess], env=GuessEnv, reward=solved)
    guess_run(tmp_path / "runs" / "one")

    async def body(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
        free = await client.post("/api/chat", json={"run": "one"})
        assert free.status_code == 400
        assert "needs a task" in free.json()["error"]
        chat = (await client.post("/api/chat", json={"run": "one", "chain": "t1-0-0", "turn": 2})).json()
        assert (chat["environment"], chat["differences"]) == ("GuessEnv", [])
        events = await say(client, chat["session"])
        assert [value["observation"] for kind, value in events if kind == "result"] == ["correct"]
        assert dict(events)["score"]["reward"] == 1.0
        assert dict(events)["end"]["outcome"] == "finished"

    with_client(tmp_path / "runs", body)

    def contrary(self: GuessEnv, n: int) -> str:
        return "lower"

    monkeypatch.setattr(GuessEnv, "guess", contrary)

    async def differs(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
        chat = (await client.post("/api/chat", json={"run": "one", "chain": "t1-0-0", "turn": 2})).json()
        assert len(chat["differences"]) == 2
        assert "turn 1: guess answered otherwise" in chat["differences"][0]

    with_client(tmp_path / "runs", differs)


def test_a_task_of_the_run_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, [call("guess", n=7), "Answer: 7"], tools=[guess], env=GuessEnv, reward=solved)
    guess_run(tmp_path / "runs" / "one")

    async def body(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
        assert (await client.post("/api/chat", json={"run": "one", "task": "none"})).status_code == 404
        chat = (await client.post("/api/chat", json={"run": "one", "task": "g"})).json()
        assert chat["task"]["messages"][0]["content"] == "Guess my number."
        events = await say(client, chat["session"])
        assert dict(events)["score"]["reward"] == 1.0

    with_client(tmp_path / "runs", body)
    assert "Guess my number." in engine.renderer.decode(engine.requests[0].prompt_ids)


def test_limits_on_number_texts_and_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda request: "Answer: 5")
    folder = make_run(tmp_path / "runs" / "one")
    shutil.copytree(model_dir(), folder / "checkpoints" / "step-000002")

    async def body(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
        first = (await client.post("/api/chat", json={"run": "one", "checkpoint": "model"})).json()
        other = await client.post("/api/chat", json={"run": "one", "checkpoint": "step-000002"})
        assert (other.status_code, "close them" in other.json()["error"]) == (400, True)
        assert (await client.post("/api/chat", json={"run": "one", "checkpoint": "model"})).status_code == 201
        third = await client.post("/api/chat", json={"run": "one", "checkpoint": "model"})
        assert "close one" in third.json()["error"]
        assert len((await client.get("/api/chat")).json()["sessions"]) == 2
        for wrong in ({"text": "x" * 20_001}, {"text": " "}, {"text": 5}, {"say": "x"}, ["x"]):
            assert (await client.post(f"/api/chat/{first['session']}", json=wrong)).status_code == 400
        for wrong in (
            {}, {"run": "none"}, {"run": "one", "checkpoint": "../one"}, {"run": "one", "x": 1}, {"run": 1},
            {"run": "one", "chain": "none"}, {"run": "one", "turn": 1}, {"run": "one", "sampling": {"stop": ["a"]}},
            {"run": "one", "task": "7", "chain": "t1-0-0"},
            {"run": "one", "checkpoint": "model", "chain": "t1-0-0", "turn": 9},
            {"run": "one", "checkpoint": "model", "chain": "t1-0-0", "turn": -1},
        ):  # fmt: skip
            await client.delete(f"/api/chat/{first['session']}")
            assert (await client.post("/api/chat", json=wrong)).status_code in (400, 404), wrong

    with_client(tmp_path / "runs", body, max_sessions=2)


def test_a_conversation_ends_when_it_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = scripted(monkeypatch, lambda request: "Answer: 5")
    make_run(tmp_path / "runs" / "one")

    async def body(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
        chat = (await client.post("/api/chat", json={"run": "one"})).json()
        while (await client.get(f"/api/chat/{chat['session']}")).status_code == 200:
            await asyncio.sleep(0.02)
        assert (await client.get("/api/chat")).json()["sessions"] == []

    with_client(tmp_path / "runs", body, idle_s=0.2)
    assert engine.released


def test_a_failed_reply_is_told_and_the_conversation_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replies = iter([RuntimeError("the engine broke"), "Answer: 5"])

    def next_reply(request: Any) -> str:
        found = next(replies)
        if isinstance(found, Exception):
            raise found
        return found

    scripted(monkeypatch, next_reply)
    make_run(tmp_path / "runs" / "one")

    async def body(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
        chat = (await client.post("/api/chat", json={"run": "one"})).json()
        ((kind, value),) = await say(client, chat["session"], "Hello")
        assert (kind, "the engine broke" in value["error"]) == ("error", True)
        assert (await say(client, chat["session"], "Hello"))[-1][0] == "end"

    with_client(tmp_path / "runs", body)


def test_closing_the_connection_stops_the_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, [call("wait"), "Answer: 5"], tools=[wait])
    make_run(tmp_path / "runs" / "one")

    async def work() -> None:
        async with (
            asyncio.timeout(DEADLINE_S / 2),
            Dashboard(tmp_path / "runs", port=0, token=TOKEN) as dashboard,
            httpx.AsyncClient(base_url=dashboard.url, headers=BEARER, timeout=DEADLINE_S) as client,
        ):
            session = (await client.post("/api/chat", json={"run": "one"})).json()["session"]
            async with client.stream("POST", f"/api/chat/{session}", json={"text": "Wait"}) as stream:
                async for line in stream.aiter_lines():
                    if line == "event: call":
                        break
                busy = await client.post(f"/api/chat/{session}", json={"text": "And?"})
                assert busy.status_code == 409
            while (await client.get(f"/api/chat/{session}")).json()["busy"]:
                await asyncio.sleep(0.02)
            assert (await say(client, session, "Go on"))[-1][0] == "end"

    asyncio.run(work())


def test_of_two_messages_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda request: "Answer: 5")
    make_run(tmp_path / "runs" / "one")

    async def body(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
        session = (await client.post("/api/chat", json={"run": "one"})).json()["session"]
        both = await asyncio.gather(*(client.post(f"/api/chat/{session}", json={"text": "Hello"}) for _ in range(2)))
        lasts = [(each.status_code, events_of(each.text)[-1][0] if each.status_code == 200 else "") for each in both]
        assert sorted(lasts) in ([(200, "end"), (200, "error")], [(200, "end"), (409, "")], [(200, "end"), (200, "end")])
        assert len(dashboard.chats.find(session).talk.trajectory.turns) == sum(last == (200, "end") for last in lasts)

    with_client(tmp_path / "runs", body)


def test_everything_is_closed_with_the_dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a reply that is under way: the dashboard does not wait for its tool."""
    scripted(monkeypatch, [call("wait")], tools=[wait])
    make_run(tmp_path / "runs" / "one")

    async def work() -> Dashboard:
        async with (
            Dashboard(tmp_path / "runs", port=0, token=TOKEN) as dashboard,
            httpx.AsyncClient(base_url=dashboard.url, headers=BEARER, timeout=DEADLINE_S) as client,
        ):
            session = (await client.post("/api/chat", json={"run": "one"})).json()["session"]
            async with client.stream("POST", f"/api/chat/{session}", json={"text": "Wait"}) as stream:
                lines = stream.aiter_lines()
                while await anext(lines) != "event: call":
                    pass
                closing = asyncio.create_task(dashboard.chats.close())
                rest = "\n".join([line async for line in lines])
                assert "the conversation is over" in rest
                await closing
        return dashboard

    started = time.monotonic()
    dashboard = asyncio.run(work())
    assert dashboard.chats.to_json()["sessions"] == []
    assert dashboard.chats._model is None
    assert time.monotonic() - started < DEADLINE_S / 2


def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    (folder / "config.toml").write_text('[agent]\nmodel = "/nowhere/model"\n')

    async def body(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
        response = await client.post("/api/chat", json={"run": "one"})
        assert response.status_code == 400
        assert "/nowhere/model" in response.json()["error"]
        (folder / "config.toml").unlink()
        assert (await client.post("/api/chat", json={"run": "one"})).status_code == 400

    with_client(tmp_path / "runs", body)


def test_the_model_is_loaded_by_the_local_engine_on_the_chosen_device(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    engine = 'engine = {kind = "vllm", dtype = "bfloat16", memory_fraction = 0.5}'
    (folder / "config.toml").write_text(f'[agent]\nmodel = "pocket"\n{engine}\n')
    shutil.copytree(model_dir(), folder / "checkpoints" / "step-000002")
    config = chat_config(folder, "step-000002", "cpu")
    assert config.agent.engine == {"dtype": "bfloat16", "device": "cpu"}
    assert Path(config.agent.model) == folder / "checkpoints" / "step-000002"
    assert chat_config(folder, "model", None).agent.model == "pocket"
    assert find_checkpoint_name(folder, None) == "step-000002"
    with pytest.raises(ConfigError, match="step-000002"):
        find_checkpoint_name(folder, "step-000001")


def test_a_wish_is_checked_by_type() -> None:
    assert Wish.parse({"run": "a", "turn": 2, "chain": "b", "sampling": {"temperature": 0}}).turn == 2
    for wrong in (None, [], {"run": None}, {"run": "a", "turn": True, "chain": "c"}, {"run": "a", "sampling": {"seed": "1"}}):
        with pytest.raises(ConfigError):
            Wish.parse(wrong)


def test_a_model_that_is_loaded_while_the_dashboard_closes_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loading, release = threading.Event(), threading.Event()
    engine = ScriptedEngine(["Answer: 5"])

    def build(config: Any) -> ReactAgent:
        loading.set()
        assert release.wait(DEADLINE_S)
        return ReactAgent(engine, renderer=engine.renderer)

    monkeypatch.setattr(chats_module, "build_agent", build)
    make_run(tmp_path / "runs" / "one")

    async def body(client: httpx.AsyncClient, dashboard: Dashboard) -> None:
        opening = asyncio.create_task(client.post("/api/chat", json={"run": "one"}))
        assert await asyncio.to_thread(loading.wait, DEADLINE_S)
        await dashboard.chats.close()
        release.set()
        assert (await opening).status_code == 404
        assert dashboard.chats._model is None

    with_client(tmp_path / "runs", body)
