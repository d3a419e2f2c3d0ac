"""Where the time of a step goes.

The loop marks what it waits for as spans. A `Breakdown` cuts the time of the run at every begin and end of a span, and gives
each slice to exactly one part, so that the parts of a step add up to its time also if sampling and learning overlap:

    slice in a span "learn", "publish", "validate", "save" or "store"  ->  that part (the first of them, if several are open)
    any other slice, in this order, as far as its time goes:
        prefill, decode           seconds that the engine computed
        tools                     no chain waited for the engine, one waited for its tools
        environments, scoring     the same for environments and rewards
        store                     waiting for the writer of the run's store
        host                      CPU time of the thread of the chains, and time in which the engine's thread prepared a pass
        idle                      the rest

An engine without `prefill_s` and `decode_s` has one part, sampling: a chain waited for the engine.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Literal

from ..rollout.activity import Activities, Phase
from ..runs import StoreWriter
from ..watch.observers import Observer
from ..watch.profile import PARTS

Span = Literal["learn", "publish", "validate", "save", "store", "rollout"]
SPANS: tuple[Span, ...] = ("learn", "publish", "validate", "save", "store", "rollout")
"""Of several open spans, the first of these gets the time."""
_BUSY: tuple[Phase, ...] = ("sampling", "host")  # states in which the thread of the chains works, not a tool or a reward
MEMORY = 200
"""Steps whose median is the usual time of a step."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """All counters at one moment."""

    at: float
    engine: Mapping[str, float]
    waits: Mapping[Phase, float]
    cpu: Mapping[Phase, float]
    store_busy: float
    store_waited: float


class Breakdown:
    """Divides the time of each step into parts. Set `activities` in the plan of the chains; `stats` is that of the engine.

    `observe` is told of each span that begins, and of each chain that starts or has ended. Spans may be entered in several
    threads. A slice costs two calls of `stats`, about 20 microseconds.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, float]] | None,
        writer: StoreWriter | None = None,
        observe: Observer | None = None,
    ) -> None:
        self._stats, self._writer, self._observe = stats, writer, observe or Observer()
        self.activities = Activities(self._observe.chain)
        self._lock = threading.Lock()
        self._open: Counter[Span] = Counter()
        self._stalls = Stalls()
        self._last = self._mark()
        self._clear()

    def begin(self) -> None:
        """The first step begins now. What was measured before, such as a validation, is dropped."""
        with self._lock:
            self._cut()
            self._clear()

    @contextmanager
    def span(self, name: Span) -> Iterator[None]:
        """The body is this part of the step. "rollout" is no part: its time goes to what the chains waited for."""
        self._observe.span(name)
        with self._lock:
            self._cut()
            self._open[name] += 1
        try:
            yield
        finally:
            with self._lock:
                self._cut()
                self._open[name] -= 1

    def seconds(self, name: Span) -> float:
        """The time in spans of this name since the step began."""
        with self._lock:
            self._cut()
            return self._spans.get(name, 0.0)

    def end_step(self, tokens: float = 0.0) -> dict[str, float]:
        """Ends the step and begins the next. Returns the metrics time/* and device/*. `tokens` are those sampled for it."""
        with self._lock:
            self._cut()
            metrics = self._metrics(tokens)
            self._clear()
            return metrics

    def _metrics(self, tokens: float) -> dict[str, float]:
        parts, total = self._parts, self._total
        metrics = {metric: parts[name] for name, metric in PARTS.items() if name in parts}
        if "rollout" in self._spans:
            metrics["time/rollout_s"] = self._spans["rollout"]
        metrics |= {"time/step_s": total, "time/overlap_s": self._overlap}
        if self._writer is not None:
            metrics["time/store_thread_s"] = self._store_busy
        if self._splits:
            metrics["device/busy_share"] = min(1.0, self._busy / total) if total > 0 else 0.0
        foreign = sum(parts.get(name, 0.0) for name in ("tools", "environments", "scoring", "validate", "save"))
        metrics["time/stalls_s"] = self._stalls.add(total - foreign, self._prepared, tokens)
        return metrics

    def _clear(self) -> None:
        self._splits = "decode_s" in self._last.engine
        engine = ("prefill", "decode") if self._splits else ("sampling",)
        always = ("tools", "environments", "scoring", "store", "host", "idle")
        self._parts: dict[str, float] = dict.fromkeys((*engine, *always), 0.0)
        self._spans: dict[Span, float] = {}
        self._total = self._busy = self._overlap = self._prepared = self._store_busy = 0.0

    def _mark(self) -> _Mark:
        waits, cpu = self.activities.read()
        engine = self._stats() if self._stats is not None else {}
        writer = self._writer
        busy, waited = (0.0, 0.0) if writer is None else (writer.busy_s, writer.waited_s)
        return _Mark(perf_counter(), engine, waits, cpu, busy, waited)

    def _cut(self) -> None:
        """Gives the time since the last mark to a part."""
        before, after = self._last, self._mark()
        self._last = after
        wall = max(0.0, after.at - before.at)
        prefill, decode = _moved(before, after, "prefill_s"), _moved(before, after, "decode_s")
        # The sum may exceed the slice: counters move at the end of a pass, and on a GPU both may run at once.
        busy = min(wall, prefill + decode)
        if prefill + decode > wall:
            prefill, decode = (busy * part / (prefill + decode) for part in (prefill, decode))
        self._total += wall
        self._prepared += _moved(before, after, "prepared_s")
        self._store_busy += max(0.0, after.store_busy - before.store_busy)
        for name in SPANS:
            if self._open[name]:
                self._spans[name] = self._spans.get(name, 0.0) + wall
        span = next((name for name in SPANS if self._open[name]), "rollout")
        self._busy += wall if span == "learn" else busy
        if span == "learn":
            self._overlap += busy
        if span != "rollout":
            self._parts[span] = self._parts.get(span, 0.0) + wall
            return
        waits = {name: max(0.0, after.waits[name] - before.waits[name]) for name in after.waits}
        cpu = sum(max(0.0, after.cpu[name] - before.cpu[name]) for name in _BUSY)
        wanted = {
            **({"prefill": prefill, "decode": decode} if self._splits else {"sampling": waits["sampling"]}),
            "tools": waits["tools"],
            "environments": waits["environment"],
            "scoring": waits["scoring"],
            "store": max(0.0, after.store_waited - before.store_waited),
            "host": cpu + _moved(before, after, "host_s"),
        }
        for part, seconds in wanted.items():
            taken = min(wall, seconds)
            self._parts[part] += taken
            wall -= taken
        self._parts["idle"] += wall


def _moved(before: _Mark, after: _Mark, name: str) -> float:
    return max(0.0, after.engine.get(name, 0.0) - before.engine.get(name, 0.0))


class Stalls:
    """Finds the time that steps lost, from the third step on. The usual step is the median of those before.

    A step loses the seconds of preparing (compiling, graph capture) by which it exceeds the usual step, and every other second
    beyond twice the usual step. If it sampled more tokens than the median, the usual step is longer in proportion. Time that
    the run does not control (tools, environments, rewards) or spends on purpose (validation, checkpoints) does not count.
    """

    def __init__(self) -> None:
        self._count = 0
        self._usual: deque[tuple[float, float]] = deque(maxlen=MEMORY)

    def add(self, seconds: float, prepared: float, tokens: float) -> float:
        """The seconds that a step of this time lost; `prepared` of them may have passed in another thread."""
        self._count += 1
        if self._count <= 2:
            return 0.0
        if len(self._usual) < 2:
            preparing, lost = min(prepared, seconds), 0.0
        else:
            usual_tokens = median(tokens for _, tokens in self._usual)
            longer = max(1.0, tokens / usual_tokens) if usual_tokens > 0 else 1.0
            usual = longer * median(seconds for seconds, _ in self._usual)
            preparing = min(prepared, max(0.0, seconds - usual))
            lost = max(0.0, seconds - preparing - 2 * usual)
        self._usual.append((seconds - preparing, tokens))
        return preparing + lost
