"""The profile of a run: a line, a table and a file, made of the metrics of the steps."""

from __future__ import annotations

import asyncio
import io
import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from agentfly.runs import RunStore
from agentfly.watch.metrics import METRICS
from agentfly.watch.profile import BESIDE, PARTS, profile_of, show_profile
from agentfly.watch.stack_sampler import LOOP, WAITING, StackSampler


def step(**changes: float) -> dict[str, float]:
    """One second: 0.4 decode, 0.3 learn, 0.2 tools, 0.06 host, 0.04 idle; `changes` come on top."""
    parts = {"decode": 0.4, "learn": 0.3, "tools": 0.2, "host": 0.06, "idle": 0.04}
    for name, seconds in changes.items():
        parts[name] = parts.get(name, 0.0) + seconds
    return {PARTS[name]: value for name, value in parts.items()} | {
        "time/step_s": sum(parts.values()),
        "device/busy_share": 0.7,
        "time/overlap_s": 0.1,
    }


def test_the_line_names_the_large_parts_first() -> None:
    profile = profile_of({number: step() for number in range(1, 5)})
    assert profile is not None
    assert profile.line == "time: 40 % decode, 30 % learn, 20 % tools, 6 % host, 4 % other; device busy 70 %"
    assert profile.steps == 4
    assert math.isclose(sum(profile.parts.values()), profile.seconds)


def test_a_run_without_timed_steps_has_no_profile() -> None:
    assert profile_of({}) is None
    assert profile_of({0: {"validation/success": 1.0}}) is None


def test_time_that_no_part_explains_is_shown() -> None:
    profile = profile_of({1: {"time/step_s": 2.0, "time/learn_s": 0.5, "time/host_s": math.nan}})
    assert profile is not None
    assert profile.parts == {"other": 1.5, "learn": 0.5}
    assert profile.line == "time: 75 % other, 25 % learn"


def test_slow_steps_are_named_with_their_reason() -> None:
    history = {number: step() for number in range(1, 20)}
    history[9] = step(prefill=1.9) | {"time/stalls_s": 1.9}
    history[15] = step(tools=3.0)
    history[17] = step(learn=0.3)  # 1.3 times the median
    profile = profile_of(history)
    assert profile is not None
    assert [(each.step, round(each.seconds, 3), round(each.times, 3), each.reason) for each in profile.slowest] == [
        (15, 4.0, 4.0, "tools took 3.0 s more than usual"),
        (9, 2.9, 2.9, "prefill took 1.9 s more than usual, 1.9 s lost in stalls"),
    ]


def test_the_table_has_seconds_and_shares_and_adds_up() -> None:
    history = {number: step() | {"time/tool_s/search": 0.25} for number in range(1, 4)}
    history[3] = step(host=2.0)
    profile = profile_of(history)
    assert profile is not None
    file = io.StringIO()
    show_profile(Console(file=file, width=100), profile, [("agentfly/[x].py:f", 0.5)])
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for line in file.getvalue().splitlines()
        if len(cells := line.strip("│").split("│")) == 4
    }
    assert rows["decode"] == ["1.20", "24.0 %", "400.0 ms"]
    assert rows["host"] == ["2.18", "43.6 %", "726.7 ms"]
    assert rows["all"] == ["5.00", "100.0 %", "1.7 s"]
    assert rows["sampled while learning"] == ["0.30", "6.0 %", "100.0 ms"]
    shares = [float(cells[1].split()[0]) for name, cells in rows.items() if name in PARTS]
    assert abs(sum(shares) - 100) < 0.5
    assert "step 3: 3.0 s, 3.0x the median: host took 2.0 s more than usual" in file.getvalue()
    assert "tool search: 250.0 ms a call" in file.getvalue()
    assert "50 % of the event loop's busy time: agentfly/[x].py:f" in file.getvalue()
    stored = json.loads(json.dumps(profile.to_json(), allow_nan=False))
    assert stored["parts"]["host"]["share"] == rows_share(profile.parts["host"], profile.seconds)
    assert stored["slowest_steps"][0]["step"] == 3
    assert stored["tool_s"] == {"search": 0.25}


def rows_share(seconds: float, total: float) -> float:
    return 100 * seconds / total / 100


def test_every_part_is_a_metric() -> None:
    assert {*PARTS.values(), *BESIDE.values()} <= set(METRICS)


def test_metrics_are_read_back_by_step(tmp_path: Path) -> None:
    with RunStore(tmp_path / "run.db") as store:
        store.add_metrics(1, {"a": 1.0})
        store.add_metrics(2, {"a": 2.0, "b": math.nan})
        store.add_metrics(2, {"c": 3.0})
        found = store.metrics_by_step()
    assert list(found) == [1, 2]
    assert found[2]["a"] == 2.0
    assert math.isnan(found[2]["b"])
    assert found[2]["c"] == 3.0


def test_the_sampler_finds_the_function_that_takes_the_time(tmp_path: Path) -> None:
    def work(sampler: Any) -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until and sampler.stacks.total() < 20:
            sum(range(1000))

    async def main(sampler: Any) -> None:
        work(sampler)

    sampler = StackSampler(0.001)
    with sampler:
        asyncio.run(main(sampler))
    taken = sampler.stacks.total()
    assert taken >= 20
    ((name, share), *_) = sampler.busiest(1)
    assert "test_profile.py:work" in name
    assert share > 0.5
    sampler.write(tmp_path / "profile.txt")
    lines = (tmp_path / "profile.txt").read_text().splitlines()
    assert sum(int(line.rpartition(" ")[2]) for line in lines) == taken
    assert any("test_profile.py:main;test_profile.py:work" in line for line in lines)
    time.sleep(0.02)
    assert sampler.stacks.total() == taken


def test_waiting_and_starting_are_not_busy_time() -> None:
    sampler = StackSampler()
    loop = ("agentfly/cli/commands.py:main", "base_events.py:_run_once")
    sampler.stacks.update(
        {
            (*loop, "agentfly/training/loop.py:_step", "agentfly/runs/codec.py:encode", "encoder.py:default"): 30,
            (*loop, "agentfly/render/hf.py:extend"): 10,
            (*loop, "selectors.py:select"): 500,
            ("agentfly/cli/commands.py:main", "agentfly/engines/local/load.py:_load"): 900,
        }
    )
    assert sampler.busiest() == [("agentfly/runs/codec.py:encode", 0.75), ("agentfly/render/hf.py:extend", 0.25)]


def test_an_event_loop_that_waits_is_seen_waiting() -> None:
    async def wait(sampler: StackSampler) -> None:
        until = time.monotonic() + 30
        while time.monotonic() < until and not any(stack[-1] == "selectors.py:select" for stack in list(sampler.stacks)):
            await asyncio.sleep(0.02)

    with StackSampler(0.001) as sampler:
        asyncio.run(wait(sampler))
    assert any(LOOP in stack and stack[-1] == WAITING for stack in sampler.stacks)
