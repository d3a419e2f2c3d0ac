"""Figures of the pools for the progress display, and the search for deadlocks. Reads pools and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

from .gauge import Gauge
from .lease import Handle
from .pool import Pool


def measure(pools: Iterable[Pool], leased: Gauge) -> dict[str, float]:
    """Returns `resources/<kind>/<figure>` for every kind, and `resources/total/<figure>`.

    Now: allocated (chains that hold one), idle (instances), warming (starting), closing, waiting (chains). The most of this
    step: most_allocated, and per kind most_waiting. Since the start: started, recycled, failed, reaped (taken back from a
    chain). `leased` counts what all pools have lent.
    Over the last leases: acquire_s (mean), acquire_p95_s, lease_s (mean).
    """
    figures: dict[str, float] = {}
    total: dict[str, float] = {}
    latencies: list[float] = []
    lease_times: list[float] = []
    for pool in pools:
        summed = {
            "allocated": sum(slot.num_chains for slot in pool.slots),
            "idle": len(pool.idle),
            "warming": pool.starting,
            "closing": pool.closing,
            "waiting": pool.line.waiting,
            "started": pool.started,
            "recycled": pool.recycled,
            "failed": pool.failed,
            "reaped": pool.reaped,
        }
        total = {name: total.get(name, 0) + value for name, value in summed.items()}
        latencies += pool.latencies
        lease_times += pool.lease_times
        most = {"most_allocated": pool.leased.most, "most_waiting": pool.most_waiting}
        figures |= _named(pool.spec.name, {**summed, **most}, pool.latencies, pool.lease_times)
    return figures | _named("total", {**total, "most_allocated": leased.most}, latencies, lease_times)


def _named(
    kind: str, counts: Mapping[str, float], latencies: Collection[float], lease_times: Collection[float]
) -> dict[str, float]:
    ordered = sorted(latencies)
    times = {
        "acquire_s": sum(ordered) / len(ordered) if ordered else 0.0,
        "acquire_p95_s": ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else 0.0,
        "lease_s": sum(lease_times) / len(lease_times) if lease_times else 0.0,
    }
    return {f"resources/{kind}/{name}": float(value) for name, value in {**counts, **times}.items()}


def is_deadlocked(holder: str, pools: Mapping[str, Pool], held: Mapping[str, list[Handle]]) -> bool:
    """Whether `holder` waits for an instance that can never be given back. `held` has the handles of each holder.

    A chain that does not wait ends and gives its instances back. Then the chains that wait for those can go on, and end too.
    The chains that are left when none can go on are deadlocked (Holt, "Some deadlock properties of computer systems", 1972).
    """
    free: dict[str, int] = {}
    wanted: dict[str, list[str]] = {}
    for kind, pool in pools.items():
        places = sum(pool.spec.max_chains - slot.num_chains for slot in pool.slots if not slot.retiring)
        coming = pool.starting + pool.closing + (pool.count < pool.size and not pool.slots)
        free[kind] = places + coming * pool.spec.max_chains
        for waiter in pool.line:
            if waiter.request in held:
                wanted.setdefault(waiter.request, []).append(kind)
    going = [name for name in held if name not in wanted]
    while holder in wanted:
        for name in going:
            for handle in held[name]:
                free[handle.slot.kind] += 1
        going = [name for name, kinds in wanted.items() if all(free[kind] > 0 for kind in kinds)]
        if not going:
            return True
        for name in going:
            del wanted[name]
    return False
