"""Agents whose code is somebody else's: functions and commands that call the policy over HTTP."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentfly import OutsideAgent, outside_agent, plugins, train
from agentfly.agents.outside import Llm
from agentfly.api import config_for
from agentfly.build import build_agent
from agentfly.config import Config
from agentfly.errors import ConfigError, EngineError
from agentfly.learn.samples import check_tokens, to_samples
from agentfly.rollout.chat import ChatSession
from agentfly.testing import ByteRenderer, GuessEnv, ScriptedEngine
from agentfly.types import Outcome, Request, RunResult, Task, Trajectory

ROW = {"question": "6 x 7?", "answer": "42"}


async def ask(llm: Llm, *said: str, key: str | None = None, **more: Any) -> httpx.Response:
    """One request of Chat Completions: a user's text and, in turn, replies and further texts."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    body = {"model": llm.model, "messages": messages, **more}
    async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
        headers = {"Authorization": f"Bearer {key or llm.api_key}"}
        return await client.post(f"{llm.base_url}/chat/completions", json=body, headers=headers)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def error_of(response: httpx.Response) -> str:
    sentence: str = response.json()["error"]["message"]
    return sentence


def agent_of(function: Callable[..., Any], replies: Any, **options: Any) -> OutsideAgent:
    engine = ScriptedEngine(replies, record=True)
    return OutsideAgent(
        engine, function, **{"renderer": ByteRenderer(), "reward": "exact_match", "parser": "hermes", **options}
    )


def run(agent: OutsideAgent, count: int = 1, **options: Any) -> RunResult:
    return agent.run_sync([ROW], num_chains=count, **options)


def play(function: Callable[..., Any], replies: Any, **options: Any) -> Trajectory:
    (trajectory,) = run(agent_of(function, replies, **options))
    return trajectory


def by_question(answers: dict[str, str]) -> Callable[[Request], str]:
    return lambda request: answers[request.messages[-1].content]


async def two_turns(task: Task, llm: Llm) -> str:
    first = text_of(await ask(llm, task.messages[0].content))
    return text_of(await ask(llm, task.messages[0].content, first, "sure?"))


SURE = by_question({"6 x 7?": " forty ", "sure?": "42"})


def test_what_a_function_returns_is_the_prediction_and_its_calls_are_one_row() -> None:
    agent = agent_of(two_turns, SURE)
    result = run(agent, 4)
    assert result.rewards == [1.0] * 4 and result.outcomes == {"finished": 4}
    for trajectory in result:
        assert [(turn.row, turn.why) for turn in trajectory] == [(0, "first"), (0, "")]
        assert [message.content for message in trajectory.messages] == ["6 x 7?", " forty ", "sure?", "42"]
        (row,) = to_samples(trajectory)
        check_tokens(trajectory, [row], versions=range(1))
    engine: Any = agent.engine
    assert {name for name in engine.released if "/" in name} == {f"{trajectory.id}/0" for trajectory in result}


def test_a_function_without_async_runs_in_a_thread_each() -> None:
    together = threading.Barrier(12)

    def wait(task: Task, llm: Llm) -> str:
        together.wait(30)  # all chains are there at once
        return asyncio.run(two_turns(task, llm))

    assert run(agent_of(wait, SURE), 12).outcomes == {"finished": 12}


def test_a_returned_number_is_the_reward_of_an_agent_without_one() -> None:
    async def scored(task: Task, llm: Llm) -> float:
        return len(text_of(await ask(llm, "hi"))) / 10

    assert play(scored, ["abc"], reward=OutsideAgent.__init__.__kwdefaults__["reward"]).reward == 0.3

    async def silent(task: Task, llm: Llm) -> None:
        await ask(llm, "hi")

    with pytest.raises(ConfigError, match="the agent's code returned '', which is no number: return the reward, or give"):
        play(silent, ["abc"], reward="returned")


def test_code_that_raises_is_the_fault_of_its_chain() -> None:
    async def sometimes(task: Task, llm: Llm) -> str:
        if text_of(await ask(llm, "6 x 7?")) == "42":
            return "42"
        raise KeyError("price")

    number = iter(range(4))
    result = run(agent_of(sometimes, lambda request: "42" if next(number) else "?"), 4, max_concurrency=1)
    assert result.outcomes == {"world_failure": 1, "finished": 3}
    failed = result[0]
    assert failed.error == "WorldError: the code of the agent raised KeyError: 'price'" and failed.reward is None


def test_code_that_never_calls_is_an_error_of_the_agent() -> None:
    async def idle(task: Task, llm: Llm) -> str:
        return "42"

    trajectory = play(idle, ["never"])
    assert trajectory.outcome is Outcome.WORLD_FAILURE and trajectory.reward is None
    assert "made no call of the model" in str(trajectory.error)


def test_a_training_whose_chains_all_fail_stops(tmp_path: Path) -> None:
    async def broken(task: Task, llm: Llm) -> str:
        raise RuntimeError("no such tool")

    agent = OutsideAgent("pocket", broken, reward="exact_match")
    with pytest.raises(Exception, match="no such tool"):
        train(agent, data="arithmetic", steps=2, num_tasks=2, num_chains=2, train_count=16, validation_count=4,
              validate_every=0, **{"run.dir": str(tmp_path)})  # fmt: skip


def test_more_calls_than_turns_and_a_full_context_end_the_chain_with_a_sentence() -> None:
    said: list[httpx.Response] = []

    async def loops(task: Task, llm: Llm) -> str:
        while True:
            said.append(await ask(llm, "6 x 7?"))
            text_of(said[-1])

    trajectory = play(loops, lambda request: "42", max_turns=3)
    assert trajectory.outcome is Outcome.MAX_TURNS and len(trajectory) == 3 and trajectory.scored
    assert said[-1].status_code == 401 and error_of(said[-1]) == "the chain has made its 3 calls (agent.max_turns)"

    async def long(task: Task, llm: Llm) -> str:
        await ask(llm, "6 x 7?")
        said.append(await ask(llm, "x" * 500))
        return text_of(said[-1])

    trajectory = play(long, lambda request: "42", max_context=200)
    assert trajectory.outcome is Outcome.MAX_TOKENS and len(trajectory) == 1
    assert said[-1].status_code == 400 and "and the context 200 (agent.max_context): send less" in error_of(said[-1])


def test_a_client_that_recovers_from_a_full_context_is_not_cut() -> None:
    async def folds(task: Task, llm: Llm) -> str:
        await ask(llm, "x" * 500)
        return text_of(await ask(llm, "6 x 7?"))

    assert play(folds, lambda request: "42", max_context=200).outcome is Outcome.FINISHED


def test_calls_of_tools_that_the_client_runs_are_counted() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}

    async def uses(task: Task, llm: Llm) -> str:
        async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {llm.api_key}"}) as client:
            messages = [{"role": "user", "content": "6 x 7?"}]
            for _ in range(2):
                body = {"model": "any", "messages": messages, "tools": [tool]}
                response = await client.post(f"{llm.base_url}/chat/completions", json=body)
                message = response.json()["choices"][0]["message"]
                messages.append(message)
                for call in message.get("tool_calls") or ():
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "seen"})
        return str(message["content"])

    calls = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    trajectory = play(uses, lambda request: "42" if request.messages[-1].role == "tool" else calls)
    assert trajectory.reward == 1.0 and trajectory.tool_counts == {"add": 1}
    assert trajectory.turns[0].results[0].observation == "seen"
    assert [turn.why for turn in trajectory] == ["first", ""]


def test_calls_at_once_have_seeds_of_their_own_and_a_row_each() -> None:
    async def parallel(task: Task, llm: Llm) -> str:
        answers = await asyncio.gather(*(ask(llm, "6 x 7?") for _ in range(3)))
        return text_of(answers[0])

    agent = agent_of(parallel, lambda request: "42", sampling={"seed": 1})
    (trajectory,) = run(agent)
    engine: Any = agent.engine
    assert len({request.sampling.seed for request in engine.requests}) == 3
    assert len({request.session for request in engine.requests}) == 3 and [turn.row for turn in trajectory] == [0, 1, 2]


def test_a_call_that_a_client_repeats_is_sampled_once() -> None:
    class Slow(ScriptedEngine):
        """The first reply waits until the client has asked for it again."""

        async def generate(self, request: Request) -> Any:
            begun.set()
            await again.wait()
            return await super().generate(request)

    begun, again = asyncio.Event(), asyncio.Event()

    async def repeats(task: Task, llm: Llm) -> str:
        first = asyncio.create_task(ask(llm, "6 x 7?"))
        await begun.wait()
        first.cancel()  # the client gives up, and sends the same body once more
        await asyncio.gather(first, return_exceptions=True)
        second = asyncio.create_task(ask(llm, "6 x 7?"))
        while not next(iter(agent._servers.values()))[0][1](llm.api_key).num_joined:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        again.set()
        return text_of(await second)

    agent = OutsideAgent(Slow(["42"]), repeats, renderer=ByteRenderer(), reward="exact_match")
    (trajectory,) = run(agent)
    assert trajectory.reward == 1.0 and len(trajectory) == 1


def test_another_temperature_than_that_of_the_run_is_refused_or_ignored() -> None:
    said: list[httpx.Response] = []

    async def cold(task: Task, llm: Llm) -> str:
        said.append(await ask(llm, "6 x 7?", temperature=0.2, max_tokens=1, stop=["2"]))
        return "42"

    assert "made no call" in str(play(cold, ["42"]).error)
    assert error_of(said[-1]).startswith("temperature 0.2 is not that of this run, 1: leave it out")
    agent = agent_of(cold, ["42"], asked_sampling="override")
    (trajectory,) = run(agent)
    engine: Any = agent.engine
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (1.0, 1, ("2",))
    assert trajectory.outcome is Outcome.FINISHED


def test_a_key_is_worth_nothing_to_others_and_after_its_chain() -> None:
    keys: list[Llm] = []

    async def keeps(task: Task, llm: Llm) -> str:
        keys.append(llm)
        assert (await ask(llm, "6 x 7?", key="af-guess")).status_code == 401
        if len(keys) == 2:
            assert (await ask(keys[0], "6 x 7?")).status_code == 401
        return text_of(await ask(llm, "6 x 7?"))

    result = run(agent_of(keeps, lambda request: "42"), 2, max_concurrency=1)
    assert result.outcomes == {"finished": 2} and keys[0].api_key != keys[1].api_key


def test_calls_in_flight_at_the_end_are_cancelled() -> None:
    class Hanging(ScriptedEngine):
        """Never answers "wait"."""

        async def generate(self, request: Request) -> Any:
            if request.messages[-1].content == "wait":
                hanging.set()
                await asyncio.Event().wait()
            return await super().generate(request)

    hanging = asyncio.Event()
    left: list[asyncio.Task[httpx.Response]] = []

    async def leaves(task: Task, llm: Llm) -> str:
        left.append(asyncio.create_task(ask(llm, "wait")))
        await hanging.wait()
        return text_of(await ask(llm, "6 x 7?"))

    agent = OutsideAgent(Hanging(["42"]), leaves, renderer=ByteRenderer(), reward="exact_match")
    (trajectory,) = run(agent)
    assert trajectory.reward == 1.0 and len(trajectory) == 1, "the chain counts as it stood"


def test_an_engine_that_fails_is_a_failure_of_the_world() -> None:
    async def stubborn(task: Task, llm: Llm) -> str:
        statuses = [(await ask(llm, "6 x 7?")).status_code for _ in range(2)]
        return str(statuses)

    trajectory = play(stubborn, [EngineError("the GPU is gone")])
    assert trajectory.outcome is Outcome.WORLD_FAILURE and trajectory.error == "EngineError: the GPU is gone"


def test_a_chain_that_uses_up_its_time_is_ended_and_scored() -> None:
    async def slow(task: Task, llm: Llm) -> str:
        await ask(llm, "6 x 7?")
        await asyncio.Event().wait()
        return ""

    trajectory = play(slow, ["41"], chain_timeout_s=0.3)
    assert trajectory.outcome is Outcome.MAX_TIME and trajectory.reward == 0.0 and len(trajectory) == 1


def test_a_function_may_ask_for_the_environment_of_its_chain() -> None:
    async def guesses(task: Task, llm: Llm, env: Any) -> str:
        await ask(llm, "6 x 7?")
        said = env.guess(7)
        return str(await said if inspect.isawaitable(said) else said)

    row = {"question": "?", "answer": "correct", "secret": 7}
    agent = agent_of(guesses, ["x"], env=GuessEnv)
    assert agent.run_sync([row]).rewards == [1.0]


COMMAND = """
import json, os, sys, urllib.request
body = {"model": os.environ["AGENTFLY_MODEL"], "messages": [{"role": "user", "content": sys.argv[1]}]}
head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
answer = opener.open(urllib.request.Request(url, json.dumps(body).encode(), head)).read()
print(json.loads(answer)["choices"][0]["message"]["content"])
if "--fail" in sys.argv:
    sys.exit("it broke")
"""


def test_a_command_is_an_agent(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(COMMAND)
    options: dict[str, Any] = {"renderer": ByteRenderer(), "reward": "exact_match"}
    agent = OutsideAgent(ScriptedEngine(lambda request: "42"), command=f"{sys.executable} {program} '{{question}}'", **options)
    result = run(agent, 2)
    assert result.rewards == [1.0, 1.0] and result[0].messages[0].content == "6 x 7?"
    words = [sys.executable, str(program), "6", "--fail"]
    (failed,) = run(OutsideAgent(ScriptedEngine(["42"]), command=words, **options))
    assert failed.outcome is Outcome.WORLD_FAILURE and "ended with status 1: it broke" in str(failed.error)
    (missing,) = run(OutsideAgent(ScriptedEngine(["42"]), command="no-such-program", **options))
    assert missing.error == "WorldError: there is no program 'no-such-program' on the PATH"


KILLED = """
import sys
from agentfly import OutsideAgent
from agentfly.testing import ByteRenderer, ScriptedEngine
command = ["sh", "-c", "echo $$ > " + sys.argv[1] + "; exec sleep 600"]
agent = OutsideAgent(ScriptedEngine([]), command=command, renderer=ByteRenderer())
agent.run_sync([{"question": "?"}])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_a_command_ends_with_a_training_that_is_killed(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(told)]) as trainer:
        try:
            until(lambda: told.exists() and told.read_text().endswith("\n"))
            number = int(told.read_text())
            assert runs(number)
        finally:
            trainer.kill()
    until(lambda: not runs(number))


def runs(number: int) -> bool:
    """Whether a process runs. One that has ended may wait for its parent."""
    try:
        return "State:\tZ" not in Path(f"/proc/{number}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(holds: Callable[[], bool]) -> None:
    """Wait for a state; a test that never sees it fails by its own time limit."""
    while not holds():
        time.sleep(0.01)


@outside_agent
async def documented(task: Task, llm: Llm) -> str:
    """An agent that a config can name."""
    return await two_turns(task, llm)


def test_a_decorated_function_is_an_agent_for_a_config_too() -> None:
    made = documented(ScriptedEngine(SURE), renderer=ByteRenderer(), reward="exact_match")
    assert isinstance(made, OutsideAgent) and run(made).rewards == [1.0]
    config = Config.from_dict({"agent": {"kind": f"{__name__}:documented", "options": {"thinking": "keep"}}})
    built = build_agent(config, ScriptedEngine(SURE), ByteRenderer())
    assert isinstance(built, OutsideAgent) and built.thinking == "keep"
    assert built.run_sync([ROW]).rewards == [1.0]
    by_command = Config.from_dict({"agent": {"kind": "outside", "options": {"command": "true"}}})
    assert isinstance(build_agent(by_command, ScriptedEngine(SURE), ByteRenderer()), OutsideAgent)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "OutsideAgent runs a function or a command: give one of them"),
        ({"function": two_turns, "command": "ls"}, "give one of them"),
        ({"function": 7}, "is called with \\(task, llm\\), and 7 cannot be called"),
        ({"function": two_turns, "tools": ["add"]}, "an agent with code of its own has no tools here"),
        ({"function": two_turns, "system": "Be good."}, "has no system here"),
        ({"function": two_turns, "on_tool_error": "end"}, "has no reactions here"),
        ({"function": two_turns, "thinking": "drop"}, 'thinking is "exact" or "keep"'),
        ({"function": two_turns, "asked_sampling": "allow"}, 'asked_sampling is "refuse" or "override"'),
    ],
)
def test_an_agent_that_cannot_be_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        OutsideAgent(ScriptedEngine([]), **options)


def test_a_limit_of_turns_that_the_endpoint_cannot_keep_is_refused() -> None:
    agent = agent_of(two_turns, SURE)
    agent.limits = replace(agent.limits, turn_timeout_s=5.0)
    with pytest.raises(ConfigError, match="rollout.turn_timeout_s has no turns to limit"):
        run(agent)


def test_a_training_names_a_decorated_function_in_its_config() -> None:
    agent = documented(ScriptedEngine(SURE), renderer=ByteRenderer(), reward="exact_match")
    kind = config_for(agent, "arithmetic", {}).agent.kind
    assert kind == f"{__name__}:documented" and isinstance(plugins.resolve("agents", kind), outside_agent)


def test_it_cannot_be_talked_to() -> None:
    with pytest.raises(ConfigError, match="OutsideAgent has a loop of its own, which cannot be talked to"):
        asyncio.run(ChatSession.open(agent_of(two_turns, SURE)))
