"""Reading the books of the pools: figures for the progress display, and whether a wait can ever end. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .pool import Pool
    from .proxy import Handle

GAUGES = ("allocated", "idle", "warming", "closing", "waiting")
COUNTERS = ("started", "recycled", "failed", "reaped")
TIMES = ("acquire_s", "acquire_p95_s", "lease_s")


def measure(pools: Iterable[Pool]) -> dict[str, float]:
    """`resources/<kind>/<figure>` and `resources/total/<figure>`.

    Now: allocated (seats lent), idle (instances), warming (starting), closing, waiting (chains). The most of this step, per
    kind: most_allocated, most_waiting. Since the start: started, recycled, failed, reaped. Over the last leases: acquire_s
    (mean), acquire_p95_s, lease_s (mean).
    """
    figures: dict[str, float] = {}
    total = dict.fromkeys((*GAUGES, *COUNTERS), 0.0)
    latencies: list[float] = []
    lease_times: list[float] = []
    for pool in pools:
        mine = {
            "allocated": float(sum(member.seats for member in pool.members)),
            "idle": float(len(pool.idle)),
            "warming": float(pool.starting),
            "closing": float(pool.closing),
            "waiting": float(pool.waiting),
            "most_allocated": float(pool.most_lent),
            "most_waiting": float(pool.most_waiting),
            "started": float(pool.started),
            "recycled": float(pool.recycled),
            "failed": float(pool.failed),
            "reaped": float(pool.reaped),
        }
        for name in total:
            total[name] += mine[name]
        latencies += pool.latencies
        lease_times += pool.lease_times
        _write(figures, pool.spec.name, mine, pool.latencies, pool.lease_times)
    _write(figures, "total", total, latencies, lease_times)
    return figures


def _write(
    figures: dict[str, float],
    kind: str,
    counts: Mapping[str, float],
    latencies: Collection[float],
    lease_times: Collection[float],
) -> None:
    for name, value in counts.items():
        figures[f"resources/{kind}/{name}"] = value
    ordered = sorted(latencies)
    figures[f"resources/{kind}/acquire_s"] = sum(ordered) / len(ordered) if ordered else 0.0
    figures[f"resources/{kind}/acquire_p95_s"] = ordered[math.ceil(0.95 * len(ordered)) - 1] if ordered else 0.0
    figures[f"resources/{kind}/lease_s"] = sum(lease_times) / len(lease_times) if lease_times else 0.0


def is_stuck(holder: str, pools: Iterable[Pool], held: Mapping[str, list[Handle]]) -> bool:
    """Whether `holder` waits for something that can never come back.

    Whoever does not wait will end and give back what it holds; then those who wait for that can go on, and end too. Who is
    left when nobody can go on waits for ever (Holt, "Some deadlock properties of computer systems", 1972).
    """
    free: dict[Pool, int] = {}
    wanted: dict[str, list[Pool]] = {}
    for pool in pools:
        seats = sum(pool.spec.max_chains - member.seats for member in pool.members if not member.retiring)
        coming = pool.starting + pool.closing + (pool.count < pool.size and not pool.members)
        free[pool] = seats + coming * pool.spec.max_chains
        for waiter in pool.waiters:
            if waiter.wanted and waiter.holder in held:
                wanted.setdefault(waiter.holder, []).append(pool)
    for name, handles in held.items():
        if name not in wanted:
            for handle in handles:
                free[handle.member.pool] += 1
    moved = True
    while moved and holder in wanted:
        moved = False
        for name in list(wanted):
            if all(free[pool] > 0 for pool in wanted[name]):
                del wanted[name]
                for handle in held[name]:
                    free[handle.member.pool] += 1
                moved = True
    return holder in wanted
