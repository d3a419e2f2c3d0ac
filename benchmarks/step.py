"""Whole training steps, ours beside TRL: the same task, weights, batch, limits and device, one after another in one run.

In: a model, "pocket", "smollm2" or a Hugging Face folder. Out: a table of seconds per step, tokens per second and the share of
the device's matrix speed that the learner reaches; a table of where the time went; with --json all of it and every step.
The task needs two tool calls and an answer ("What is 12 times 7, plus 5?"), with native calls in Hermes' format, 8 chains per
task. A model whose chat template shows no tools gets one that does, and a short warm start on demonstrations.

Each side runs in a separate process. A step lasts from the end of the previous step to its end, everything included; the
first --warmup steps are left out, and medians are shown. "CPU s" is the processor time of the process, all threads together.
On a CPU that other programs use too, compare this figure, with --threads 1: threads that wait for each other spin.

TRL runs with its defaults, but without gradient checkpointing and logging, and with the largest micro batch that fits. It
samples with vLLM in the same process on a GPU where vLLM is installed, otherwise with `generate`. TRL may be installed in
another environment (--trl-python). The benchmark checks that both sides do the same work: chains per step, sampled tokens and
prompt tokens per chain, and the reward of the first steps. A difference of more than 20 % is a warning. Ours does not compute
groups whose chains all have the same reward, because their gradient is zero; TRL computes them.

The learner's share of the matrix speed is 6 x weights x tokens learned / seconds of learning / speed of a large product, with a
prompt counted once per group on both sides; "strict" counts the head for sampled tokens alone.

On one H200:

    python benchmarks/step.py --model smollm2 --chains 128 --max-lag 1 --steps 20 --warmup 5 --trl vllm \\
        --set train.max_tokens_per_batch=auto --json benchmarks/results/step_135m.json
    python benchmarks/step.py --model FOLDER/Qwen2.5-Coder-0.5B-Instruct --chains 256 --max-lag 1 --steps 20 --warmup 5 \\
        --trl vllm --trl-batch 64 --set train.max_tokens_per_batch=auto --json benchmarks/results/step_0.5b.json

On a CPU, in miniature:

    python benchmarks/step.py --model pocket --chains 16 --steps 3 --device cpu --threads 1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SIDES = Path(__file__).with_name("step_sides.py")
GROUP = 8
TOLERANCE = 0.2
NUM_START = 3  # steps whose reward is compared: the weights have hardly moved
COLUMNS = [
    ("side", "name", ""), ("s/step", "seconds", ".3f"), ("x ours", "times_ours", ".2f"), ("slowest", "slowest_s", ".3f"),
    ("CPU s", "cpu_s", ".3f"), ("x ours", "times_our_cpu", ".2f"),
    ("rollout", "rollout_s", ".3f"), ("learn", "learn_s", ".3f"), ("rest", "rest_s", ".3f"),
    ("tokens/s", "tokens_per_s", ",.0f"), ("in rollout", "rollout_tokens_per_s", ",.0f"),
    ("of matrix speed", "matrix_share", ".1%"), ("strict", "matrix_share_strict", ".1%"), ("chains", "chains", ""),
    ("groups learned", "learned_groups", ".1f"),
    ("tokens/chain", "tokens_per_chain", ".1f"), ("prompt", "prompt_tokens", ".0f"), ("calls", "calls", ".2f"),
    ("reward at start", "start_reward", ".3f"), ("first update", "first_update_s", ".1f"), ("peak GiB", "peak_gib", ".1f"),
]  # fmt: skip
Row = dict[str, Any]


# ---- one side ---------------------------------------------------------------------------------------------------------------


def run_side(side: str, settings: dict[str, Any], work: Path, label: str, *, python: str, timeout_s: float) -> dict[str, Any]:
    """Run a part of `step_sides.py` in its own process. Returns its result, or {"error": ...} with the last line it wrote."""
    asked, answer, log = (work / f"{label}.{suffix}" for suffix in ("settings.json", "json", "log"))
    settings = settings | {"runs": str(work / f"{label}_runs"), "launched": time.time()}
    asked.write_text(json.dumps(settings, indent=1), encoding="utf-8")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    with log.open("w", encoding="utf-8") as out:
        try:
            done = subprocess.run(
                [python, str(SIDES), side, str(asked), str(answer)],
                stdout=out, stderr=subprocess.STDOUT, env=environment, timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {timeout_s:g} s; its output is in {log}"}
    if done.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        told = next((line for line in reversed(lines) if "Error" in line), lines[-1])  # warnings may follow the error
        return {"error": f"{' '.join(told.split())[:300]} (exit status {done.returncode}; the whole output is in {log})"}
    result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return result


def run_trl(settings: dict[str, Any], work: Path, label: str, *, python: str, timeout_s: float) -> dict[str, Any]:
    """TRL with the micro batch that was asked for, or the largest half, quarter, ... of it that fits into memory."""
    while True:
        found = run_side("trl", settings, work, label, python=python, timeout_s=timeout_s)
        smaller = settings["trl_batch"] // 2
        if "out of memory" not in found.get("error", "").lower() or smaller < settings["group"]:
            return found | {"trl_batch": settings["trl_batch"]}
        print(f"{label}: out of memory with micro batches of {settings['trl_batch']} chains; trying {smaller}", flush=True)
        settings = settings | {"trl_batch": smaller}


def summarize(name: str, found: dict[str, Any], warmup: int, head: dict[str, Any]) -> Row:
    """The figures of one side: medians over the steps after the warm-up."""
    row: Row = {"name": name, **{key: value for key, value in found.items() if key != "records"}}
    if "records" not in found:
        return row
    records, steps = found["records"], found["records"][warmup:]

    def median(value: Callable[[dict[str, Any]], float]) -> float:
        return statistics.median(map(value, steps))

    names = dict.fromkeys(name for record in steps for name in record["phases"])
    phases = {name: median(lambda record, name=name: record["phases"].get(name, 0.0)) for name in names}
    start = records[:NUM_START]
    row |= {
        "seconds": median(lambda record: record["seconds"]),
        "slowest_s": max(record["seconds"] for record in steps),
        "cpu_s": median(lambda record: record["cpu_s"]),
        "rollout_s": phases["time/rollout_s"],
        "learn_s": phases["time/learn_s"],
        "tokens_per_s": median(lambda record: record["sampled"] / record["seconds"]),
        "rollout_tokens_per_s": median(lambda record: record["rollout_tokens_per_s"]),
        "chains": min(record["chains"] for record in records),
        "tokens_per_chain": sum(record["sampled"] for record in start) / sum(record["chains"] for record in start),
        "prompt_tokens": sum(record["prompts"] for record in start) / sum(record["chains"] for record in start),
        "calls": statistics.fmean(record["calls"] for record in start),
        "start_reward": statistics.fmean(record["reward"] for record in start),
        "start_chains": sum(record["chains"] for record in start),
        "end_reward": statistics.fmean(record["reward"] for record in records[-NUM_START:]),
        "learned_groups": statistics.fmean(record["learned_groups"] for record in steps),
        "phases": phases,
        "steps": records,
    }
    row["rest_s"] = max(0.0, row["seconds"] - row["rollout_s"] - row["learn_s"])
    if not head["options"]["device"].startswith("cuda"):
        return row  # the small product that is timed on a CPU is no limit
    size, peak = head["size"], head["limits"]["matmul_tflops"] * 1e12

    def share(record: dict[str, Any], flops: float) -> float:
        return flops / max(record["phases"]["time/learn_s"], 1e-9) / peak

    row["matrix_share"] = median(lambda r: share(r, 6 * size["weights"] * r["learned"]))
    row["matrix_share_strict"] = median(
        lambda r: share(r, 6 * (size["body"] * r["learned"] + size["head"] * r["learned_sampled"]))
    )
    return row


# ---- comparing --------------------------------------------------------------------------------------------------------------


def compare(base: Row, row: Row) -> list[str]:
    """What the two sides did differently, as sentences; empty if they did the same work."""
    found = []
    if base["chains"] != row["chains"]:
        found.append(f"{row['name']} played {row['chains']} chains a step, {base['name']} {base['chains']}")
    for key, words in (("tokens_per_chain", "sampled tokens"), ("prompt_tokens", "prompt tokens")):
        if abs(row[key] - base[key]) > TOLERANCE * max(base[key], 1e-9):
            found.append(f"{row['name']} has {row[key]:.1f} {words} per chain, {base['name']} {base[key]:.1f}")
    if abs(row["learned_groups"] - base["learned_groups"]) > TOLERANCE * row["learned_groups"]:
        groups = (
            f"{row['name']} learned from {row['learned_groups']:.1f} groups a step, {base['name']} {base['learned_groups']:.1f}"
        )
        found.append(f"{groups}: groups of equal rewards have no gradient, and only TRL computes them")
    # Both sides play the same tasks from the same weights, so the difference has at most the variance of independent chains.
    mean = (base["start_reward"] + row["start_reward"]) / 2
    noise = 3 * math.sqrt(mean * (1 - mean) * (1 / base["start_chains"] + 1 / row["start_chains"]))
    if abs(row["start_reward"] - base["start_reward"]) > max(TOLERANCE * mean, noise):
        found.append(
            f"{row['name']} starts with a reward of {row['start_reward']:.3f}, {base['name']} {base['start_reward']:.3f}"
        )
    return found


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Markdown: the figures, then seconds per step by phase."""
    measured = [row for row in rows if "seconds" in row]
    yield "| " + " | ".join(title for title, _, _ in COLUMNS) + " |"
    yield "|" + "---|" * len(COLUMNS)
    for row in rows:
        told = row.get("missing") or row.get("error")
        shown = " | ".join("-" if row.get(key) is None else format(row[key], form) for _, key, form in COLUMNS)
        yield f"| {shown} |" + (f" {told}" if told else "")
    if measured:
        yield "\nmedian per step, by phase\n"
        yield "| phase | " + " | ".join(row["name"] for row in measured) + " |"
        yield "|---|" + "---|" * len(measured)
        for name in dict.fromkeys(name for row in measured for name in row["phases"]):
            shown = " | ".join(f"{row['phases'][name]:.4f}" if name in row["phases"] else "-" for row in measured)
            yield f"| {name} | {shown} |"


# ---- the run ----------------------------------------------------------------------------------------------------------------


def write_tasks(work: Path, count: int, seed: int) -> dict[str, str]:
    """The tasks of both sides, and the one of the validation that ends a run of ours, after the last step."""
    from agentfly.pocket.tasks import arithmetic

    found = {}
    for name, rows in (("tasks", arithmetic("train", count, seed)), ("one_task", arithmetic("validation", 1, seed))):
        path = work / f"{name}.jsonl"
        kept = [{"question": row["question"], "answer": row["answer"]} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        found[name] = str(path)
    return found


def sides_of(options: argparse.Namespace) -> list[tuple[str, dict[str, Any]]]:
    """Rows to measure: their names, and the settings that differ. Only those of TRL have a `sampler`."""
    chosen: list[tuple[str, dict[str, Any]]] = [("agentfly", {})]
    chosen += [(f"agentfly, max_lag {lag}", {"max_lag": lag}) for lag in options.max_lag]
    chosen += [(f"agentfly, {keys}", {"set": [*options.set, *keys.split()]}) for keys in options.also]
    samplers = {"off": [], "both": ["vllm", "generate"], "auto": [_best_sampler(options)]}.get(options.trl, [options.trl])
    return chosen + [(f"TRL, {sampler}", {"sampler": sampler}) for sampler in samplers]


def _best_sampler(options: argparse.Namespace) -> str:
    """vLLM on a GPU if TRL's environment has it."""
    if not options.device.startswith("cuda"):
        return "generate"
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    return "generate" if subprocess.run([options.trl_python, "-c", look], timeout=60).returncode else "vllm"


def measure(options: argparse.Namespace, work: Path, command: str) -> dict[str, Any]:
    """Prepare the weights, then measure one side after another. The file is written after every row."""
    settings: dict[str, Any] = vars(options) | {
        "source": options.model, "model": str(work / "model"), "max_lag": 0, "json": None, "work": None,
        "group": GROUP, **write_tasks(work, (options.warmup + options.steps + 2) * options.chains // GROUP, options.seed),
    }  # fmt: skip
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "command": command,
        "options": {name: value for name, value in vars(options).items() if name not in ("json", "work", "trl_python")},
    }
    prepared = run_side("prepare", settings, work, "prepare", python=sys.executable, timeout_s=options.timeout_s)
    if "error" in prepared:
        raise SystemExit(f"the model could not be prepared: {prepared['error']}")
    report |= prepared | {"rows": [], "warnings": []}
    print(
        f"{report['card']}, {report['date']}; {options.model}: {prepared['size']['weights'] / 1e6:,.1f} million weights",
        flush=True,
    )
    for name, own in sides_of(options):
        label = re.sub(r"[^\w.]+", "_", name)
        if "sampler" in own:
            found = run_trl(settings | own, work, label, python=options.trl_python, timeout_s=options.timeout_s)
        else:
            found = run_side("ours", settings | own, work, label, python=sys.executable, timeout_s=options.timeout_s)
        row = summarize(name, found, options.warmup, report)
        report["rows"].append(row)
        base = report["rows"][0]
        if "seconds" in row and "seconds" in base:
            row["times_ours"], row["times_our_cpu"] = row["seconds"] / base["seconds"], row["cpu_s"] / base["cpu_s"]
            report["warnings"] += compare(base, row) if row is not base else []
        print(f"{name}: " + (row.get("missing") or row.get("error") or f"{row['seconds']:.3f} s a step"), flush=True)
        if options.json:
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _parser() -> argparse.ArgumentParser:
    def lags(text: str) -> list[int]:
        found = [int(word) for word in text.split(",")]
        if min(found) < 1:
            raise argparse.ArgumentTypeError("a lag is at least 1; the row with 0 is always measured")
        return found

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the figures here")
    parser.add_argument("--model", default="pocket", help='"pocket", "smollm2" or a Hugging Face folder')
    parser.add_argument("--chains", type=int, default=128, help=f"chains of one step, {GROUP} per task")
    parser.add_argument("--steps", type=int, default=10, help="steps that are measured")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--max-lag", type=lags, default=[], metavar="N,...", help="further rows of ours with rollout.max_lag")
    parser.add_argument("--trl", choices=("auto", "generate", "vllm", "both", "off"), default="auto", help="how TRL samples")
    parser.add_argument("--trl-python", default=sys.executable, metavar="PATH", help="the Python of TRL's environment")
    parser.add_argument("--trl-batch", type=int, help="chains of TRL's micro batch; without: all, or as many as fit")
    parser.add_argument("--device", help="without: a GPU if there is one")
    parser.add_argument("--threads", type=int, help="torch threads of both sides; without: torch's choice")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of one reply")
    parser.add_argument("--max-turns", type=int, default=4, help="replies of one chain")
    parser.add_argument("--max-tokens-per-batch", type=int, default=16384, help="of our learner")
    parser.add_argument("--warm-start", type=int, metavar="STEPS", help="supervised steps first; without: 60, for pocket 0")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a config key of ours")
    parser.add_argument(
        "--also",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a further row of ours with this key, or with several that spaces separate",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep weights, runs and logs here; without: they are removed")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="seconds that one side may take")
    return parser


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    import torch

    parser = _parser()
    options = parser.parse_args(argv)
    if options.chains < GROUP or options.chains % GROUP:
        parser.error(f"--chains is a multiple of {GROUP}: every task is played by {GROUP} chains")
    if min(options.steps, options.max_tokens, options.max_turns) < 1 or options.warmup < 0:
        parser.error("--steps, --max-tokens and --max-turns are at least 1, --warmup at least 0")
    options.trl_batch = options.trl_batch or options.chains
    if options.chains % options.trl_batch:
        parser.error("--trl-batch must divide --chains")
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: PyTorch sees no GPU; use --device cpu")
    options.dtype = "bfloat16" if options.device.startswith("cuda") else "float32"
    if options.warm_start is None:
        options.warm_start = 0 if options.model == "pocket" else 60
    return options


def command_of(argv: Sequence[str]) -> str:
    """The command, without the options that name places of this machine."""
    kept = list(argv)
    for option in ("--trl-python", "--work", "--json"):
        kept = [
            word for at, word in enumerate(kept) if option not in (word, word.partition("=")[0], *kept[max(0, at - 1) : at])
        ]
    return shlex.join(["python", "benchmarks/step.py", *kept])


def main(argv: Sequence[str] | None = None) -> int:
    options = read_options(argv)
    command = command_of(sys.argv[1:] if argv is None else argv)
    if options.work is not None:
        options.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="step_", ignore_cleanup_errors=True) as scratch:
        work = Path(scratch) if options.work is None else Path(tempfile.mkdtemp(prefix="step_", dir=options.work.resolve()))
        report = measure(options, work, command)
    print("\n".join(lines(report["rows"])))
    for warning in report["warnings"]:
        print(f"warning: the sides did not do the same work: {warning}", file=sys.stderr)
    failed = [row["name"] for row in report["rows"] if "error" in row]
    if failed:
        print(f"\nfailed: {', '.join(failed)}; their sentences stand behind their rows", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
