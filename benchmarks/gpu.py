"""Sampling and learning on one accelerator, beside plain transformers in the same run: one command, a table, and its JSON.

In: nothing (random weights in the shapes of SmolLM2-135M, Qwen2.5-0.5B and Qwen2.5-3B are made here; nothing is downloaded).
Out: tables, and with --json the figures with date, card and versions. What each part does and counts stands at the top of
`gpu_sampling.py` and `gpu_learner.py`; the limits that figures are compared with are measured on the device itself. A row that
fails says so in the table and in the file, and the others go on; the file is written after every row. With --add rows that
the file has already, from the same card, are kept where this run does not measure them again. On a CPU every part runs too, at
`--shapes tiny`, to see that it works: the figures then mean nothing.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json
    python benchmarks/gpu.py --only learner --shapes 0.5B,3B --json benchmarks/results/gpu.json --add
    python benchmarks/gpu.py --device cpu --shapes tiny --chains 4 --steps 8 --context 32 --reply 4 8 --latency-ms 5
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from gpu_learner import LONGEST, WAYS, learner_row
from gpu_models import SHAPES, Limits, Shape, clean, make_model, measure_limits
from gpu_sampling import agent_row, decode_row, gap_row

HALF = (torch.bfloat16, torch.float16)
PARTS = ("decode", "agent", "gap", "learner")
KEYS = {"decode": ("shape", "chains"), "agent": ("shape", "chains"), "gap": ("shape", "dtype"), "learner": ("shape", "way")}
COLUMNS: dict[str, list[tuple[str, str, str]]] = {
    "decode": [
        ("shape", "shape", ""), ("chains", "chains", ""), ("generate", "generate_tokens_per_s", ",.0f"),
        ("slots", "slots_tokens_per_s", ",.0f"), ("pages", "pages_tokens_per_s", ",.0f"),
        ("pages x generate", "pages_over_generate", ".1f"), ("roofline", "roofline_tokens_per_s", ",.0f"),
        ("of roofline", "pages_share_of_roofline", ".0%"), ("device busy", "pages_device_busy", ".0%"),
        ("engine busy", "pages_engine_busy", ".0%"), ("peak GiB", "pages_peak_gib", ".1f"),
    ],
    "agent": [
        ("shape", "shape", ""), ("chains", "chains", ""), ("generate", "generate_tokens_per_s", ",.0f"),
        ("slots", "slots_tokens_per_s", ",.0f"), ("pages", "pages_tokens_per_s", ",.0f"),
        ("pages x generate", "pages_over_generate", ".1f"), ("of decode", "pages_share_of_decode", ".0%"),
        ("twice in flight", "pages_full_tokens_per_s", ",.0f"), ("of decode", "pages_full_share_of_decode", ".0%"),
        ("engine busy", "pages_engine_busy", ".0%"), ("peak GiB", "pages_peak_gib", ".1f"),
    ],
    "gap": [
        ("shape", "shape", ""), ("type", "dtype", ""), ("tokens", "tokens", ","), ("slots mean", "slots_mean_gap", ".2g"),
        ("slots largest", "slots_largest_gap", ".2g"), ("pages mean", "pages_mean_gap", ".2g"),
        ("pages largest", "pages_largest_gap", ".2g"),
        ("the format's own", "format_mean_gap", ".2g"), ("mean log-prob", "mean_logprob", ".2f"),
    ],
    "learner": [
        ("shape", "shape", ""), ("way", "way", ""), ("tokens", "tokens", ","), ("tokens/s", "tokens_per_s", ",.0f"),
        ("MFU", "mfu", ".1%"), ("padding", "padding", ".0%"), ("peak GiB", "peak_gib", ".1f"),
    ],
}  # fmt: skip
TITLES = {
    "decode": "decode, tokens per second",
    "agent": "agent of four turns, sampled tokens per second, tools included",
    "gap": "sampled against learned log-probs, nats",
    "learner": "one update of the learner",
}


def card(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"CPU {platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    for name in ("agentfly", "torch", "transformers", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


class Report:
    """The figures so far; written after every row, so that a run that is cut short leaves what it measured."""

    def __init__(self, path: Path | None, head: dict[str, Any], add: bool) -> None:
        self.path, self.head = path, head
        self.rows: dict[str, list[dict[str, Any]]] = {part: [] for part in COLUMNS}
        if add and path is not None and path.is_file():
            old = json.loads(path.read_text(encoding="utf-8"))
            if old.get("card") != head["card"]:
                raise SystemExit(f"{path} holds figures of {old.get('card')}, this is {head['card']}: choose another file")
            self.rows = {part: list(old.get(part, [])) for part in COLUMNS}

    def put(self, part: str, key: dict[str, Any], work: Callable[[], dict[str, Any]]) -> None:
        began = time.perf_counter()
        try:
            row = key | work()
        except Exception as error:  # noqa: BLE001  a row that fails must not cost those that were or will be measured
            row = key | {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        row["measured"], row["took_s"] = self.head["date"], round(time.perf_counter() - began, 1)
        same = [old for old in self.rows[part] if all(old.get(name) == key[name] for name in KEYS[part])]
        self.rows[part] = [old for old in self.rows[part] if old not in same] + [row]
        told = row.get("error") or f"{row['took_s']} s"
        print(f"{part:>8}  {' '.join(map(str, key.values()))}: {told}", flush=True)
        self.write()

    def write(self) -> None:
        if self.path is not None:
            self.path.write_text(json.dumps(self.head | self.rows, indent=1) + "\n", encoding="utf-8")

    def compare(self) -> None:
        """The agent's figures as a share of pure decode at as many chains."""
        decoded = {(row["shape"], row["chains"]): row for row in self.rows["decode"]}
        for row in self.rows["agent"]:
            other = decoded.get((row["shape"], row["chains"]), {})
            for cache in ("slots", "pages"):
                for kind in (cache, f"{cache}_full"):
                    ours, pure = row.get(f"{kind}_tokens_per_s"), other.get(f"{cache}_tokens_per_s")
                    if ours and pure:
                        row[f"{kind}_share_of_decode"] = ours / pure
        self.write()

    def lines(self) -> Iterator[str]:
        """Markdown tables."""
        for part, columns in COLUMNS.items():
            if self.rows[part]:
                yield f"\n{TITLES[part]}\n"
                yield "| " + " | ".join(title for title, _, _ in columns) + " |"
                yield "|" + "---|" * len(columns)
                for row in self.rows[part]:
                    shown = [_cell(row.get(name), form) for _, name, form in columns]
                    yield "| " + " | ".join(shown) + " |" + (f" {row['error']}" if "error" in row else "")

    @property
    def num_failed(self) -> int:
        return sum("error" in row and row["measured"] == self.head["date"] for rows in self.rows.values() for row in rows)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def measure(options: argparse.Namespace, report: Report, limits: Limits) -> None:
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    reply = (options.reply[0], options.reply[1])
    for shape in (SHAPES[name] for name in options.shapes):
        if {"decode", "agent"} & set(options.only):
            model = make_model(shape, device, dtype)
            for chains in options.chains:
                key = {"shape": shape.name, "chains": chains}
                if "decode" in options.only:
                    report.put("decode", key, lambda m=model, s=shape, c=chains: decode_row(
                        m, s, limits, c, caches=options.caches, context=options.context, steps=options.steps,
                        generate_steps=options.generate_steps, repeats=options.repeats,
                    ))  # fmt: skip
                if "agent" in options.only:
                    report.put("agent", key, lambda m=model, s=shape, c=chains: agent_row(
                        m, s, c, caches=options.caches, reply=reply, prompt=max(2, options.context // 3),
                        latency_s=options.latency_ms / 1000, generate_steps=options.generate_steps,
                    ))  # fmt: skip
            del model
        if "gap" in options.only:
            for kind in dict.fromkeys((dtype, *(HALF if device.type == "cuda" else ()), torch.float32)):
                key = {"shape": shape.name, "dtype": str(kind).removeprefix("torch.")}
                report.put("gap", key, lambda s=shape, k=kind: gap_of(s, device, k, options))
        if "learner" in options.only:
            for way in WAYS:
                report.put("learner", {"shape": shape.name, "way": way.name}, lambda s=shape, w=way: learner_row(
                    s, w, limits, device=device, dtype=dtype, num_tokens=options.learn_tokens,
                    longest=options.longest, repeats=options.repeats,
                ))  # fmt: skip
    report.compare()


def gap_of(shape: Shape, device: torch.device, kind: torch.dtype, options: argparse.Namespace) -> dict[str, Any]:
    clean(device)
    return gap_row(
        make_model(shape, device, kind), shape, caches=options.caches, chains=min(32, max(options.chains)),
        prompt=max(4, options.context // 2), steps=min(64, options.steps),
    )  # fmt: skip


def _parser() -> argparse.ArgumentParser:
    def words(known: Sequence[str]) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            found = [word.strip() for word in text.split(",")]
            if bad := [word for word in found if word not in known]:
                raise argparse.ArgumentTypeError(f"{bad[0]!r} is not one of {', '.join(known)}")
            return found

        return read

    def counts(text: str) -> list[int]:
        found = [int(word) for word in text.split(",")]
        if min(found) < 1:
            raise argparse.ArgumentTypeError("there must be at least 1 chain")
        return found

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the figures here")
    parser.add_argument("--add", action="store_true", help="keep the rows that the file has and this run does not measure")
    parser.add_argument("--only", type=words(PARTS), default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--shapes", type=words(list(SHAPES)), default=["135M", "0.5B", "3B"], help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--chains", type=counts, default=[64, 256, 512])
    parser.add_argument("--caches", type=words(("slots", "pages")), help="of slots, pages; without: the device's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="of the weights; without: bfloat16, on a CPU float32"
    )
    parser.add_argument("--steps", type=int, default=128, help="tokens that each chain decodes")
    parser.add_argument("--context", type=int, default=600, help="tokens of a chain in the middle of decoding")
    parser.add_argument("--reply", type=int, nargs=2, default=[64, 256], metavar=("LOW", "HIGH"), help="tokens of a reply")
    parser.add_argument("--latency-ms", type=float, default=200.0, help="a tool takes from 0 to this long")
    parser.add_argument("--generate-steps", type=int, default=8, help="steps of `generate` that are timed; 0: all")
    parser.add_argument("--learn-tokens", type=int, default=32768, help="tokens of one update")
    parser.add_argument("--longest", type=int, default=LONGEST, help="tokens of the longest row of an update")
    parser.add_argument("--repeats", type=int, default=3)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if min(options.steps, options.repeats, options.reply[0], options.learn_tokens) < 1 or options.reply[0] > options.reply[1]:
        parser.error("--steps, --repeats, --reply and --learn-tokens are at least 1, and LOW is at most HIGH")
    if options.add and options.json is None:
        parser.error("--add needs --json: the file whose rows are kept")
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: PyTorch sees no GPU; use --device cpu --shapes tiny")
    options.caches = options.caches or ["pages" if device.type == "cuda" else "slots"]
    options.dtype = options.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    limits = measure_limits(device, getattr(torch, options.dtype))
    head: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "card": card(device),
        "versions": versions(),
        "options": {name: value for name, value in vars(options).items() if name not in ("json", "add")},
        "limits": {"copy_gb_per_s": limits.bytes_per_s / 1e9, "matmul_tflops": limits.flops_per_s / 1e12},
    }
    report = Report(options.json, head, options.add)
    print(f"{head['card']}, {head['date']}, " + ", ".join(f"{name} {found}" for name, found in head["versions"].items()))
    print(f"a copy moves {limits.bytes_per_s / 1e9:,.0f} GB/s, products make {limits.flops_per_s / 1e12:,.2f} TFLOP/s")
    measure(options, report, limits)
    print("\n".join(report.lines()))
    if report.num_failed:
        print(f"\n{report.num_failed} rows failed; their sentences stand behind them", file=sys.stderr)
    return 1 if report.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
