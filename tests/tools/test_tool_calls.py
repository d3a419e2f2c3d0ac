"""How calls run: together, in threads where they block, within their deadlines, and back as text."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from agentfly.aio import stalls
from agentfly.aio import threads as threads_module
from agentfly.errors import ToolError, WorldError
from agentfly.tools import Tool, call_tools, definition
from agentfly.tools.text import cut
from agentfly.types import ToolCall, ToolResult


def make(fn: Any, **options: Any) -> Tool:
    return Tool(fn, description="d", **options)


def run_all(context, *pairs: tuple[Tool, dict[str, Any]]) -> tuple[ToolResult, ...]:
    tools = {tool.name: tool for tool, _ in pairs}
    return asyncio.run(call_tools(tools, [ToolCall(tool.name, arguments) for tool, arguments in pairs], context))


def test_the_time_of_each_call_is_told_also_if_another_one_fails(context):
    async def wait(seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "ok"

    async def break_down() -> str:
        await asyncio.sleep(0.01)
        raise WorldError("gone")

    tools = {"wait": make(wait), "break_down": make(break_down)}
    seconds: list[float] = [9.0]
    calls = [ToolCall("wait", {"seconds": 0.04}), ToolCall("none", {}), ToolCall("wait", {"seconds": 0.01})]
    asyncio.run(call_tools(tools, calls, context, seconds))
    assert len(seconds) == 3
    assert seconds[0] > seconds[2] >= 0.005
    assert seconds[1] == 0.0
    with pytest.raises(WorldError):
        asyncio.run(call_tools(tools, [ToolCall("wait", {"seconds": 30.0}), ToolCall("break_down", {})], context, seconds))
    assert 0.005 <= seconds[1] < 20
    assert 0.0 < seconds[0] < 20, "it was cancelled"


@dataclass
class Product:
    name: str
    price: float


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("text", "text"),
        ("", ""),
        (84, "84"),
        (1.5, "1.5"),
        (True, "true"),
        (None, "null"),
        ({"a": [1, "é"]}, '{"a": [1, "é"]}'),
        ([1, None], "[1, null]"),
        ((1, 2), "[1, 2]"),
        ({3, 1}, "[1, 3]"),
        (Product("hat", 3.5), '{"name": "hat", "price": 3.5}'),
        ([Product("hat", 3.5)], '[{"name": "hat", "price": 3.5}]'),
        ("half \ud800", "half \ufffd"),
        (["half \ud800"], '["half \ufffd"]'),
        (ToolResult(observation="seen"), "seen"),
    ],
)
def test_what_a_tool_returns_is_shown(call, value, text):
    async def quick():
        return value

    def slow():
        return value

    for tool in (make(quick), make(slow)):
        result = call(tool)
        assert (result.observation, result.error) == (text, None)


@pytest.mark.parametrize("value", [object(), {"a": object()}, {(1, 2): 3}, [10**5000], b"bytes", lambda: 1])
def test_what_cannot_be_shown_is_said_in_a_sentence(call, value):
    def f():
        return value

    result = call(make(f))
    assert result.error == "raised"
    assert "cannot be shown as text" in result.observation
    assert "0x" not in result.observation


def test_what_contains_itself_or_is_deep_is_said_in_a_sentence(call):
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in (loop, deep):
        held = [value]
        assert "cannot be shown as text" in call(make(lambda held=held: held.pop(), name="f")).observation


def test_image_reward_and_done_pass_through(call):
    full = ToolResult(observation="x" * 100, image="pixels", reward=0.5, done=True)

    async def look():
        return full

    assert call(make(look)) == full
    cut = call(make(look, max_length=10))
    assert (cut.image, cut.reward, cut.done) == ("pixels", 0.5, True)
    assert cut.observation.startswith("x" * 10 + "\n")


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1"])
def test_a_step_reward_that_is_no_number_is_a_failure_of_the_world(call, reward):
    async def look():
        return ToolResult(observation="", reward=reward)

    with pytest.raises(WorldError, match="finite number"):
        call(make(look))


def test_a_megabyte_is_cut_and_the_cut_is_visible(call):
    def shout() -> str:
        return "a" * 1_000_000

    result = call(make(shout, max_length=100))
    assert result.observation == "a" * 100 + "\n[... cut: 999,900 of 1,000,000 characters left out]"
    assert result.error is None


def test_errors_are_told_without_a_traceback(call):
    def unlucky(kind: str) -> None:
        if kind == "told":
            raise ToolError("the shop is closed")
        if kind == "exit":
            sys.exit(3)
        if kind == "stop":
            raise StopIteration
        if kind == "cancel":
            raise asyncio.CancelledError
        if kind == "mute":
            raise type("Mute", (Exception,), {"__str__": lambda self: 1 / 0})
        raise KeyError("a" * 10_000)

    async def unlucky_too(kind: str) -> None:
        unlucky.__call__(kind)

    for fn in (unlucky, unlucky_too):
        tool = make(fn)
        assert call(tool, kind="told") == ToolResult(observation="the shop is closed", error="raised")
        assert call(tool, kind="exit").observation == "SystemExit: 3"
        assert call(tool, kind="cancel").observation == "CancelledError"
        assert call(tool, kind="mute").observation == "Mute"
        assert call(tool, kind="stop").error == "raised"
        long = call(tool, kind="other")
        assert long.observation.startswith("KeyError: 'aaa")
        assert len(long.observation) < 600
        assert "Traceback" not in long.observation


def test_unknown_tools_and_unreadable_calls_are_told(context):
    async def add(a: int) -> int:
        return a

    tools = {"add": make(add), "subtract": make(add, name="subtract")}
    calls = [
        ToolCall("ad", {"a": 1}),
        ToolCall("add", {}, error="The arguments are not JSON."),
        ToolCall("x" * 1_000_000),
        ToolCall("add", {"a": 1}),
    ]
    near, bad, far, good = asyncio.run(call_tools(tools, calls, context))
    assert near.observation == 'There is no tool "ad". Did you mean "add"? Known tools: add, subtract.'
    assert near.error == "unknown_tool"
    assert bad == ToolResult(observation="The arguments are not JSON.", error="bad_arguments")
    assert far.error == "unknown_tool"
    assert len(far.observation) < 200
    assert good.observation == "1"
    assert asyncio.run(call_tools({}, [ToolCall("a")], context))[0].observation.endswith("There are no tools.")
    assert asyncio.run(call_tools(tools, [], context)) == ()


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_calls_of_one_turn_really_run_together(context, kind):
    # Each waits for the other to arrive: one after the other, they could never finish.
    barrier = threading.Barrier(2)
    arrived = asyncio.Event()
    count = 0

    def meet() -> str:
        barrier.wait(timeout=120)
        return "met"

    async def meet_async() -> str:
        nonlocal count
        count += 1
        if count == 2:
            arrived.set()
        await arrived.wait()
        return "met"

    tool = make(meet if kind == "sync" else meet_async, timeout_s=120)
    results = run_all(context, (tool, {}), (tool, {}))
    assert [result.observation for result in results] == ["met", "met"]


def test_results_come_in_the_order_of_the_calls(context):
    async def wait(turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return turns

    tool = make(wait)
    results = run_all(context, *((tool, {"turns": turns}) for turns in (5, 0, 3)))
    assert [result.observation for result in results] == ["5", "0", "3"]


def test_calls_of_one_stateful_tool_run_in_their_order(context):
    class Log:
        """Log."""

        def __init__(self) -> None:
            self.lines: list[str] = []

        async def __call__(self, line: str) -> list[str]:
            before = list(self.lines)
            await asyncio.sleep(0.01 if line == "a" else 0)
            self.lines = [*before, line]
            return self.lines

    log = Tool(Log, stateful=True)
    results = run_all(context, (log, {"line": "a"}), (log, {"line": "b"}), (log, {"line": "c"}))
    assert results[-1].observation == '["a", "b", "c"]'


def test_a_thousand_calls_in_one_turn_do_not_start_a_thousand_threads(context):
    def block() -> int:
        time.sleep(0.001)
        return threading.active_count()

    tool = make(block)
    results = run_all(context, *((tool, {}) for _ in range(1_000)))
    assert len(results) == 1_000
    assert max(int(result.observation) for result in results) < 200


def test_sync_tools_do_not_block_the_loop(context):
    release = threading.Event()

    def block() -> str:
        return "free" if release.wait(timeout=120) else "stuck"

    async def main() -> ToolResult:
        task = asyncio.create_task(call_tools({"block": make(block)}, [ToolCall("block")], context))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        release.set()  # reached only if the loop goes on while the tool waits
        return (await task)[0]

    assert asyncio.run(main()).observation == "free"


def test_an_async_tool_that_holds_up_the_loop_is_named(call, monkeypatch, caplog):
    monkeypatch.setattr(stalls, "LOOK_S", 0.01)
    monkeypatch.setattr(definition, "stalls", stalls.StallWatch())

    async def slow() -> str:
        await asyncio.sleep(0)
        until = time.monotonic() + 60
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)  # noqa: ASYNC251  what the test is about
        return "late"

    assert call(make(slow)).observation == "late"
    assert caplog.messages[0].startswith("tool 'slow' has held up the event loop for ")


@pytest.mark.parametrize("kind", ["awaits", "loops", "sleeps", "returns a coroutine"])
def test_a_call_that_hangs_is_stopped_at_its_deadline(call, kind):
    async def awaits() -> None:
        await asyncio.Event().wait()

    def loops() -> None:
        while True:
            pass

    def sleeps() -> None:
        threading.Event().wait(timeout=5)

    def returns() -> Any:
        return awaits()

    fn = {"awaits": awaits, "loops": loops, "sleeps": sleeps, "returns a coroutine": returns}[kind]
    result = call(make(fn, name="hang", timeout_s=0.1))
    assert result == ToolResult(observation="hang did not finish within 0.1 s and was stopped.", error="timeout")


def test_a_thread_that_was_left_behind_ends_and_is_not_used_again(call):
    seen: list[threading.Thread] = []

    def loops() -> None:
        seen.append(threading.current_thread())
        while True:
            pass

    def quick() -> str:
        seen.append(threading.current_thread())
        return "quick"

    assert call(make(loops, timeout_s=0.1)).error == "timeout"
    assert call(make(quick)).observation == "quick"
    assert seen[0] is not seen[1]
    seen[0].join(timeout=120)
    assert not seen[0].is_alive()


def test_idle_threads_are_used_again(call):
    names = [call(make(lambda: threading.get_ident(), name="who")).observation for _ in range(5)]
    assert len(set(names)) < 5


def test_idle_threads_end(monkeypatch):
    monkeypatch.setattr(threads_module, "IDLE_S", 0.01)
    pool = threads_module.ThreadPool()
    thread = asyncio.run(pool.run(threading.current_thread))
    thread.join(timeout=120)
    assert not thread.is_alive()
    assert asyncio.run(pool.run(lambda: 5)) == 5


def test_a_hanging_thread_does_not_hold_up_the_end_of_the_interpreter():
    code = """
import asyncio, time
from agentfly.tools import Tool, Context, call_tools
from agentfly.types import Task, ToolCall, Trajectory
task = Task("t", ())
hang = Tool(lambda: time.sleep(1000), name="hang", description="d", timeout_s=0.05)
print(asyncio.run(call_tools({"hang": hang}, [ToolCall("hang")], Context(task, Trajectory("c", task))))[0].error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=800, check=True)
    assert (done.stdout.strip(), done.stderr) == ("timeout", "")


def test_a_failure_of_the_world_passes_after_the_siblings_are_cancelled(context):
    cancelled = []

    async def sibling() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cancelled.append(True)

    async def broken() -> None:
        await asyncio.sleep(0)
        raise WorldError("the backend is gone")

    with pytest.raises(WorldError, match="the backend is gone"):
        run_all(context, (make(sibling), {}), (make(broken), {}), (make(sibling, name="other"), {}))
    assert cancelled == [True, True]


def test_a_failure_of_the_world_passes_from_threads_and_groups_too(call):
    def in_thread() -> None:
        raise WorldError("thread")

    async def in_group() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fails())

    async def fails() -> None:
        raise WorldError("group")

    for fn, said in ((in_thread, "thread"), (in_group, "group")):
        with pytest.raises(WorldError, match=said):
            call(make(fn))


def test_a_missing_dataset_field_is_a_failure_of_the_world(call):
    def f(colour: str) -> str:
        return colour

    with pytest.raises(WorldError, match="'colour'"):
        call(make(f, inject=("colour",)))


@pytest.mark.parametrize("num_calls", [1, 3])
@pytest.mark.parametrize("kind", ["async", "sync"])
def test_cancelling_a_turn_cancels_its_calls_and_the_loop_can_close(context, num_calls, kind):
    started = threading.Semaphore(0)
    release = threading.Event()

    async def wait_async() -> None:
        started.release()
        await asyncio.Event().wait()

    def wait_sync() -> None:
        started.release()
        release.wait(timeout=120)

    tool = make(wait_async if kind == "async" else wait_sync, name="wait")

    async def main() -> None:
        task = asyncio.create_task(call_tools({"wait": tool}, [ToolCall("wait")] * num_calls, context))
        for _ in range(num_calls):
            assert await asyncio.to_thread(started.acquire, timeout=120)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())  # closes the loop while the threads still wait
    release.set()


def test_context_variables_reach_a_thread(call):
    import contextvars

    who = contextvars.ContextVar("who", default="nobody")

    def ask() -> str:
        return who.get()

    who.set("the chain")
    assert call(make(ask)).observation == "the chain"


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ({"observation": "seen"}, ToolResult(observation="seen")),
        (
            {"observation": "won", "reward": 1, "done": True, "info": {"secret": 7}},
            ToolResult(observation="won", reward=1.0, done=True),
        ),
        ({"observation": {"price": 3}, "reward": None}, ToolResult(observation='{"price": 3}')),
        ({"observation": None}, ToolResult(observation="")),
        ({"observation": "x" * 100}, ToolResult(observation=cut("x" * 100, 20))),
        ({"observed": "seen"}, ToolResult(observation='{"observed": "seen"}')),
    ],
)
@pytest.mark.parametrize("is_async", [False, True])
def test_a_dict_with_an_observation_is_a_result_and_the_model_reads_the_observation(call, value, result, is_async) -> None:
    def plain() -> Any:
        """Look."""
        return value

    async def slow() -> Any:
        """Look."""
        return value

    assert call(Tool(slow if is_async else plain, max_length=20)) == result


def test_a_step_reward_in_a_dict_must_be_a_number(call) -> None:
    def broken() -> Any:
        """Look."""
        return {"observation": "x", "reward": float("nan")}

    with pytest.raises(WorldError, match="step reward nan"):
        call(Tool(broken))
