"""Make the model for the text worlds: `python scripts/pocket/build_worlds.py [--out DIR] [--good DIR] [--minutes N]`.

Trains a tokenizer, then the phases "good" and "mixed" as build.py does, on the sets `easy_<world>` of `agentfly demos list`.
All dialogues are made before training, by worker processes, and kept in memory. Success is measured with the agents and
environments that training uses, at temperature 1, on the test split. Weights start from the model "pocket" unless `--fresh`.

`--good DIR` keeps the model of the first phase; if DIR already holds one, only the second phase runs. `--minutes` trains as
many steps as fit. The same seed, steps and batch give the same weights on the same device (not with `--minutes`). Each phase's
model is written before it is measured. A folder that holds the model "pocket" is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import math
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from build import DEFAULTS, MIXED_SHARE, Batch, choose_device, new_model, pad_rows, train_phase
from chat import IM_END, PAD, Phase
from tokens import MAX_LENGTH, encode_demos, save_tokenizer
from world_demos import WORLDS, agent_of, dialogues, world_tokenizer, worlds_named

from agentfly import plugins
from agentfly.errors import ConfigError, MissingExtra
from agentfly.pocket import model_dir, worlds_dir
from agentfly.pocket.demos import Demo

log = logging.getLogger(__name__)

SHAPE = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 6}
LAYERS = 4
VOCABULARY = 1536
DIALOGUES = 40_000  # of each world in the first phase; the second has a fifth as many
HELD_OUT = 400  # test tasks of a world; one that has fewer is measured on all it has
CORPUS = 1500  # of each world and phase that the tokenizer is trained on
PHASES: tuple[Phase, ...] = ("good", "mixed")
WEIGHTS = "model.safetensors"
PEAK_RATE = {"good": 1.5e-3, "mixed": 6e-4}  # where the bundled model is the beginning
AT_MOST = 1_000_000  # steps, where only the minutes count
Encoded = tuple[Any, Any]


def begin_from_bundled(model: Any, tokenizer: Any) -> None:
    """Take over what the bundled model knows: above all how to copy, which takes longest to learn from nothing.

    A layer of its number is copied; a layer beyond them begins by changing nothing. A token begins as the mean of the bundled
    tokenizer's tokens for its text.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    bundled: Any = AutoModelForCausalLM.from_pretrained(model_dir(), dtype=torch.float32)
    old = AutoTokenizer.from_pretrained(model_dir())
    with torch.no_grad():
        known, fresh = bundled.get_input_embeddings().weight, model.get_input_embeddings().weight
        for token in range(tokenizer.get_vocab_size()):
            ids = old(tokenizer.decode([token], skip_special_tokens=False), add_special_tokens=False)["input_ids"]
            if ids:
                fresh[token] = known[ids].mean(0)
        model.model.norm.load_state_dict(bundled.model.norm.state_dict())
        for layer, source in itertools.zip_longest(model.model.layers, bundled.model.layers[: len(model.model.layers)]):
            if source is not None:
                layer.load_state_dict(source.state_dict())
            else:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()


def encode_all(tokenizer: Any, demos: dict[str, list[Demo]]) -> dict[str, list[Encoded]]:
    """Ids and masks in arrays, ready to be drawn from. A dialogue that the model could not hold is refused."""
    import numpy as np

    found: dict[str, list[Encoded]] = {}
    for name, each in demos.items():
        rows = encode_demos(tokenizer, each)
        longest = max(len(ids) for ids, _ in rows)
        if longest > MAX_LENGTH:
            raise ConfigError(f"a dialogue of {name} has {longest} tokens, but the model holds {MAX_LENGTH}")
        found[name] = [(np.array(ids, np.int16), np.array(mask, np.int8)) for ids, mask in rows]
        mean = sum(len(ids) for ids, _ in rows) / len(rows)
        print(f"{name}: {len(rows):,} dialogues of {mean:.0f} tokens, the longest {longest}", flush=True)
    return found


def draws(rows: dict[str, list[Encoded]], pad: int, seed: int, phase: Phase, steps: int, size: int) -> Iterator[Batch]:
    """Batches of dialogues of all worlds, mixed by weight."""
    names, weights = list(rows), [WORLDS[name].weight for name in rows]
    for number in range(steps):
        rng = random.Random(f"{seed} {phase} {number}")
        yield pad_rows([rng.choice(rows[name]) for name in rng.choices(names, weights, k=size)], pad)


def success(folder: Path, name: str, count: int, device: str) -> float:
    """The share of held-out tasks that the recipe's agent solves; a chain that the world failed counts for nothing."""
    tasks = plugins.resolve("tasks", f"easy_{name}")("test", count, 0)
    agent = agent_of(name, folder, engine={"device": device})
    try:
        rewards = [reward for reward in agent.run_sync(tasks).rewards if reward is not None]
    finally:
        asyncio.run(agent.close())
    return sum(reward >= 1.0 for reward in rewards) / max(1, len(rewards))


def evaluate(folder: Path, names: Sequence[str], count: int, device: str, label: str) -> dict[str, float]:
    figures = {}
    for name in names:
        try:
            figures[name] = round(success(folder, name, count, device), 4)
        except MissingExtra as error:
            print(f"{name} is not evaluated: {error}", flush=True)
        except Exception:  # whatever it is, the other worlds' figures and the model are worth more
            log.exception("%s is not evaluated", name)
    print(label, "  ".join(f"{name} {figure:.3f}" for name, figure in figures.items()), flush=True)
    return figures


def build(
    out: Path,
    *,
    worlds: Sequence[str] = tuple(WORLDS),
    device: str = "auto",
    steps: int | None = None,
    minutes: float | None = None,
    good: Path | None = None,
    batch: int | None = None,
    seed: int = 0,
    layers: int = LAYERS,
    fresh: bool = False,
    workers: int | None = None,
    count: int = DIALOGUES,
    evaluations: int = HELD_OUT,
) -> dict[str, Any]:
    """Train the tokenizer and the model, write both to `out`, and give back the figures that stand in its build.json."""
    import torch

    for folder, option in ((out, "--out"), (good, "--good")):
        if folder is not None and folder.resolve() == model_dir().resolve():
            raise ConfigError(f"{option} is the folder of the model 'pocket', which build_worlds does not make: name another")
    if good is not None and good.resolve() == out.resolve():
        raise ConfigError("--good and --out are the same folder, but each holds a different model")
    device = choose_device(device)
    defaults = DEFAULTS[device.partition(":")[0]]
    steps, batch = steps or (AT_MOST if minutes else defaults["steps"]), batch or defaults["batch"]
    taken = good is not None and (good / WEIGHTS).is_file() and (good / "build.json").is_file()
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    if device.startswith("cuda"):  # it holds for the whole process, where checks of float32 read it
        torch.backends.cuda.matmul.allow_tf32 = True

    started = time.perf_counter()
    phases = PHASES[1:] if taken else PHASES
    demos = make_dialogues(worlds, seed, count, workers, phases)
    played = [name for name in worlds if all(name in demos[phase] for phase in phases)]
    if good is not None and taken:
        raw, model = open_good(good)
        layers = model.config.num_hidden_layers
    else:
        texts = (demo for phase in PHASES for name in played for demo in itertools.islice(demos[phase][name], CORPUS))
        raw = world_tokenizer(played, texts, VOCABULARY)
        entries = raw.get_vocab()
        model = new_model(len(entries), entries[IM_END], entries[PAD], {**SHAPE, "num_hidden_layers": layers})
        if not fresh:
            begin_from_bundled(model, raw)
    save_tokenizer(raw, out)
    pad, entries = raw.token_to_id(PAD), raw.get_vocab()
    model = model.to(device)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"tokenizer {len(entries)} entries, model {size:,} parameters, {_since(started)} s", flush=True)

    figures: dict[str, Any] = {"parameters": size, "vocabulary": len(entries), "worlds": played, "seed": seed}
    figures |= {"layers": layers, "fresh": fresh, "batch": batch, "device": device}
    figures["left_out"] = [name for name in worlds if name not in played]

    def measure(folder: Path, phase: Phase) -> None:
        chains = evaluations if phase == "mixed" else max(1, evaluations // 4)
        figures[phase]["success"] = evaluate(folder, played, chains, device, f"after {phase}:")
        write_figures(folder, figures if folder is out else {**kept, "good": figures["good"]}, started)

    kept = dict(figures)
    if taken:
        figures["good"] = json.loads((good / "build.json").read_text(encoding="utf-8"))["good"]  # type: ignore[operator]
    for phase in phases:
        share = MIXED_SHARE if phase == "mixed" else 1.0
        rows = encode_all(raw, {name: demos[phase].pop(name) for name in played})
        number = max(1, round(steps * share))
        loss, number = train_phase(
            model,
            draws(rows, pad, seed, phase, number, batch),
            phase,
            number,
            peak=None if fresh else PEAK_RATE[phase],
            seconds=60 * minutes * share / (1 + MIXED_SHARE) if minutes else math.inf,
        )
        figures[phase] = {"steps": number, "loss": round(loss, 4), "dialogues": {name: len(rows[name]) for name in rows}}
        folder = good if phase == "good" and good is not None else out
        save_tokenizer(raw, folder)
        model.save_pretrained(folder)
        write_figures(folder, figures, started)
        if evaluations and folder is out:  # what is kept apart waits until all training is done
            measure(out, phase)
    if evaluations and good is not None and not taken:
        measure(good, "good")
        write_figures(out, figures, started)
    return figures


def open_good(folder: Path) -> tuple[Any, Any]:
    """The tokenizer and the model of a first phase that was kept."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Tokenizer.from_file(str(folder / "tokenizer.json")), model


def write_figures(folder: Path, figures: dict[str, Any], started: float) -> None:
    figures["seconds"] = _since(started)
    (folder / "build.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def make_dialogues(
    names: Sequence[str], seed: int, count: int, workers: int | None, phases: Sequence[Phase] = PHASES
) -> dict[Phase, dict[str, list[Demo]]]:
    """The dialogues of the phases, made ahead of training by worker processes, or here where there are none."""
    workers = max(0, (os.cpu_count() or 1) - 2) if workers is None else workers
    started = time.perf_counter()
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn")) if workers else None
    try:
        mixed = max(1, round(count * MIXED_SHARE))
        made = {phase: dialogues(names, phase, seed, count if phase == "good" else mixed, pool) for phase in phases}
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    total = sum(len(each) for found in made.values() for each in found.values())
    print(f"{total:,} dialogues made in {_since(started)} s", flush=True)
    return made


def _since(started: float) -> int:
    return round(time.perf_counter() - started)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python scripts/pocket/build_worlds.py", description="Make a model for the worlds.")
    parser.add_argument("--out", type=Path, default=worlds_dir(), help="folder of the model; that of pocket-worlds by default")
    parser.add_argument("--worlds", default=",".join(WORLDS), help=f"some of {','.join(WORLDS)}")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--steps", type=int, help="steps of the first phase; the second has a fifth as many")
    parser.add_argument("--minutes", type=float, help="of training, as many steps as fit; no more than --steps")
    parser.add_argument("--good", type=Path, help="folder that keeps the model of the first phase, or has it already")
    parser.add_argument("--batch", type=int, help="dialogues per step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=LAYERS, help="fewer are quicker, more know more")
    parser.add_argument("--fresh", action="store_true", help="begin with random weights, not with the bundled model's")
    parser.add_argument("--workers", type=int, help="processes that make the data")
    parser.add_argument("--dialogues", type=int, default=DIALOGUES, help="different dialogues of each world")
    parser.add_argument("--evaluations", type=int, default=HELD_OUT, help="held-out tasks of each world; 0 for none")
    given = parser.parse_args(arguments)
    try:
        for name in ("dialogues", "layers", "steps", "batch"):
            if (value := getattr(given, name)) is not None and value < 1:
                raise ConfigError(f"--{name} must be at least 1, not {value}")
        if given.minutes is not None and not 0 < given.minutes < math.inf:
            raise ConfigError(f"--minutes must be more than 0, not {given.minutes:g}")
        if not 0 <= given.evaluations <= HELD_OUT:
            raise ConfigError(f"--evaluations must be from 0 to {HELD_OUT}, not {given.evaluations}")
        figures = build(
            given.out, worlds=worlds_named(given.worlds), device=given.device, steps=given.steps, minutes=given.minutes,
            good=given.good, batch=given.batch, seed=given.seed, layers=given.layers, fresh=given.fresh,
            workers=given.workers, count=given.dialogues, evaluations=given.evaluations,
        )  # fmt: skip
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(figures))
    for name in figures["worlds"]:
        print(f"agentfly train recipes/{name}.toml agent.model={given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
