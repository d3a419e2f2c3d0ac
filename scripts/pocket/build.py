"""Make the pocket model: `python scripts/pocket/build.py [--device auto] [--steps N] [--out DIR]`.

Writes a folder that `from_pretrained` loads and prints held-out success. All data is generated from a seed.

  tokenizer   byte-level BPE trained on dialogues
  phase good  `--steps` steps on dialogues that solve their task: the model learns the formats, to choose tools and to copy
  phase mixed a fifth as many on dialogues that often do not: the warm start, which leaves RL something to do

The same seed, steps and batch give the same weights on the same device, whatever the number of workers (on a GPU: up to the
order of floating-point sums).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chat import PAD, Phase
from dialogues import demonstrations
from tokens import MAX_LENGTH, VOCABULARY, corpus, encode_demo, save_tokenizer, train_tokenizer

from agentfly.errors import ConfigError
from agentfly.pocket import model_dir

if TYPE_CHECKING:
    import numpy as np

SHAPE = {"hidden_size": 192, "num_hidden_layers": 3, "intermediate_size": 512, "num_attention_heads": 6}
# Defaults by device: on a GPU a few minutes, on two CPU cores an hour or two.
DEFAULTS = {"cuda": {"steps": 1500, "batch": 512}, "cpu": {"steps": 5000, "batch": 48}}
MIXED_SHARE = 0.2
CORPUS = 6000  # dialogues of each phase that the tokenizer is trained on
CONTEXT_WEIGHT = {"good": 0.1, "mixed": 0.02}
PEAK_RATE = {"good": 3e-3, "mixed": 6e-4}
Batch = tuple["np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]

_worker: dict[str, Any] = {}


def make_batch(tokenizer_file: str, seed: int, phase: Phase, number: int, size: int) -> Batch:
    """One batch: ids, and marks (1 learn, 0 context, -1 padding). It depends on its number alone, not on who makes it."""
    from tokenizers import Tokenizer

    if tokenizer_file not in _worker:
        _worker[tokenizer_file] = Tokenizer.from_file(tokenizer_file)
    encoded = [encode_demo(_worker[tokenizer_file], demo) for demo in demonstrations(f"{seed} {phase} {number}", phase, size)]
    return pad_rows(encoded, _worker[tokenizer_file].token_to_id(PAD))


def pad_rows(encoded: Sequence[tuple[Any, Any]], pad: int) -> Batch:
    """Ids and masks of dialogues side by side, padded on the right."""
    import numpy as np

    shape = (len(encoded), max(len(ids) for ids, _ in encoded))
    rows, marks = np.full(shape, pad, np.int32), np.full(shape, -1, np.int8)
    for row, (ids, mask) in enumerate(encoded):
        rows[row, : len(ids)], marks[row, : len(ids)] = ids, mask
    return rows, marks


def batches(
    pool: ProcessPoolExecutor | None, tokenizer_file: str, seed: int, phase: Phase, steps: int, size: int
) -> Iterator[Batch]:
    """Batches in order, made ahead of time where there are workers, but never many more than are needed next."""
    if pool is None:
        yield from (make_batch(tokenizer_file, seed, phase, number, size) for number in range(steps))
        return
    waiting: deque[Future[Batch]] = deque()
    for number in range(steps):
        waiting.append(pool.submit(make_batch, tokenizer_file, seed, phase, number, size))
        if len(waiting) > 64:
            yield waiting.popleft().result(timeout=300)
    while waiting:
        yield waiting.popleft().result(timeout=300)


def new_model(vocabulary: int, stop: int, pad: int, shape: Mapping[str, int] | None = None) -> Any:
    """A Llama with fresh weights; `shape` is SHAPE where none is given."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    shape = SHAPE if shape is None else shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        **dict[str, Any](shape),
        num_key_value_heads=shape["num_attention_heads"],
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=pad,
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=stop, pad_token_id=pad, do_sample=True, max_new_tokens=128
    )
    return model


def train_phase(
    model: Any,
    data: Iterator[Batch],
    phase: Phase,
    steps: int,
    *,
    report: int = 200,
    peak: float | None = None,
    seconds: float = math.inf,
) -> tuple[float, int]:
    """Plain supervised steps: cross-entropy on the replies, and a little on everything else. The last loss and the steps out.

    `peak` is the highest learning rate, the phase's own where none is given. It falls with the share of the steps that are
    done, or with the share of `seconds` that are gone, whichever is more; the phase ends with the first that is used up.
    """
    import torch
    from torch.nn import functional

    cuda = model.device.type == "cuda"
    peak = PEAK_RATE[phase] if peak is None else peak
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98), weight_decay=0.01, fused=cuda)
    warmup = max(1, min(200, steps // 10))
    started, tokens, loss_value, step = time.perf_counter(), 0, math.nan, 0
    model.train()
    for step, (rows, marks) in enumerate(data, start=1):
        gone = (time.perf_counter() - started) / seconds
        done = min(1.0, max((step - warmup) / max(1, steps - warmup), gone, 0.0))
        decay = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = peak * min(step / warmup, decay)
        ids = torch.from_numpy(rows).to(model.device, torch.long)
        kinds = torch.from_numpy(marks).to(model.device)[:, 1:].flatten()
        weights = (kinds == 1).float() + CONTEXT_WEIGHT[phase] * (kinds == 0).float()
        # Padding stands on the right of a causal model, so nothing that counts can see it and no mask is needed.
        logits = model(input_ids=ids[:, :-1]).logits
        losses = functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
        loss = (losses * weights).sum() / weights.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tokens += ids.numel()
        last = step == steps or gone >= 1.0
        if step % report == 0 or last:
            loss_value = loss.item()
            spent = time.perf_counter() - started
            print(
                f"{phase} step {step}/{steps}  loss {loss_value:.4f}  {tokens / spent:,.0f} tokens/s  {spent:.0f} s",
                flush=True,
            )
        if last:
            break
    model.eval()
    return loss_value, step


def evaluate(model: Any, tokenizer: Any, count: int, label: str) -> dict[str, float]:
    """Held-out success at temperature 1, by kind of task, printed as it comes."""
    from build_evaluate import KINDS, success

    figures = {}
    for kind in KINDS:
        figures[kind] = round(success(model, tokenizer, kind, count), 4)
    print(label, "  ".join(f"{kind} {figure:.3f}" for kind, figure in figures.items()), flush=True)
    return figures


def choose_device(device: str) -> str:
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.partition(":")[0] not in DEFAULTS:
        raise ConfigError(f"--device is auto, cpu or cuda, not {device!r}")
    return device


def build(
    out: Path,
    *,
    device: str = "auto",
    steps: int | None = None,
    batch: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    evaluations: int = 800,
) -> dict[str, Any]:
    """Train the tokenizer and the model, write both to `out`, and give back the figures that stand in its build.json."""
    import torch
    from transformers import AutoTokenizer

    device = choose_device(device)
    defaults = DEFAULTS[device.partition(":")[0]]
    steps, batch = steps or defaults["steps"], batch or defaults["batch"]
    workers = max(0, (os.cpu_count() or 1) - 2) if workers is None else workers
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    if device.startswith("cuda"):  # it holds for the whole process, where checks of float32 read it
        torch.backends.cuda.matmul.allow_tf32 = True

    started = time.perf_counter()
    texts = itertools.chain(demonstrations(f"{seed} corpus", "good", CORPUS), demonstrations(f"{seed} corpus", "mixed", CORPUS))
    raw = train_tokenizer(corpus(texts), VOCABULARY)
    save_tokenizer(raw, out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = new_model(len(tokenizer), int(tokenizer.eos_token_id), int(tokenizer.pad_token_id)).to(device)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"tokenizer {len(tokenizer)} entries, model {size:,} parameters, {time.perf_counter() - started:.0f} s", flush=True)

    figures: dict[str, Any] = {"parameters": size, "vocabulary": len(tokenizer), "seed": seed, "batch": batch, "device": device}
    plan: Sequence[tuple[Phase, int]] = (("good", steps), ("mixed", max(1, round(steps * MIXED_SHARE))))
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "tokenizer.json")
        raw.save(file)
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers else None
        try:
            for phase, count in plan:
                loss, _ = train_phase(model, batches(pool, file, seed, phase, count, batch), phase, count)
                figures[phase] = {"steps": count, "loss": round(loss, 4)}
                model.save_pretrained(out)
                if evaluations:
                    chains = evaluations if phase == "mixed" else max(1, evaluations // 4)
                    figures[phase]["success"] = evaluate(model, tokenizer, chains, f"after {phase}:")
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)
    figures["seconds"] = round(time.perf_counter() - started)
    (out / "build.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python scripts/pocket/build.py", description="Make the pocket model.")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--steps", type=int, help="steps of the first phase; the second has a fifth as many")
    parser.add_argument("--batch", type=int, help="dialogues per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="processes that make the data")
    parser.add_argument("--evaluations", type=int, default=800, help="held-out chains per kind of task; 0 for none")
    parser.add_argument("--out", type=Path, default=model_dir())
    given = parser.parse_args(arguments)
    try:
        figures = build(
            given.out, device=given.device, steps=given.steps, batch=given.batch, seed=given.seed, workers=given.workers,
            evaluations=given.evaluations,
        )  # fmt: skip
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
