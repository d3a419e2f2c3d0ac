"""What the host adds to a training step: chains, tools, scheduling and the store are real, the GPU is a timetable.

In: nothing (the bundled model's tokenizer; its weights are never computed). A decode step of the local engine takes the time
that an H200 was measured to take for SmolLM2-135M with 8 to 512 rows; the times of prefill and of launching are estimates. The
replies are prepared: two calls of a tool (about 35 tokens each), then an answer. Learning is a pause.
Out: a table with one row per number of chains, or with --json the figures by name.

    python benchmarks/host.py --json out.json

`device_s` is how long the device works in a step, and `share` that time divided by the rollout's: 1 means that the device never
waits for the host. `row_share` compares the sampled tokens/s of the rollout with those of a batch that is always full.
`main_ms`, `engine_ms` and `store_ms` are the processor time of the event loop's, the engine's and the store's thread in one
step. They share one interpreter, so most of that is spent one after the other.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

import agentfly
from agentfly.engines.local import decode_batch, engine, load_model, paged_scheduler, prefill
from agentfly.learn.learner import PolicyLearner
from agentfly.render.hf import HFRenderer
from agentfly.tools import add, multiply, subtract
from agentfly.training.ledger import Ledger
from agentfly.types import Message, ToolCall
from agentfly.watch.progress import Progress

TOOLS = (add, subtract, multiply)
ROWS = (8, 128, 256, 512)
STEP_MS = (1.1, 1.66, 2.3, 3.7)  # one decode step of so many rows, measured; others are interpolated
PASS_MS, PASS_MS_PER_TOKEN, PASS_SLOWS_MS = 1.5, 0.001, 1.0  # estimates: a prefill pass, and its cost to decode steps beside it
CALL_S = 25e-6  # estimate: a call that launches something; the interpreter is free meanwhile
SCRIPTS = 300  # different replies of each kind
THREADS = {"MainThread": "main_ms", "agentfly-engine": "engine_ms", "agentfly-store": "store_ms"}


@agentfly.reward
def coin(prediction: str) -> float:
    """Heads or tails, so that every group has something to learn."""
    return float(_coins.random() < 0.5)


_coins = random.Random(0)


class Device:
    """The timetable: work starts when what was launched before it has ended."""

    def __init__(self) -> None:
        self.free_at = self.busy_s = 0.0
        self._bytes = bytes(60_000)
        began = time.perf_counter()
        for _ in range(100):
            self.call()
        self._bytes = bytes(int(60_000 * CALL_S * 100 / (time.perf_counter() - began)))

    def call(self) -> None:
        """Compute for CALL_S without the interpreter."""
        hashlib.sha256(self._bytes).digest()

    def work(self, seconds: float) -> float:
        """Returns when the work will have ended."""
        self.free_at = max(time.perf_counter(), self.free_at) + seconds
        self.busy_s += seconds
        return self.free_at


class Replies:
    """The replies of the chains, as token ids: by session and length of the prompt."""

    def __init__(self, tokenizer: Any) -> None:
        rng = random.Random(0)
        renderer, schemas = HFRenderer(tokenizer), [tool.schema for tool in TOOLS]
        question = [Message("user", "What is it?")]

        def ids(reply: Message) -> list[int]:
            return renderer.write_reply(question, reply, schemas)[1]

        def call() -> ToolCall:
            return ToolCall(rng.choice(TOOLS).name, {"a": rng.randint(1, 99), "b": rng.randint(1, 99)})

        thought = "First I compute the inner part of it, then the rest of the sum."
        self.calls = [ids(Message("assistant", thought, (call(),))) for _ in range(SCRIPTS)]
        self.answers = [ids(Message("assistant", f"The answer is {rng.randint(1, 999)}.")) for _ in range(SCRIPTS)]
        self.forget()

    def forget(self) -> None:
        """Begin another run, whose sessions have the same names."""
        self._turns: dict[tuple[str, int], int] = {}
        self._played: dict[str, int] = {}

    def of(self, seq: Any) -> list[int]:
        key = (seq.session, seq.num_prompt)
        if key not in self._turns:
            self._turns[key] = self._played.get(seq.session, 0)
            self._played[seq.session] = self._turns[key] + 1
        return (self.calls if self._turns[key] < 2 else self.answers)[hash(key) % SCRIPTS]


def pretend(replies: Replies) -> Device:
    """Make every local engine of this process compute on the timetable."""
    device = Device()

    class Kernels:
        Rows = staticmethod(lambda *tensors: tensors)
        apply_changes = staticmethod(lambda *changes, **columns: device.call())

    class InFlight(decode_batch.InFlight):
        ends_at = near_at = ms = 0.0

        def wait_until_near_end(self) -> None:
            time.sleep(max(0.0, self.near_at - time.perf_counter()))

        def wait(self) -> Any:
            time.sleep(max(0.0, self.ends_at - time.perf_counter()))
            tokens, logprobs, left, _ = super().wait()
            return tokens, logprobs, left, self.ms

    class DecodeBatch(decode_batch.DecodeBatch):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._kernels = Kernels
            num_rows = len(self.entries)
            self._scripts = np.zeros((num_rows, 256), np.int64)
            self._at, self._ends = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int64)

        def add(self, seq: Any, *place: Any) -> Any:
            entry = super().add(seq, *place)
            script = replies.of(seq)
            self._scripts[entry.row, : len(script)] = script
            # After new weights a reply goes on where it was.
            self._at[entry.row], self._ends[entry.row] = len(seq.tokens) - seq.num_prompt, len(script)
            return entry

        def _fit(self, rows: int) -> int:
            return self.sizes.fit(rows)

        def _compact(self, rows: Any, joining: int) -> Any:
            held = [(self.entries[row], row) for row in rows.tolist()]
            rows = super()._compact(rows, joining)
            for entry, old in held:
                if entry.row != old:
                    for array in (self._scripts, self._at, self._ends):
                        array[entry.row] = array[old]
            return rows

        def launch(self, rows: Any, steps: int, joining: int = 0, last_steps: int = 1) -> InFlight:
            rows = self._compact(rows, joining)
            self._upload_changes(rows, steps)
            results = np.zeros(self.results.shape, np.int32)
            for step in range(steps):
                device.call()
                results[step, rows] = self._scripts[rows, np.minimum(self._at[rows] + step, 255)]
            first = decode_batch.MAX_STEPS
            results[first : first + steps, rows] = np.float32(-0.1).view(np.int32)
            self._at[rows] += steps
            device.call()
            self._launched[rows] += steps
            left = np.minimum(self._ends[rows] - self._at[rows], self._left[rows] - self._launched[rows])
            results[2 * first, rows] = np.maximum(left, 0)
            inflight = InFlight(rows, self._generation[rows], steps, results, None)
            inflight.ms = float(np.interp(self._fit(1 + int(rows[-1])), ROWS, STEP_MS))
            inflight.ends_at = device.work(steps * inflight.ms / 1000)
            inflight.near_at = inflight.ends_at - min(steps, last_steps) * inflight.ms / 1000
            self._inflight.add(inflight)
            return inflight

    class Pass:
        def __init__(self, seconds: float) -> None:
            self._seconds = seconds
            self._ends_at = max(time.perf_counter(), device.free_at) + seconds

        def done(self) -> bool:
            return time.perf_counter() >= self._ends_at

        def seconds(self) -> float:
            return self._seconds

        def block_stream(self) -> None:
            device.free_at = max(device.free_at, self._ends_at)

    class Prefiller(prefill.Prefiller):
        def run(self, chunks: Any) -> Any:
            tokens = self.sizes.fit(sum(len(ids) for ids, _, _ in chunks))
            prefill.PrefillArrays.of([(pages, cached, len(ids)) for ids, pages, cached in chunks], self.width)
            for _ in range(5):  # upload, events, graph
                device.call()
            started = Pass((PASS_MS + PASS_MS_PER_TOKEN * tokens) / 1000)
            device.work(PASS_SLOWS_MS / 1000)
            return started

    class Scheduler(paged_scheduler.PagedScheduler):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.device, self.ahead = torch.device("cuda"), paged_scheduler.LAUNCHES_AHEAD["cuda"]

    paged_scheduler.DecodeBatch, paged_scheduler.Prefiller = DecodeBatch, Prefiller  # type: ignore[misc]
    engine.PagedScheduler = Scheduler  # type: ignore[misc]
    engine.LocalEngine.uniforms = None  # type: ignore[assignment]  # the replies are canned: no number of a seed drew them
    return device


class Clock(Progress):
    """Shows nothing, and notes what each step took."""

    def __init__(self, steps: int, device: Device) -> None:
        super().__init__(steps)
        self._device = device
        self.rows: list[dict[str, float]] = []

    def step(self, step: int, metrics: Any) -> None:
        row = {"step_s": metrics["time/step_s"], "rollout_s": metrics["time/rollout_s"], "tokens": metrics["rollout/tokens"]}
        row["device_s"], self._device.busy_s = self._device.busy_s, 0.0
        for thread in threading.enumerate():
            if thread.name in THREADS and thread.ident is not None:
                row[THREADS[thread.name]] = 1000 * time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        self.rows.append(row)

    def phase(self, text: str, total: int = 0, unit: str = "chains") -> None:
        pass

    def note(self, text: str) -> None:
        pass


def measure(chains: int, steps: int, learn_s: float, max_lag: int, device: Device, replies: Replies) -> dict[str, float]:
    """Train with so many chains a step. Returns medians over the steps after the first three."""
    replies.forget()
    clock = Clock(steps + 3, device)
    agent = agentfly.ToolAgent(
        "pocket",
        tools=list(TOOLS),
        reward=coin,
        max_turns=4,
        sampling={"max_tokens": 64},
        engine={"device": "cpu", "cache": "pages", "kv_tokens": 800 * chains, "max_context": 1024, "max_batch": 512},
    )
    PolicyLearner._step = lambda *args, **options: time.sleep(learn_s)  # type: ignore[method-assign]
    Ledger.check_learned = lambda *args: None  # type: ignore[method-assign]  # it would miss the step of the optimizer
    with tempfile.TemporaryDirectory() as folder:
        agentfly.train(
            agent,
            "arithmetic",
            run={"dir": folder, "name": "run", "threads": 1},
            progress=clock,
            train_count=4000,
            validation_count=16,
            validate_at_start=False,
            validate_every=0,
            steps=steps + 3,
            save_every=0,
            num_tasks=chains // 8,
            num_chains=8,
            rollout={"max_lag": max_lag, "depth": max_lag},
            max_logprob_gap=1e9,  # no model has sampled the replies
        )
    rows = clock.rows[2:]
    for name in THREADS.values():
        spent = [after.get(name, 0.0) - before.get(name, 0.0) for before, after in pairwise(rows)]
        for row, ms in zip(rows[1:], spent, strict=True):
            row[name] = ms
    found = {name: statistics.median(row[name] for row in rows[1:]) for name in rows[0]}
    full = 1000 * chains / float(np.interp(chains, ROWS, STEP_MS))
    sampling_s = found["step_s"] if max_lag else found["rollout_s"]
    tokens_per_s = found["tokens"] / sampling_s
    return {
        "chains": chains,
        **{name: round(value, 4) for name, value in found.items()},
        "tokens_per_s": round(tokens_per_s),
        "share": round(found["device_s"] / sampling_s, 3),
        "row_share": round(tokens_per_s / full, 3),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the figures here")
    parser.add_argument("--chains", type=int, nargs="+", default=[128, 256, 512], help="chains of a step, 8 per task")
    parser.add_argument("--steps", type=int, default=12, help="steps that are measured")
    parser.add_argument("--learn-ms", type=float, default=0.6, help="pause for learning, per chain")
    parser.add_argument("--max-lag", type=int, default=0, help="steps that sampling runs ahead; then shares are of whole steps")
    options = parser.parse_args(argv)
    if any(chains % 8 or not 8 <= chains <= 512 for chains in options.chains):
        parser.error("--chains are multiples of 8, at most 512")
    torch.set_num_threads(1)
    _, tokenizer = load_model("pocket", device="cpu", dtype="float32")
    replies = Replies(tokenizer)
    device = pretend(replies)
    rows = []
    print("| chains | step | rollout | device | share | of a full batch | event loop | engine | store |\n|" + "---|" * 9)
    for chains in options.chains:
        row = measure(chains, options.steps, options.learn_ms * chains / 1000, options.max_lag, device, replies)
        rows.append(row)
        print(
            f"| {chains} | {row['step_s']:.3f} s | {row['rollout_s']:.3f} s | {row['device_s']:.3f} s | {row['share']:.2f} "
            f"| {row['row_share']:.2f} | {row['main_ms']:.0f} ms | {row['engine_ms']:.0f} ms | {row['store_ms']:.0f} ms |",
            flush=True,
        )
    if options.json:
        report = {"date": time.strftime("%Y-%m-%d %H:%M:%S"), "python": sys.version.split()[0], "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
