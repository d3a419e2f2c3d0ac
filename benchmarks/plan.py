"""Fit the model of `agentfly plan` on measured points.

In: benchmarks/results/gpu.json and gpu_learner.json (one H200). Out: src/agentfly/planning/fitted.json with the parameters and,
for every point, what was measured and predicted. Points that are held back take no part in the fit: decoding with 256 chains,
agents with 512 chains, and learning and memory of one shape (0.5B in speed, 3B in memory).

    python benchmarks/plan.py            print the table and write the file
    python benchmarks/plan.py --check    change nothing; fail if the file would change
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from agentfly.planning.memory import memory_of
from agentfly.planning.shapes import SHAPES
from agentfly.planning.throughput import CARDS, Fit

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "src" / "agentfly" / "planning" / "fitted.json"
H200 = CARDS["H200"]
MICRO = {"135M": 49152, "0.5B": 49152, "3B": 12288}
"""Tokens of one pass in the benchmark (benchmarks/gpu_models.py)."""
NOTHING = Fit(
    launch_s=0.0, matrix=0.0, cache=0.0, logits=0.0, agent=1.0, compute=0.0, layers=0.0, hidden_acts=0.0, inner_acts=0.0
)


def least_squares(rows: list[list[float]], wanted: list[float]) -> list[float]:
    """Coefficients of at least 0 with small relative errors: one below 0 is left out, and the rest is fitted again."""
    matrix = np.array(rows) / np.array(wanted)[:, None]
    used = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, used], np.ones(len(wanted)), rcond=None)
        if (found >= 0).all() or len(used) == 1:
            break
        used.remove(used[int(np.argmin(found))])
    result = [0.0] * matrix.shape[1]
    for place, value in zip(used, found, strict=True):
        result[place] = float(max(0.0, value))
    return result


def with_unit(fit: Fit, **changes: float) -> Fit:
    return Fit(**{**asdict(fit), **changes})


def fit_all(gpu: dict[str, Any], learner: dict[str, Any]) -> tuple[Fit, list[dict[str, Any]]]:
    """Returns the parameters and the points."""
    fit = NOTHING
    points: list[dict[str, Any]] = []

    def add(part: str, name: str, measured: float, predicted: float, held: bool) -> None:
        points.append(
            {"part": part, "name": name, "measured": round(measured, 4), "predicted": round(predicted, 4), "held_back": held}
        )

    # Memory: activations per token of one layer, in units of the hidden and the inner size.
    packed = [row for row in learner["learner"] if row["way"].startswith("packed")]
    seen = [row for row in packed if row["way"] == "packed" and row["shape"] != "3B"]
    rows, wanted = [], []
    for row in seen:
        shape, tokens = SHAPES[row["shape"]], min(MICRO[row["shape"]], row["tokens"])
        static = memory_of(shape, batch_tokens=0, fit=NOTHING).total - 1.5
        rows.append([2.0 * shape.layers * tokens * size / 2**30 for size in (shape.hidden, shape.intermediate)])
        wanted.append(row["peak_gib"] - static)
    hidden, inner = least_squares(rows, wanted)
    fit = with_unit(fit, hidden_acts=hidden, inner_acts=inner)
    for row in packed:
        shape, tokens = SHAPES[row["shape"]], min(MICRO[row["shape"]], row["tokens"])
        lora = 32 if "LoRA" in row["way"] else 0
        found = memory_of(shape, batch_tokens=tokens, lora_rank=lora, again="again" in row["way"], fit=fit).total - 1.5
        held = row not in seen
        add("memory", f"{row['shape']}, {row['way']} (GiB)", row["peak_gib"], found, held)

    # Decoding: seconds of one step.
    decode = [row for row in gpu["decode"] if "pages_tokens_per_s" in row]
    units = [{"launch_s": 1.0}, {"matrix": 1.0}, {"cache": 1.0}, {"logits": 1.0}]

    def step(row: dict[str, Any], with_fit: Fit) -> float:
        return with_fit.decode_s(SHAPES[row["shape"]], H200, row["chains"], row["context"] + row["steps"] / 2)

    kept = [row for row in decode if row["chains"] != 256]
    found = least_squares(
        [[step(row, with_unit(NOTHING, **unit)) for unit in units] for row in kept],
        [row["chains"] / row["pages_tokens_per_s"] for row in kept],
    )
    fit = with_unit(fit, launch_s=found[0], matrix=found[1], cache=found[2], logits=found[3])
    for row in decode:
        rate = row["chains"] / step(row, fit)
        add("decode", f"{row['shape']}, {row['chains']} chains (tokens/s)", row["pages_tokens_per_s"], rate, row not in kept)

    # Chains of several turns: the share of the rate that decoding and latency alone would give.
    def agent(row: dict[str, Any], with_fit: Fit) -> float:
        reply, turns = sum(row["reply"]) / 2, row["turns"]
        context = row["prompt"] + turns * (reply + 40) / 2
        return with_fit.agent_tokens_per_s(SHAPES[row["shape"]], H200, row["chains"], context, reply, row["latency_s"] / 2)

    few = [row for row in gpu["agent"] if row["chains"] != 512]
    fit = with_unit(fit, agent=float(np.mean([row["pages_tokens_per_s"] / agent(row, fit) for row in few])))
    for row in gpu["agent"]:
        name = f"{row['shape']}, {row['chains']} chains of {row['turns']} turns (tokens/s)"
        add("agent", name, row["pages_tokens_per_s"], agent(row, fit), row not in few)

    # Learning: seconds per token.
    full = [row for row in learner["learner"] if row["way"] == "packed"]
    kept = [row for row in full if row["shape"] != "0.5B"]
    units = [{"compute": 1.0}, {"layers": 1.0}]
    found = least_squares(
        [[with_unit(fit, **unit).learn_s(SHAPES[row["shape"]], H200) for unit in units] for row in kept],
        [1.0 / row["tokens_per_s"] for row in kept],
    )
    fit = with_unit(fit, compute=found[0], layers=found[1])
    for row in full:
        rate = 1.0 / fit.learn_s(SHAPES[row["shape"]], H200)
        add("learn", f"{row['shape']}, packed (tokens/s)", row["tokens_per_s"], rate, row not in kept)
    return fit, points


def made() -> dict[str, Any]:
    results = ROOT / "benchmarks" / "results"
    gpu, learner = (json.loads((results / name).read_text()) for name in ("gpu.json", "gpu_learner.json"))
    fit, points = fit_all(gpu, learner)
    return {
        "card": "H200",
        "parameters": {name: float(f"{value:.4g}") for name, value in asdict(fit).items()},
        "points": points,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if fitted.json would change")
    arguments = parser.parse_args(argv)
    content = made()
    text = json.dumps(content, indent=1) + "\n"
    if arguments.check:
        return int(TARGET.read_text() != text)
    for point in content["points"]:
        error = point["predicted"] / point["measured"] - 1
        held = "held back" if point["held_back"] else ""
        values = f"{point['measured']:>12.1f} {point['predicted']:>12.1f} {error:>7.1%}"
        print(f"{point['part']:<7} {point['name']:<44} {values} {held}")
    print(content["parameters"])
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
