"""Beyond one process: chains per second over sampler replicas, hand-over of weights in GB/s, updates over learner ranks.

In: nothing; worker processes are started on this machine. Out: a table, or with --json the figures by name. Each part can be
run alone. The figures of replicas are those of one machine: its cores limit chains that do not wait.

    python benchmarks/scale.py --json out.json
    python benchmarks/scale.py --parts handover --counts 1 2 4

Environments over nodes are measured by `scale_nodes.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import scale_ranks
import scale_workers

PARTS: dict[str, Callable[[list[int]], dict[str, float]]] = {
    "replicas": scale_workers.replicas,
    "handover": scale_workers.handover,
    "ranks": scale_ranks.ranks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 2, 4], help="numbers of worker processes and of ranks")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if min(options.counts) < 1:
        parser.error("--counts are numbers of worker processes, at least 1")
    found: dict[str, float] = {}
    for part in options.parts:
        found |= PARTS[part](options.counts)
    for name, value in found.items():
        print(f"{name:48} {value:10.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
