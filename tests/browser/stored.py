"""Runs on the disk for the browser tests: one with everything a page shows, two seeds of another, one with hostile texts."""

from __future__ import annotations

import math
import struct
import time
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from agentfly.pocket import model_dir
from agentfly.runs import RunStore
from agentfly.runs.lock import process_mark
from agentfly.types import Completion, Message, Outcome, Task, TokenRecord, ToolCall, ToolResult, Trajectory, Turn

START = 1_790_000_000.0
CONFIG = """algorithm = "{algorithm}"
seed = {seed}
[agent]
kind = "react"
model = "pocket"
tools = ["add", "subtract", "multiply"]
reward = "exact_match"
max_turns = 4
[data]
train = "arithmetic"
train_count = 40
validation_count = 4
[rollout]
num_tasks = 4
num_chains = 4
[train]
steps = {steps}
lr = {lr}
"""
PAYLOADS = (
    "<img src=x onerror=\"window.pwned='img'\">",
    "</script><script>window.pwned='script'</script>",
    "<svg onload=\"window.pwned='svg'\"><a href=\"javascript:window.pwned='link'\">click</a>",
    '<iframe src="http://evil.example/frame"></iframe><link rel=stylesheet href=http://evil.example/x.css>',
    "[click](javascript:alert(1)) ![x](http://evil.example/pixel.png) http://evil.example/",
    "\x1b[31mred\x1b]8;;http://evil.example/\x07link\x1b]8;;\x07 \u202egnp.exe \u200bzero",
)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_dir() / "tokenizer.json"))


def encode(text: str) -> list[int]:
    return list(_encode(text))


@cache
def _encode(text: str) -> tuple[int, ...]:
    return tuple(tokenizer().encode(text, add_special_tokens=False).ids)


def make_turn(context: str, reply: str, *, restarts: bool, call: ToolCall | None, result: str, version: int, at: float) -> Turn:
    ids = encode(reply)
    logprobs = [-0.05 - 0.4 * (place % 5) for place in range(len(ids))]
    completion = Completion(text=reply, token_ids=ids, logprobs=logprobs, versions=[version] * len(ids))
    calls = () if call is None else (call,)
    results = () if call is None else (ToolResult(observation=result),)
    tools_s = 0.0 if call is None else 0.2
    return Turn(encode(context), restarts, completion, calls, results, sampled_s=0.6, tools_s=tools_s, began_s=at)


def make_chain(
    name: str,
    task: str,
    chain: int,
    reward: float | None,
    *,
    version: int = 0,
    outcome: Outcome = Outcome.FINISHED,
    error: str | None = None,
    say: str = "What is 12 times 7, plus 5?",
    first: str = "Thought: multiply first",
    answer: str = "89",
    result: str = "84",
    tool: str = "multiply",
    words: int = 0,
    source: str | None = None,
) -> Trajectory:
    """A chain of two turns. `words` makes the last reply longer."""
    call = ToolCall(tool, {"a": 12, "b": 7})
    replies = [f"{first}\nAction: {tool}", f"Thought: done{' and so on' * words}\nAnswer: {answer}"]
    turns = [
        make_turn(f"user\n{say}\nassistant\n", replies[0], restarts=True, call=call, result=result, version=version, at=0.1),
        make_turn(f"\nObservation: {result}\n", replies[1], restarts=False, call=None, result="", version=version, at=1.0),
    ]
    messages = [
        Message("system", "You solve tasks with tools."),
        Message("user", say),
        Message("assistant", replies[0], (call,)),
        Message("tool", result, name=tool),
        Message("assistant", replies[1]),
    ]
    fields = {"question": say, "answer": "89"} | ({} if source is None else {"source": source})
    components = {} if reward is None else {"exact_match": reward}
    made = Trajectory(
        name, Task(task, (messages[1],), fields), chain, messages, turns, outcome, error, answer,
        reward, components, seconds=1.8,
    )  # fmt: skip
    made.started = START + chain
    return made


def step_chains(step: int, *, tasks: int = 4, siblings: int = 4, words: int = 0) -> list[Trajectory]:
    """Groups with spread, but the last one: its chains are all wrong, so it teaches nothing."""
    found = []
    for task in range(tasks):
        for chain in range(siblings):
            right = task < tasks - 1 and (chain + step + task) % 2 == 0
            found.append(
                make_chain(
                    f"t{step}-{task}-{chain}", f"task-{task}", chain, 1.0 if right else 0.0, version=step - 1,
                    answer="89" if right else str(80 + chain), words=words,
                    first="Thought: multiply first" if right else "Thought: add first",
                )
            )  # fmt: skip
    return found


def records(chains: list[Trajectory]) -> list[TokenRecord]:
    """What the learner adds: advantages, its log-probs and entropies."""
    found = []
    for each in chains:
        count = each.num_sampled
        series = {
            "trainer_logprob": ("f", struct.pack(f"<{count}f", *(-0.06 - 0.4 * (place % 5) for place in range(count)))),
            "entropy": ("f", struct.pack(f"<{count}f", *(abs(math.sin(place)) for place in range(count)))),
        }
        teaches = each.task.id != "task-3"
        found.append(TokenRecord(each.id, (1.0 if each.reward else -1.0) * teaches, count * teaches, series))
    return found


def add_step(store: RunStore, step: int, *, words: int = 0, lift: float = 0.0) -> None:
    chains = step_chains(step, words=words)
    store.set_phase(step, "rollout", START + 10 * step)
    store.add_trajectories(step, "train", chains)
    store.add_tokens(step, records(chains))
    store.add_checks(step, {"logprob_gap": (True, 1e-6 * step, 0.05), "lag": (step != 2, float(step == 2), 0.0)})
    store.add_gauges(
        START + 10 * step, {"resources/house/allocated": 4.0 * step, "resources/house/waiting": 1.0, "chains/running": 8.0}
    )
    store.add_metrics(
        step,
        {
            "reward/mean": 0.2 * step + lift, "rollout/success": 0.2 * step + lift, "rollout/turns": 2.0,
            "train/entropy": 1.0 / step, "train/logprob_gap": 1e-6, "time/step_s": 4.0,
            "time/decode_s": 2.5, "time/learn_s": 1.0, "time/tools_s": 0.5,
            "train/skipped": 0.0,
        },
    )  # fmt: skip


def make_run(
    folder: Path,
    *,
    steps: int = 3,
    algorithm: str = "grpo",
    seed: int = 0,
    lr: str = "2e-4",
    lift: float = 0.0,
    nodes: int = 0,
) -> Path:
    """A finished run of `steps` steps with validations, pools, checks and one failed chain.

    With `nodes`, it ran on so many machines, and calls reached limits of their sandboxes.
    """
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(algorithm=algorithm, seed=seed, steps=steps, lr=lr))
    with RunStore(folder / "run.db") as store:
        about = {"model": "pocket", "world": "arithmetic", "algorithm": algorithm, "seed": seed, "total_steps": steps}
        store.set_meta({"status": "finished", "kind": "train", "started": START, **about})
        for step in range(1, steps + 1):
            add_step(store, step, words=5 * step, lift=lift)
            held = [
                make_chain(f"v{step}-{task}-0", f"held-{task}", 0, float(task < step), source=("easy", "hard")[task // 2])
                for task in range(4)
            ]
            store.add_trajectories(step, "validation", held)
            store.add_metrics(step, {"validation/success": step / 3, "validation/reward": step / 3})
        broken = make_chain("t1-9-0", "task-9", 0, None, outcome=Outcome.WORLD_FAILURE, error="WorldError: the house fell down")
        store.add_trajectories(1, "train", [broken])
        store.add_event(START + 12, 1, "environment_failed", "house", {"count": 1})
        if nodes:
            add_nodes(store, steps, nodes)
            store.add_event(START + 13, 2, "sandbox_limit", "t2-0-0", {"limit": "memory", "tool": "python", "count": 2})
            store.add_event(START + 14, 3, "sandbox_limit", "t3-0-1", {"limit": "cpu", "tool": "python", "count": 1})
    return folder


def add_nodes(store: RunStore, steps: int, nodes: int) -> None:
    """What a run over several machines logs."""
    for step in range(1, steps + 1):
        figures = {"samplers": 1.0, "env_hosts": 2.0, "chains": 4.0 * step, "cpus": 16.0}
        store.add_metrics(
            step,
            {f"cluster/10.0.0.{node}/{name}": node * value for node in range(1, nodes + 1) for name, value in figures.items()},
        )


def make_hostile_run(folder: Path) -> Path:
    """Every text that a model, a tool, a task or a config can write holds a payload."""
    folder.mkdir(parents=True)
    everything = " ".join(PAYLOADS)
    (folder / "config.toml").write_text(CONFIG.format(algorithm="grpo", seed=0, steps=2, lr="1e-4"))
    with RunStore(folder / "run.db") as store:
        about = {"model": PAYLOADS[0], "world": PAYLOADS[1], "algorithm": PAYLOADS[2], "total_steps": 2}
        store.set_meta({"status": "stopped", "error": everything, **about})
        chains = [
            make_chain(
                f"{PAYLOADS[0]}-{chain}", PAYLOADS[1], chain, float(chain), say=everything, first=everything + f" {chain}",
                answer=everything, result=everything, tool=PAYLOADS[2], error=everything,
            )
            for chain in range(2)
        ]  # fmt: skip
        store.add_trajectories(1, "train", chains)
        store.add_tokens(1, records(chains))
        store.add_metrics(1, {"reward/mean": 0.5, f"rollout/tool_calls/{PAYLOADS[0]}": 1.0})
        store.add_checks(1, {PAYLOADS[0]: (False, 1.0, 0.0)})
        store.add_gauges(START, {f"resources/{PAYLOADS[0]}/allocated": 1.0})
        store.add_event(START, 1, PAYLOADS[2], everything, {"text": everything})
        store.set_live("leases", START, [{"chain": everything, "kinds": [PAYLOADS[0]]}])
    return folder


def make_growing_run(folder: Path) -> RunStore:
    """A run that this process is writing; the caller adds steps and closes the store."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(CONFIG.format(algorithm="grpo", seed=0, steps=5, lr="1e-4"))
    store = RunStore(folder / "run.db")
    about = {"model": "pocket", "world": "arithmetic", "algorithm": "grpo", "total_steps": 5}
    store.set_meta({"status": "running", "heartbeat": time.time(), "started": time.time(), **process_mark(), **about})
    add_step(store, 1)
    return store
