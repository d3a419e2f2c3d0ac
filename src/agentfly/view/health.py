"""Health and environments of a run as JSON: checks with evidence, warnings in words, where the time goes, pools.

A run that stored no checks (those of earlier versions) gets the ones that its metrics still prove.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..runs.catalog import read_config
from ..runs.filters import ChainFilter
from ..runs.query import RunReader
from ..runs.rows import ChainRow, CheckRow, EventRow
from ..watch.profile import BESIDE, PARTS, profile_of
from ..watch.warnings import DEFAULT_GAP, Warned, warnings_of

MAX_HISTORY = 500
"""Steps of a check's history that are sent: the newest, and every failed one."""
MAX_STEPS = 200
"""Steps whose times are sent one by one."""
PROMISES = {
    "chains_returned": "every chain that was admitted came back once",
    "draws_once": "no two groups of a step hold the same draw of a task",
    "groups_whole": "a group holds all chains of one draw of one task, each once",
    "chains_new": "no chain is trained in two steps",
    "lag": "no trained token is older than rollout.max_lag versions",
    "failures_unscored": "a chain that the world failed has no reward",
    "failed_share": "not more than train.max_failed_share of the chains are untrainable",
    "mask_is_sampled": "the mask of a training row covers exactly the tokens that the policy sampled",
    "tasks_accounted": "every task that was drawn is trained, filtered, failed or in flight",
    "logprob_gap": "the learner's log-probs of the sampled tokens agree with the engine's",
    "logprob_bias": "sampled and recomputed log-probs differ in both directions alike",
    "whole_distribution": "tokens are drawn as often as the learner's distribution says, the improbable ones, too",
    "engine_fresh": "on probes, the engine's log-probs fit the new weights and not those before the update",
    "weights_moved": "every optimizer step changes the weights as train.optimizer does with the settings of the run",
    "optimizer_counts": "the optimizer's averages hold every step of the run",
    "probe_gap": "on a probe, the engine's log-probs are those of the learner's weights",
    "handover_gap": "after new weights, the engine's log-probs on a probe are the learner's",
    "version_published": "after an update the engine samples from the new version",
    "same_model": "the engine's model is the one that the learner trains",
    "handover_proven": "a proof says that the engine's copy of the weights is the newest version",
    "replicas_proven": "every live replica of the engine has proven the newest version of the weights",
    "stale_cache": "no key or value of older weights is used for a new request",
}
"""What each check of `training.ledger` proves."""
NEEDED = (
    "ledger/drawn", "ledger/trained", "ledger/filtered", "ledger/failed", "ledger/in_flight", "ledger/probe_gap",
    "handover/gap", "train/logprob_gap", "train/entropy", "train/idle_steps", "train/grad_norm", "train/lag_max",
    "train/skipped", "reward/mean", "rollout/success", "rollout/invalid_call_rate", "rollout/reply_tokens", "rollout/chains",
    "rollout/trainable", "rollout/outcome/max_tokens", "rollout/outcome/max_turns", "rollout/outcome/max_time",
    "rollout/outcome/world_failure", "rollout/outcome/tool_error", "rollout/outcome/cancelled",
)  # fmt: skip
TOLD_EVENTS = (
    "note", "stopped", "chain_failed", "check_failed", "environment_failed", "environment_recycled", "environment_reaped",
)  # fmt: skip
"""Events that the page about environments lists: not those of every chain and phase."""
MAX_FAILURES = 500
MAX_LIMIT_EVENTS = 20_000
"""Events before the newest among which the reached limits of sandboxes are counted."""
MAX_NAMED = 5
STATES = {
    "dead": (
        "the process that wrote this run is gone without a word: it was killed, or its machine was lost",
        ("continue from the newest checkpoint: agentfly train --resume RUN",),
    ),
}


def checks_json(reader: RunReader) -> dict[str, Any]:
    """The page about health."""
    times = [name for name in reader.metric_names() if name.startswith(("time/", "device/"))]
    series = reader.series([*NEEDED, *times])
    finite = {name: [(step, value) for step, _, value in points if value is not None] for name, points in series.items()}
    config, state = read_config(reader.path.parent), reader.state()
    gap = _number(config, "train", "max_logprob_gap")
    rows = reader.checks() or list(derived_checks(finite, config))
    warned = warnings_of(finite, max_logprob_gap=gap)
    if state in STATES:
        text, tips = STATES[state]
        warned.insert(0, Warned(state, "red", text, tips, (), reader.last_step() or 0))
    return {
        "state": state,
        "warnings": warned,
        "checks": [check_json(name, rows_of_check) for name, rows_of_check in _by_name(rows).items()],
        "time": time_json(finite),
    }


def check_json(name: str, rows: list[CheckRow]) -> dict[str, Any]:
    """One check over the steps. The newest value is the evidence."""
    newest, failed = rows[-1], [row for row in rows if not row.ok]
    history = {row.step: row for row in [*failed[:MAX_HISTORY], *rows[-MAX_HISTORY:]]}
    return {
        "name": name,
        "promise": PROMISES.get(name, ""),
        "ok": not failed,
        "failed": len(failed),
        "steps": len(rows),
        "step": newest.step,
        "value": newest.value,
        "bound": newest.bound,
        "history": [[row.step, row.ok, row.value, row.bound] for _, row in sorted(history.items())],
    }


def _by_name(rows: list[CheckRow]) -> dict[str, list[CheckRow]]:
    by_name: dict[str, list[CheckRow]] = {}
    for row in rows:
        by_name.setdefault(row.name, []).append(row)
    return by_name


def derived_checks(series: Mapping[str, list[tuple[int, float]]], config: Mapping[str, Any]) -> Iterator[CheckRow]:
    """The checks that the metrics of a run prove by themselves."""
    gap = _number(config, "train", "max_logprob_gap") or DEFAULT_GAP
    share = _number(config, "train", "max_failed_share")
    limits = {"train/logprob_gap": "logprob_gap", "handover/gap": "handover_gap", "ledger/probe_gap": "probe_gap"}
    for metric, name in limits.items():
        for step, value in series.get(metric, ()):
            yield CheckRow(step, name, value <= gap, value, gap)
    for step, value in series.get("train/lag_max", ()):
        bound = _number(config, "rollout", "max_lag") or 0.0
        yield CheckRow(step, "lag", value <= bound, value, bound)
    counts = {part: dict(series.get(f"ledger/{part}", ())) for part in ("drawn", "trained", "filtered", "failed", "in_flight")}
    for step, drawn in counts["drawn"].items():
        accounted = sum(counts[part].get(step, 0.0) for part in ("trained", "filtered", "failed", "in_flight"))
        yield CheckRow(step, "tasks_accounted", accounted == drawn, abs(accounted - drawn), 0.0)
    trainable = dict(series.get("rollout/trainable", ()))
    for step, chains in series.get("rollout/chains", ()):
        if chains and step in trainable:
            lost = 1 - trainable[step] / chains
            bound = 0.5 if share is None else share
            yield CheckRow(step, "failed_share", lost <= bound, lost, bound)


def _number(config: Mapping[str, Any], table: str, key: str) -> float | None:
    section = config.get(table)
    value = section.get(key) if isinstance(section, Mapping) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def time_json(series: Mapping[str, list[tuple[int, float]]]) -> dict[str, Any] | None:
    """Where the time of the steps went; None if no step has a time."""
    history: dict[int, dict[str, float]] = {}
    for name, points in series.items():
        if name.startswith(("time/", "device/")):
            for step, value in points:
                history.setdefault(step, {})[name] = value
    profile = profile_of(history)
    if profile is None:
        return None
    from ..watch.metrics import METRICS

    labels = {metric: label for label, metric in (PARTS | BESIDE).items()}
    newest = sorted(step for step, row in history.items() if "time/step_s" in row)[-MAX_STEPS:]
    figures_json = profile.to_json()

    def part(label: str, figures: dict[str, float]) -> dict[str, Any]:
        name = (PARTS | BESIDE).get(label, label)
        described = METRICS[name].description if name in labels else "What the parts above do not explain."
        return {"name": name, "label": label, "description": described, **figures}

    return {
        "steps": profile.steps,
        "total_s": profile.seconds,
        "busy_share": profile.busy_share,
        "parts": [part(label, figures) for label, figures in figures_json["parts"].items()],
        "beside": [part(label, {"seconds": seconds}) for label, seconds in profile.beside.items()],
        "slowest": figures_json["slowest_steps"],
        "by_step": [[step, {name: history[step].get(name, 0.0) for name in PARTS.values()}] for step in newest],
    }


# ---- environments --------------------------------------------------------------------------------------------------------


def environments_json(reader: RunReader, since: float | None, points: int) -> dict[str, Any]:
    """Pools over time, and per step for runs that recorded no gauges; tools; what is held now; why chains failed."""
    gauges = {name: [list(point) for point in rows] for name, rows in reader.gauges(since=since, max_points=points).items()}
    names = [name for name in reader.metric_names() if name.startswith(("resources/", "cluster/"))]
    series = {name: [[step, value] for step, _, value in rows] for name, rows in reader.series(names).items()}
    return {
        "pools": _by_kind(gauges),
        "chains": {name.removeprefix("chains/"): rows for name, rows in gauges.items() if name.startswith("chains/")},
        "others": {name: rows for name, rows in gauges.items() if not name.startswith(("resources/", "chains/"))},
        "steps": _by_kind(series),
        "nodes": nodes_json(series, gauges),
        "tools": reader.tools(),
        "live": live_json(reader),
        "limits": limits_json(reader),
        "failures": failures_json(reader),
        "events": [event for event in reader.newest_events(1000) if event.kind in TOLD_EVENTS],
    }


NODE_FIGURES = ("samplers", "env_hosts", "chains", "cpus")


def nodes_json(series: Mapping[str, list[Any]], gauges: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """The machines of a run over several: `cluster/<node>/<figure>` per step, or over time if it is a gauge. Empty for one."""
    nodes: dict[str, dict[str, list[Any]]] = {}
    for name, points in {**gauges, **series}.items():
        node, _, figure = name.removeprefix("cluster/").rpartition("/")
        if name.startswith("cluster/") and node and figure in NODE_FIGURES:
            nodes.setdefault(node, {})[figure] = points
    return [{"node": node, "figures": figures} for node, figures in sorted(nodes.items())]


def live_json(reader: RunReader) -> dict[str, Any]:
    """What the run last said about now. A lease has a row per environment, with what its chain does."""
    live = reader.live()
    values = {name: {"t": at, "data": data} for name, (at, data) in live.items()}
    if "leases" in live:
        at, leases = live["leases"]
        chains = {each["id"]: each for each in live.get("chains", (at, []))[1]}
        rows = []
        for lease in leases:
            doing = chains.get(lease["chain"], {})
            state = {name: doing.get(name) for name in ("task", "turn", "phase")}
            rows += [{"chain": lease["chain"], "kind": kind, **state} for kind in lease["kinds"]]
        values["leases"]["data"] = rows
    return values


def limits_json(reader: RunReader) -> list[dict[str, Any]]:
    """The limits of sandboxes that calls reached, the most frequent first: how often, in how many chains, the newest chains.

    `since` is the first step that is counted if earlier events are left out.
    """
    newest = reader.newest_events(1)
    after = start = max(0, newest[-1].key - MAX_LIMIT_EVENTS) if newest else 0
    by_limit: dict[str, list[EventRow]] = {}
    first: int | None = None
    while events := reader.events(after, "sandbox_limit", 1000):
        after, first = events[-1].key, events[0].step if first is None else first
        for event in events:
            by_limit.setdefault(str(event.data.get("limit")), []).append(event)
    rows = []
    for limit, own in by_limit.items():
        chains = list(dict.fromkeys(event.who for event in reversed(own) if event.who))
        rows.append(
            {
                "limit": limit,
                "count": sum(int(event.data.get("count", 1)) for event in own),
                "chains": len(chains),
                "tools": sorted({str(event.data.get("tool")) for event in own}),
                "newest": chains[:MAX_NAMED],
                "step": own[-1].step,
                "since": first if start else None,
            }
        )
    return sorted(rows, key=lambda each: -int(str(each["count"])))


def failures_json(reader: RunReader) -> list[dict[str, Any]]:
    """The reasons for which the newest failed chains failed, the most frequent first.

    Numbers are left out of the comparison, so "after 12.3 s" and "after 12.4 s" are one reason.
    """
    rows, _ = reader.page(ChainFilter(failed=True), "-added", None, MAX_FAILURES)
    by_reason: dict[str, list[ChainRow]] = {}
    for row in rows:
        by_reason.setdefault(re.sub(r"\d+(\.\d+)?", "#", row.error or ""), []).append(row)
    reasons = [
        {"error": own[0].error, "count": len(own), "chain": own[0].id, "step": own[0].step, "outcome": own[0].outcome}
        for own in by_reason.values()
    ]
    return sorted(reasons, key=lambda each: -int(str(each["count"])))


def _by_kind(series: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """`resources/<kind>/<figure>` as {kind: {figure: ...}}. A kind may hold slashes."""
    kinds: dict[str, dict[str, Any]] = {}
    for name, values in series.items():
        if name.startswith("resources/"):
            kind, _, figure = name.removeprefix("resources/").rpartition("/")
            kinds.setdefault(kind, {})[figure] = values
    return kinds
