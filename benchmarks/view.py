"""How long the queries and the HTTP answers of `agentfly view` take over a large run, and what recording a run costs.

    python benchmarks/view.py --chains 100000 [--keep DIR] [--json PATH]      makes such a run, then times everything
    python benchmarks/view.py --chains 1000000 --times 10                     the same for a million, ten times 100,000
    python benchmarks/view.py --run runs/large                                times the queries over a run that exists
    python benchmarks/view.py --writer                                        what a chain costs the training thread

No model runs: the chains have made-up texts of several turns with tool calls, ids, log-probs and times, and are written as
training writes them, with metrics, advantages, trainer log-probs, gauges, events and checks; one chain has 25,000 tokens. A
figure is the median of `--repeats` calls; `first_ms` is that of a new connection, `cpu_ms` the CPU time, which other programs
change little. The CPU time of an answer is that of the server and of the client that asks it, with JSON and compression.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import sqlite3
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from agentfly.errors import QueryTimeout
from agentfly.runs import ChainFilter, RunReader, RunStore, StoreWriter, find_runs
from agentfly.runs.codec import body_text
from agentfly.runs.filters import SORTS
from agentfly.runs.recorder import Recorder
from agentfly.runs.schema import INDEX_SUMMARIES, INDEXES, INSERT_TEXT
from agentfly.types import Completion, Message, Outcome, Task, TokenRecord, ToolCall, ToolResult, Trajectory, Turn
from agentfly.view.app import Dashboard

TEXT = """
the answer of this sum is first then multiply add search result page found value number table query city river year model
because so we need to check again total price item list open read file print error line function return loop test pass
"""
WORDS = TEXT.split()
TOOLS = ("search", "python", "calculator", "read_page", "submit")
OUTCOMES = (
    [Outcome.FINISHED] * 88 + [Outcome.MAX_TURNS] * 5 + [Outcome.MAX_TOKENS] * 4 + [Outcome.NO_TOOL_CALL] * 2
    + [Outcome.WORLD_FAILURE]
)  # fmt: skip
TEMPLATES = 400
GROUPS, SIBLINGS = 64, 8
METRICS = [f"{room}/{name}" for room in ("train", "rollout", "time", "resources/browser") for name in "abcdefghij"]


def make_template(rng: random.Random, number: int, turns: int | None = None, tokens: int = 60) -> Trajectory:
    """A chain of 1 to 5 turns, or of `turns`, with about 60 sampled tokens each."""

    def text(count: int) -> str:
        return " ".join(rng.choices(WORDS, k=count))

    task = Task(f"task-{number}", (Message("user", text(30)),), {"answer": text(2)})
    chain = Trajectory(f"template-{number}", task, messages=[Message("system", text(25)), Message("user", text(30))])
    chain.started, chain.outcome = 1.7e9, rng.choice(OUTCOMES)
    for index in range(turns or rng.choice((1, 2, 2, 3, 3, 4, 5))):
        count = rng.randrange(tokens // 2, 3 * tokens // 2)
        reply = Completion(
            text=text(count),
            token_ids=[rng.randrange(30_000) for _ in range(count)],
            logprobs=[struct.unpack("f", struct.pack("f", -rng.expovariate(3.0)))[0] for _ in range(count)],
            versions=[0] * count,
        )
        call = ToolCall(rng.choice(TOOLS), {"query": text(4)})
        error = "raised" if rng.random() < 0.05 else None
        result = ToolResult(observation=text(40), error=error)  # type: ignore[arg-type]
        seconds = rng.lognormvariate(-2.0, 1.0)
        context = [rng.randrange(30_000) for _ in range(60)]
        chain.turns.append(
            Turn(context, index == 0, reply, (call,), (result,), 0.0, 0.4, seconds, began_s=0.5 * index, calls_s=[seconds])
        )
        chain.messages += [Message("assistant", reply.text, (call,)), Message("tool", result.observation)]
    failed = chain.outcome is Outcome.WORLD_FAILURE
    chain.error = "WorldError: the browser is gone" if failed else None
    chain.prediction, chain.seconds, chain.waited_s = text(12), 0.6 * len(chain.turns), 0.1
    return chain


def make_run(folder: Path, num_chains: int, seed: int = 0) -> float:
    """Write a run of so many chains. Returns the seconds that it took."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text('algorithm = "grpo"\n[agent]\nmodel = "made-up"\n[train]\nsteps = 1000\n')
    templates = [make_template(rng, number) for number in range(TEMPLATES)]
    started = time.perf_counter()
    with RunStore(folder / "run.db") as store, StoreWriter(store) as writer:
        recorder = Recorder(writer)
        with recorder.running(kind="train", model="made-up", world="browser", algorithm="grpo", seed=seed, total_steps=1000):
            step = done = 0
            while done < num_chains:
                step = recorder.step = step + 1
                count = min(GROUPS * SIBLINGS, num_chains - done)
                chains = [_chain(rng, templates, step, place, num_chains) for place in range(count)]
                if step == 1:
                    chains[0] = _chain(rng, [make_template(rng, 0, 25, 1000)], step, 0, num_chains)
                writer.put_trajectories(step, "train", chains, replace=True)
                writer.add_tokens(step, [_record(rng, chain) for chain in chains])
                mean = statistics.fmean(chain.total_reward for chain in chains)
                writer.add_metrics(step, {"reward/mean": mean, **{name: rng.random() for name in METRICS}})
                recorder.checks(step, {"logprob_gap": (True, 1e-6 * rng.random(), 0.05), "lag": (True, 0.0, 0.0)})
                recorder.look({f"resources/browser/{name}": rng.randrange(50) for name in ("allocated", "idle", "waiting")})
                recorder.span("rollout")
                recorder.end_step(step)
                done += count
                if step % 8 == 0:
                    writer.flush()
        writer.flush()
    return time.perf_counter() - started


def multiply(folder: Path, times: int) -> None:
    """Append the chains of a run to itself, as those of later steps: a much larger run in a fraction of the time."""
    with closing(sqlite3.connect(folder / "run.db")) as db, db:
        chains, steps = db.execute("SELECT max(key), max(step) FROM trajectories").fetchone()
        indexes = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'index' AND sql IS NOT NULL")]
        for name in indexes:
            db.execute(f"DROP INDEX {name}")
        for number in range(1, times):
            keys, later = number * chains, number * steps
            new_id = f"'t' || (step + {later}) || substr(id, instr(id, '-'))"
            changed = {"key": f"key + {keys}", "step": f"step + {later}", "id": new_id}
            for table, last in (
                ("trajectories", f"key <= {chains}"), ("bodies", f"key <= {chains}"), ("calls", f"key <= {chains}"),
                ("metrics", f"step BETWEEN 0 AND {steps}"), ("steps", f"step BETWEEN 0 AND {steps}"),
                ("step_stats", f"step BETWEEN 0 AND {steps}"), ("tools", f"step BETWEEN 0 AND {steps}"),
                ("checks", f"step BETWEEN 0 AND {steps}"),
            ):  # fmt: skip
                columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
                values = ", ".join(changed.get(name, name) for name in columns)
                db.execute(f"INSERT INTO {table} ({', '.join(columns)}) SELECT {values} FROM {table} WHERE {last}")
            db.commit()
        db.execute(INDEX_SUMMARIES, (chains + 1,))
        texts = [(key, body_text(body)) for key, body in db.execute("SELECT key, body FROM bodies WHERE key <= ?", (chains,))]
        for number in range(1, times):
            db.executemany(INSERT_TEXT, ((number * chains + key, text) for key, text in texts))
            db.commit()
        for statement in filter(None, map(str.strip, INDEXES.split(";"))):
            db.execute(statement)
        db.execute("PRAGMA analysis_limit = 400")
        db.execute("ANALYZE")


def _chain(rng: random.Random, templates: list[Trajectory], step: int, place: int, num_chains: int) -> Trajectory:
    group, number = divmod(place, SIBLINGS)
    template = templates[rng.randrange(len(templates))]
    task = replace(template.task, id=f"task-{(step * GROUPS + group) % max(GROUPS, num_chains // 200)}")
    reward = None if template.outcome is Outcome.WORLD_FAILURE else rng.choice((0.0, 0.1, 0.5, 1.0, 1.0))
    return replace(
        template, id=f"t{step}-{group}-{number}", task=task, chain=number, reward=reward, started=1.7e9 + step,
        components={} if reward is None else {"exact_match": reward},
    )  # fmt: skip


def _record(rng: random.Random, chain: Trajectory) -> TokenRecord:
    count = chain.num_sampled
    series = {"trainer_logprob": ("f", bytes(4 * count)), "entropy": ("e", bytes(2 * count))}
    return TokenRecord(chain.id, rng.gauss(0.0, 1.0), count, series)


def queries(reader: RunReader) -> dict[str, Callable[[], Any]]:
    """Every query of the views, by name."""
    last = reader.last_step() or 1
    names = reader.metric_names()
    row = reader.page(limit=1)[0][0]
    longest = reader.page(sort="-tokens", limit=1)[0][0]
    far = int(0.9 * reader.num_chains())
    train = ChainFilter(split="train")
    lists: dict[str, tuple[ChainFilter, str, int]] = {
        "newest 100": (train, "-added", 0),
        "one step": (ChainFilter(step=last // 2), "-added", 0),
        "one step by reward": (ChainFilter(step=last // 2), "-reward", 0),
        "steps 10 to 20": (ChainFilter(step_low=10, step_high=20), "-added", 0),
        "split, none": (ChainFilter(split="validation"), "-added", 0),
        "one task": (ChainFilter(task_id=row.task_id), "-added", 0),
        "outcome": (ChainFilter(outcome="max_turns"), "-added", 0),
        "outcome, rare": (ChainFilter(outcome="world_failure"), "-added", 0),
        "outcome, none": (ChainFilter(outcome="tool_error"), "-added", 0),
        "outcome + reward": (ChainFilter(outcome="max_turns", reward_low=0.5), "-added", 0),
        "outcome + reward, none": (ChainFilter(outcome="world_failure", reward_low=0.5), "-seconds", 0),
        "tool": (ChainFilter(tool="search", split="train"), "-added", 0),
        "tool by reward": (ChainFilter(tool="search"), "-reward", 0),
        "tool, unknown": (ChainFilter(tool="nothing"), "-added", 0),
        "tool + outcome + reward": (ChainFilter(tool="python", outcome="max_turns", reward_low=1.0), "-tokens", 0),
        "reward range": (ChainFilter(reward_low=0.4, reward_below=0.6), "-added", 0),
        "reward range, none": (ChainFilter(reward_low=0.2, reward_below=0.3), "-added", 0),
        "min tokens": (ChainFilter(min_tokens=350), "-added", 0),
        "min tokens + max turns, none": (ChainFilter(min_tokens=350, max_turns=1), "-added", 0),
        "untrained": (ChainFilter(trained=False, split="train"), "-added", 0),
        "failed": (ChainFilter(failed=True), "-added", 0),
        "text, common": (ChainFilter(text="multiply"), "-added", 0),
        "text, common, by reward": (ChainFilter(text="multiply"), "-reward", 0),
        "text, two words": (ChainFilter(text="river city year"), "-added", 0),
        "text, absent": (ChainFilter(text="zebra"), "-added", 0),
        "text, absent, of common trigrams": (ChainFilter(text="valuerivercity"), "-added", 0),
        "text, two characters": (ChainFilter(text="zq"), "-added", 0),
        "text + outcome + tool": (ChainFilter(text="multiply", outcome="max_turns", tool="python"), "-added", 0),
        "text in bodies, common": (ChainFilter(text="river city", in_body=True), "-added", 0),
        "text in bodies, rare": (ChainFilter(text="river city year model", in_body=True), "-added", 0),
        "text in bodies, absent": (ChainFilter(text="zebra", in_body=True), "-added", 0),
        "text in bodies, absent, of common words": (ChainFilter(text="river river river", in_body=True), "-added", 0),
        "text in bodies, two characters (2 s)": (ChainFilter(text="zq", in_body=True), "-added", 0),
        **{f"sort by {sort}": (train, sort, 0) for name in SORTS for sort in (name, f"-{name}")},
        **{f"row {far:,} by {sort}": (ChainFilter(), sort, far) for name in SORTS for sort in (name, f"-{name}")},
        **{f"row {far:,} by {sort}, train": (train, sort, far) for name in SORTS for sort in (f"-{name}",)},
        **{f"row {far // 2:,} by {sort}, finished": (ChainFilter(outcome="finished"), sort, far // 2)
           for sort in ("-added", "-reward", "-tokens")},
        f"row {far // 4:,} of a tool": (ChainFilter(tool="search"), "-added", far // 4),
        f"row {far // 4:,} of a tool by reward": (ChainFilter(tool="search"), "-reward", far // 4),
    }  # fmt: skip
    pages = {
        name: lambda chosen=chosen, sort=sort, offset=offset: reader.page(chosen, sort, None, 100, offset)
        for name, (chosen, sort, offset) in lists.items()
    }
    return pages | {
        "meta, state": lambda: (reader.meta(), reader.state()),
        "metric names": reader.metric_names,
        "series of 20 metrics": lambda: reader.series(names[:20]),
        "count of all": lambda: reader.count(),
        "count outcome + reward": lambda: reader.count(ChainFilter(outcome="finished", reward_low=0.5)),
        "count tool": lambda: reader.count(ChainFilter(tool="search")),
        "count text": lambda: reader.count(ChainFilter(text="multiply")),
        "count text in bodies (2 s)": lambda: reader.count(ChainFilter(text="river city", in_body=True)),
        "histogram of all": lambda: reader.histogram(),
        "histogram of train": lambda: reader.histogram(train),
        "histogram of an outcome": lambda: reader.histogram(ChainFilter(outcome="finished", min_tokens=100)),
        "histogram of a step": lambda: reader.histogram(ChainFilter(step=last // 2)),
        "histogram with tool": lambda: reader.histogram(ChainFilter(tool="python")),
        "histogram with text": lambda: reader.histogram(ChainFilter(text="multiply")),
        "histogram of untrained": lambda: reader.histogram(ChainFilter(trained=False)),
        "outcomes by step": lambda: reader.outcomes_by_step(),
        "groups of a step": lambda: reader.groups(last // 2),
        "one group": lambda: reader.group(row.step, row.task_id),
        "one chain": lambda: reader.trajectory(row.id),
        "chain of 25,000 tokens": lambda: (reader.trajectory(longest.id), reader.token_series(longest.id)),
        "token series": lambda: reader.token_series(row.id),
        "gauges": lambda: reader.gauges(),
        "tools of the run": lambda: reader.tools(),
        "checks": lambda: reader.checks(),
        "newest events": lambda: reader.newest_events(),
        "values of a filter": lambda: (reader.values("outcome"), reader.values("split"), reader.tool_names()),
        "data version": reader.data_version,
        "catalog": lambda: find_runs(reader.path.parent),
    }


def answers(reader: RunReader) -> dict[str, str]:
    """The addresses that the pages ask of one run, by name."""
    last, far = reader.last_step() or 1, int(0.9 * reader.num_chains())
    row, longest = reader.page(limit=1)[0][0], reader.page(sort="-tokens", limit=1)[0][0]
    metrics = ",".join(reader.metric_names()[:20])
    filters: dict[str, dict[str, Any]] = {
        "all": {}, "step": {"step": last // 2}, "split": {"split": "train"}, "task": {"task": row.task_id},
        "reward range": {"low": 0.4, "below": 0.6}, "outcome": {"outcome": "max_turns"}, "tool": {"tool": "python"},
        "text": {"q": "multiply"}, "text, absent": {"q": "zebra"}, "min tokens": {"min_tokens": 350},
        "untrained": {"trained": 0}, "outcome, reward, tool": {"outcome": "finished", "low": 0.5, "tool": "search"},
        "step, tool, text": {"step": last // 2, "tool": "search", "q": "river"},
    }  # fmt: skip
    sorts = {
        f"chains from {far:,} by {sort}": {"sort": sort, "offset": far} for sort in ("-added", "-reward", "-tokens", "-turns")
    }
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "run": ("", {}), "series": ("/series", {"names": metrics}), "steps": ("/steps", {}),
        "groups": ("/groups", {"step": last // 2}), "group": ("/group", {"step": row.step, "task": row.task_id}),
        "chain": (f"/chain/{quote(row.id, safe='')}", {}),
        "chain of 25,000 tokens": (f"/chain/{quote(longest.id, safe='')}", {}),
        "tokens": (f"/chain/{quote(row.id, safe='')}/tokens", {}),
        "tokens of 25,000": (f"/chain/{quote(longest.id, safe='')}/tokens", {}),
        "environments": ("/envs", {}), "events": ("/events", {}), "checks": ("/checks", {}), "sources": ("/sources", {}),
        "config": ("/config", {}), "chains with text in bodies": ("/chains", {"q": "river city", "in": "body", "count": 0}),
        **{f"chains: {name}": ("/chains", {**chosen, "count": 0}) for name, chosen in filters.items()},
        **{f"count: {name}": ("/chains", {**chosen, "limit": 1}) for name, chosen in filters.items()},
        **{f"histogram: {name}": ("/histogram", {**chosen, "bins": 40}) for name, chosen in filters.items()},
        **{name: ("/chains", {**chosen, "count": 0}) for name, chosen in sorts.items()},
    }  # fmt: skip
    base = f"/api/runs/{quote(reader.path.parent.name, safe='')}"
    return {"runs": "/api/runs"} | {name: f"{base}{path}?{urlencode(query)}" for name, (path, query) in asked.items()}


async def time_answers(path: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each answer over HTTP: the first, and the medians of `repeats` more, with the bytes that were sent."""
    with RunReader(path) as reader:
        addresses = answers(reader)
    found: dict[str, dict[str, float]] = {}
    async with Dashboard(path.parent, port=0) as dashboard, httpx.AsyncClient(base_url=dashboard.url, timeout=60) as client:
        (await client.get(dashboard.address, follow_redirects=True)).raise_for_status()
        for name, address in addresses.items():
            times = []
            for _ in range(repeats + 1):
                started, cpu = time.perf_counter(), time.process_time()
                answer = await client.get(address)
                times.append((1000 * (time.perf_counter() - started), 1000 * (time.process_time() - cpu)))
                if answer.status_code != 503:  # a query that took longer than 2 s
                    answer.raise_for_status()
            wall, used = (statistics.median(part) for part in zip(*times[1:], strict=True))
            found[name] = {"first_ms": round(times[0][0], 1), "median_ms": round(wall, 1), "cpu_ms": round(used, 1)}
            if answer.status_code == 503:
                found[name]["interrupted"] = 1
    return found


def time_queries(path: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each query: the first call on a new connection, and the medians of `repeats` more."""
    found = {}
    with RunReader(path) as reader:
        every = queries(reader)
        for name in every:
            with RunReader(path) as fresh:
                first = _time(queries_of(fresh, reader, name))
                times = [_time(every[name]) for _ in range(1 if "2 s" in name else repeats)]
            wall, cpu = (statistics.median(part) for part in zip(*times, strict=True))
            found[name] = {"first_ms": round(first[0], 2), "median_ms": round(wall, 2), "cpu_ms": round(cpu, 2)}
    return found


def queries_of(fresh: RunReader, reader: RunReader, name: str) -> Callable[[], Any]:
    """The query on another connection, without the preparation that chooses its arguments."""
    own = queries(reader)[name]

    def run() -> Any:
        reader._opened, fresh._opened = fresh._opened, reader._opened
        try:
            return own()
        finally:
            reader._opened, fresh._opened = fresh._opened, reader._opened

    return run


def _time(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of the clock and of this thread's CPU time."""
    started, cpu = time.perf_counter(), time.thread_time()
    with suppress(QueryTimeout):  # after 2 s of the clock
        call()
    return 1000 * (time.perf_counter() - started), 1000 * (time.thread_time() - cpu)


def time_writer(num_chains: int) -> dict[str, float]:
    """What a chain costs the thread that hands it over, and the writer's thread, in milliseconds."""
    rng = random.Random(0)
    templates = [make_template(rng, number) for number in range(TEMPLATES)]
    chains = [_chain(rng, templates, 1, place, num_chains) for place in range(num_chains)]
    records = [_record(rng, chain) for chain in chains]
    with tempfile.TemporaryDirectory() as folder, RunStore(Path(folder) / "run.db") as store, StoreWriter(store) as writer:
        recorder = Recorder(writer)
        started, cpu = time.perf_counter(), time.thread_time()
        for chain in chains:
            recorder.chain(chain, ended=False)
            recorder.chain(chain, ended=True)
        recorder.look({})
        writer.put_trajectories(1, "train", chains, replace=True)
        writer.add_tokens(1, records)
        writer.add_metrics(1, dict.fromkeys(METRICS, 1.0))
        caller, caller_cpu = time.perf_counter() - started, time.thread_time() - cpu
        writer.flush()
        whole = time.perf_counter() - started
        return {
            "chains": num_chains,
            "caller_ms_per_chain": round(1000 * caller / num_chains, 4),
            "caller_cpu_ms_per_chain": round(1000 * caller_cpu / num_chains, 4),
            "thread_ms_per_chain": round(1000 * writer.busy_s / num_chains, 4),
            "all_on_disk_s": round(whole, 3),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chains", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=1, help="write one part of the chains, and repeat it so often")
    parser.add_argument("--keep", type=Path, help="folder of the run that is made; without it, a temporary one")
    parser.add_argument("--run", type=Path, help="time the queries over this run")
    parser.add_argument("--writer", action="store_true", help="only what recording costs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"writer": time_writer(2048)}
    print("  ".join(f"{name} {value}" for name, value in figures["writer"].items()))
    if not arguments.writer:
        with tempfile.TemporaryDirectory() as temporary:
            path = arguments.run or arguments.keep or Path(temporary) / "run"
            if arguments.run is None:
                seconds = make_run(path, arguments.chains // arguments.times)
                if arguments.times > 1:
                    multiply(path, arguments.times)
                figures["made_in_s"] = round(seconds, 1)
                print(f"written in {seconds:.0f} s")
            with RunReader(path) as reader:
                figures |= {"chains": reader.num_chains(), "mib": reader.path.stat().st_size >> 20}
            print(f"{figures['chains']:,} chains, {figures['mib']:,} MiB")
            figures["load"] = round(os.getloadavg()[0], 1)
            figures["queries"] = time_queries(path, arguments.repeats)
            figures["answers"] = asyncio.run(time_answers(path, arguments.repeats))
            figures["max_rss_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        for kind in ("queries", "answers"):
            print(f"{kind}:")
            for name, values in figures[kind].items():
                told = "   ".join(f"{key.removesuffix('_ms')} {value:8.1f} ms" for key, value in values.items())
                print(f"    {name:42}  {told}")
            usual = {name: values for name, values in figures[kind].items() if "2 s" not in name}
            print(f"    slowest: {max(usual, key=lambda name: usual[name]['cpu_ms'])}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
