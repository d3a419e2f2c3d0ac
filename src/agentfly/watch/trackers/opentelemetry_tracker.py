"""The OpenTelemetry tracker: a trace per step, with spans for its chains, their replies and their tool calls.

    step 3                    rl.step, and the metrics as attributes
      chain t3-0-1            rl.task, rl.outcome, rl.reward
        chat                  gen_ai.usage.output_tokens             the times are those that the chain measured
        execute_tool search   gen_ai.tool.name

Spans go to the provider that the program has set; else to OTEL_EXPORTER_OTLP_ENDPOINT; else to `<directory>/spans.jsonl`. They
hold no text of messages. At most MAX_CHAINS chains of a step become spans.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter

from ...types import Trajectory

MAX_CHAINS = 64
QUEUE = 65_536
TIMEOUT_MS = 10_000
"""Milliseconds that `close` waits for the last spans."""
Span = Any


class OpenTelemetryTracker:
    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None, name: str = "") -> None:
        self._name = name or Path(directory).name
        self._step: tuple[int, Span] | None = None  # the step whose chains have come, and whose metrics have not
        self._file: Any = None
        self._own: TracerProvider | None = None
        self.notice: str | None = None
        provider: Any = trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):  # the program has set none
            exporter = self._exporter(Path(directory))
            provider = self._own = TracerProvider(resource=Resource.create({"service.name": "agentfly", "rl.run": self._name}))
            provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=QUEUE))
        self._provider = provider
        self._tracer = provider.get_tracer("agentfly")

    def _exporter(self, directory: Path) -> SpanExporter:
        if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            return OTLPSpanExporter()
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "spans.jsonl"
        self._file = path.open("a", encoding="utf-8")
        self.notice = f"OpenTelemetry writes spans to {path}: set OTEL_EXPORTER_OTLP_ENDPOINT to send them to a collector"
        return ConsoleSpanExporter(out=self._file, formatter=lambda span: span.to_json(indent=None) + "\n")

    def log_chains(self, chains: Sequence[Trajectory], split: str, step: int) -> None:
        began = min((chain.started for chain in chains if chain.started), default=time.time())
        parent = self._open_step(step, began) if split == "train" else self._span("validation", began, None, step=step)
        for chain in _spread(chains, MAX_CHAINS):
            if chain.started:
                self._chain(chain, parent)
        if split != "train":
            ends = [chain.started + chain.seconds for chain in chains if chain.started]
            parent.end(_ns(max(ends, default=time.time())))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = time.time()
        span = self._open_step(step, now - metrics.get("time/step_s", 0.0))
        span.set_attributes({name: float(value) for name, value in metrics.items() if math.isfinite(value)})
        span.end(_ns(now))
        self._step = None

    def close(self) -> None:
        if self._step is not None:  # a step that failed
            self._step[1].end()
        self._provider.force_flush(TIMEOUT_MS)
        if self._own is not None:
            self._own.shutdown()
        if self._file is not None:
            self._file.close()

    def _open_step(self, step: int, began: float) -> Span:
        if self._step is not None and self._step[0] != step:
            self._step[1].end()
            self._step = None
        if self._step is None:
            self._step = step, self._span(f"step {step}", began, None, step=step)
        return self._step[1]

    def _span(self, name: str, began: float, parent: Span | None, **attributes: object) -> Span:
        context = None if parent is None else trace.set_span_in_context(parent)
        values = {f"rl.{key}": value for key, value in {"run": self._name, **attributes}.items() if value is not None}
        return self._tracer.start_span(name, context=context, start_time=_ns(began), attributes=values)

    def _chain(self, chain: Trajectory, parent: Span) -> None:
        span = self._span(
            f"chain {chain.id}",
            chain.started,
            parent,
            task=chain.task.id,
            outcome=chain.outcome.value,
            reward=chain.total_reward if chain.scored else None,
            waited_s=chain.waited_s,
        )
        if chain.error:
            span.set_status(trace.StatusCode.ERROR, chain.error[:500])
        for turn in chain.turns:
            began = chain.started + turn.began_s
            reply = self._span("chat", began, span)
            reply.set_attribute("gen_ai.operation.name", "chat")
            reply.set_attribute("gen_ai.usage.output_tokens", len(turn.completion.token_ids))
            reply.end(_ns(began + turn.sampled_s))
            for index, call in enumerate(turn.calls):
                seconds = turn.calls_s[index] if index < len(turn.calls_s) else turn.tools_s
                used = self._span(f"execute_tool {call.name[:100]}", began + turn.sampled_s, span)
                used.set_attribute("gen_ai.operation.name", "execute_tool")
                used.set_attribute("gen_ai.tool.name", call.name[:100])
                if index < len(turn.results) and turn.results[index].error:
                    used.set_status(trace.StatusCode.ERROR, str(turn.results[index].error))
                used.end(_ns(began + turn.sampled_s + seconds))
        span.end(_ns(chain.started + chain.seconds))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _spread(chains: Sequence[Trajectory], most: int) -> list[Trajectory]:
    """At most so many chains, evenly spread over all."""
    return list(chains) if len(chains) <= most else [chains[index * len(chains) // most] for index in range(most)]
