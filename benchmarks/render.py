"""What rendering a chain of 128 turns costs, beside one tokenisation of its final text.

In: nothing (a tokenizer is trained here on the project's own text; the templates are those of the tests). Out: a table, or
with --json the figures by name. For each template one chain of 128 turns is played: `start`, then `extend` after every
reply, with a warm renderer, as it is from the second chain on; what a new renderer spends on getting to know a template is
shown apart. The bar is twice a single tokenisation.

A second table has chains of 200 turns in which the template rewrites history at every turn, so that each turn is a new prompt.
Their cost per turn is divided by that of a growing chain (chatml) with the same texts; the bar is three. The last column is
the cost of the last 50 turns divided by that of the turns 11 to 60.

The chains of these two tables have different observations, so that none comes from the cache. A third table has short turns
with tools: 64 groups of chains with 3 native calls and results of a few characters. Its columns are microseconds
per `start`, per `extend` with a result that no other chain has, and per `extend` with the result of a sibling.

    python benchmarks/render.py                  # table
    python benchmarks/render.py --json out.json  # figures: ratio_chatml, ..., restart_ratio_qwen3, ...
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentfly.pocket import model_dir
from agentfly.render import HFRenderer
from agentfly.types import Completion, Message, ToolCall

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "render"))

from render_families import FAMILIES, PLAIN, SPECIAL, TOOLS, template_text  # noqa: E402

BAR = 2.0
NUM_TURNS = 128
RESTART_BAR = 3.0
NUM_RESTARTS = 200
NUM_GROUPS = 64
SHORT = ("pocket", "qwen25", "qwen3", "llama3", "mistral", "gptoss", "glm")
RESTARTING = ("qwen3", "gptoss", "wrapped", "segments", "tagged", "deepseek")
NAMES = ("chatml", "qwen25", "qwen3", "llama3", "mistral", "gemma", "gptoss", "glm")
OBSERVATION = (
    'Page 3 of 9. The shop lists 14 results for "travel kettle"; the first is B07N1 (Steel Kettle 0.8 l, $21.99, 4.3 stars), '
    'then B08KX (Foldable Kettle, $34.50, 4.1 stars).\n{"next": "/search?page=4", "prices": [21.99, 34.5, 18.25]}\n'
)


def make_tokenizer(template: str, corpus: list[str]) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False)
    )
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.add_tokens(PLAIN)
    made.chat_template = template
    return made


class Chain:
    """One scripted chain: what is sampled and what comes back, the same each time."""

    def __init__(self, name: str, tokenizer: Any, characters: int) -> None:
        self.family = FAMILIES[name]
        self.tools: list[Any] = TOOLS if self.family.native else []
        self.opening = [Message("user", "Find a kettle for travelling, and say what two of them cost.")]
        if name != "gemma":
            self.opening.insert(0, Message("system", "You solve tasks step by step with tools."))
        self.turns: list[tuple[Message, Completion, Message]] = []
        for i in range(NUM_TURNS):
            calls = (ToolCall("multiply", {"a": i, "b": 2}, f"call{i:05d}"),) if self.family.native else ()
            thought = f"Step {i}: the price of two is twice the price of one." if name in ("qwen3", "gptoss", "glm") else ""
            text = self.family.reply(thought, "" if calls else f"Step {i}: search the next page.", calls)
            end = tokenizer.convert_tokens_to_ids(self.family.end(calls))
            ids = [*tokenizer.encode(text, add_special_tokens=False), end]
            zeros = [0] * len(ids)
            sampled = Completion(text=text, token_ids=ids, logprobs=[0.0] * len(ids), versions=zeros)
            seen = (f"Result {i}. " + OBSERVATION * (characters // len(OBSERVATION) + 1))[:characters]
            back = Message("tool", seen, name="multiply", tool_call_id=f"call{i:05d}") if calls else Message("user", seen)
            self.turns.append((Message("assistant", text, calls), sampled, back))

    def play(self, renderer: HFRenderer, number: int) -> tuple[float, list[int], int]:
        """Processor seconds spent in the renderer, the final ids, and how often it restarted. Each number has other texts."""
        spent, restarts = 0.0, 0
        # Messages are new objects in every chain, as they are in a run.
        messages = [Message(m.role, m.content) for m in self.opening]
        started = time.process_time()
        ids = renderer.start(messages, self.tools)
        spent += time.process_time() - started
        for reply, sampled, back in self.turns:
            messages.append(Message(reply.role, reply.content, reply.tool_calls))
            messages.append(replace(back, content=f"{number:06d}{back.content[6:]}"))
            started = time.process_time()
            extension = renderer.extend(messages, 1, sampled, self.tools)
            spent += time.process_time() - started
            restarts += extension.restarts
            ids = list(extension.ids) if extension.restarts else [*ids, *sampled.token_ids, *extension.ids]
        return spent, ids, restarts


def measure(name: str, corpus: list[str], characters: int, repeats: int) -> dict[str, float]:
    tokenizer = make_tokenizer(template_text(name), corpus)
    chain = Chain(name, tokenizer, characters)
    renderer = HFRenderer(tokenizer, template_args={"date_string": "1 Jan 2030"})
    first, ids, restarts = chain.play(renderer, 0)
    text = tokenizer.decode(ids)
    backend = tokenizer.backend_tokenizer
    warm, single = [], []
    for number in range(1, repeats + 1):
        gc.collect()
        warm.append(chain.play(renderer, number)[0])
        started = time.process_time()
        backend.encode(text, add_special_tokens=False).ids  # noqa: B018 (reading the ids is part of the work)
        single.append(time.process_time() - started)
    render, once = statistics.median(warm), statistics.median(single)
    return {
        "tokens": len(ids),
        "restarts": restarts,
        "render_ms": render * 1e3,
        "once_ms": once * 1e3,
        "first_ms": first * 1e3,
        "ratio": render / once,
    }


def plain_chain(name: str, tokenizer: Any, renderer: HFRenderer, characters: int, number: int) -> tuple[list[float], int]:
    """Processor seconds of each turn of a chain without tools, with a thought in every reply, and the number of restarts."""
    family = FAMILIES[name]
    messages = [Message("user", "Find a kettle for travelling, and say what two of them cost.")]
    renderer.start(messages)
    spent, restarts = [], 0
    for i in range(NUM_RESTARTS):
        text = family.reply(f"Step {i}: the price of two is twice the price of one.", f"Step {i}: search the next page.", ())
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.convert_tokens_to_ids(family.end(()))]
        zeros = [0] * len(ids)
        sampled = Completion(text=text, token_ids=ids, logprobs=[0.0] * len(ids), versions=zeros)
        seen = (f"{number:06d} {i}. " + OBSERVATION * (characters // len(OBSERVATION) + 1))[:characters]
        messages += [Message("assistant", text), Message("user", seen)]
        started = time.process_time()
        restarts += renderer.extend(messages, 1, sampled).restarts
        spent.append(time.process_time() - started)
    return spent, restarts


def measure_restarts(name: str, corpus: list[str], characters: int, repeats: int) -> dict[str, float]:
    tokenizer = make_tokenizer(template_text(name), corpus)
    renderer = HFRenderer(tokenizer, template_args={"date_string": "1 Jan 2030"})
    plain_chain(name, tokenizer, renderer, characters, 0)
    runs = []
    for number in range(1, repeats + 1):
        gc.collect()
        runs.append(plain_chain(name, tokenizer, renderer, characters, number))
    turns = [statistics.median(run[0][i] for run in runs) for i in range(NUM_RESTARTS)]
    return {
        "turn_ms": statistics.mean(turns) * 1e3,
        "restarts": runs[0][1],
        "growth": statistics.mean(turns[-50:]) / statistics.mean(turns[10:60]),
    }


def show_restarts(corpus: list[str], characters: int, repeats: int) -> dict[str, float]:
    """Prints the second table. Returns its figures by name."""
    growing = measure_restarts("chatml", corpus, characters, repeats)
    print(f"\n{NUM_RESTARTS} turns, a new prompt at every turn; bar {RESTART_BAR} times a growing chain")
    print(f"{'template':10} {'restarts':>8} {'a turn':>10} {'ratio':>6} {'growth':>7}")
    print(f"{'chatml':10} {growing['restarts']:8.0f} {growing['turn_ms']:7.2f} ms {1:6.2f} {growing['growth']:7.2f}")
    figures: dict[str, float] = {"growing_turn_ms": growing["turn_ms"]}
    for name in RESTARTING:
        row = measure_restarts(name, corpus, characters, repeats)
        ratio = row["turn_ms"] / growing["turn_ms"]
        print(f"{name:10} {row['restarts']:8.0f} {row['turn_ms']:7.2f} ms {ratio:6.2f} {row['growth']:7.2f}")
        figures |= {
            f"restart_ratio_{name}": ratio,
            f"restart_turn_ms_{name}": row["turn_ms"],
            f"restart_growth_{name}": row["growth"],
        }
    worst = max(value for key, value in figures.items() if key.startswith("restart_ratio"))
    print(f"worst ratio {worst:.2f}: {'within' if worst <= RESTART_BAR else 'ABOVE'} the bar")
    return figures | {"worst_restart_ratio": worst}


def short_tokenizer(name: str, corpus: list[str]) -> Any:
    return (
        PreTrainedTokenizerFast.from_pretrained(model_dir())
        if name == "pocket"
        else make_tokenizer(template_text(name), corpus)
    )


def short_chains(name: str, tokenizer: Any, renderer: HFRenderer, first: int) -> dict[str, list[float]]:
    """Processor seconds of each start, of each extension with a new result, and of each with the result of a sibling."""
    family = FAMILIES["qwen25" if name == "pocket" else name]
    spent: dict[str, list[float]] = {"start": [], "new": [], "sibling": []}
    for group in range(first, first + NUM_GROUPS):
        opening = [Message("system", "You solve tasks with tools."), Message("user", f"What is {group} * 3 + 1?")]
        started = time.process_time()
        renderer.start(opening, TOOLS)
        spent["start"].append(time.process_time() - started)
        for kind in ("new", "sibling"):
            messages = list(opening)
            for i in range(3):
                call = ToolCall("multiply", {"a": group, "b": i}, f"call{i:05d}")
                text = family.reply("", "", (call,))
                end = renderer.stop_ids[0] if name == "pocket" else tokenizer.convert_tokens_to_ids(family.end((call,)))
                ids = [*tokenizer.encode(text, add_special_tokens=False), end]
                sampled = Completion(text=text, token_ids=ids, logprobs=[0.0] * len(ids), versions=[0] * len(ids))
                result = f"{group * 1000 + i}"
                messages.append(Message("assistant", text, (call,)))
                messages.append(Message("tool", result, name="multiply", tool_call_id=call.id))
                started = time.process_time()
                renderer.extend(messages, 1, sampled, TOOLS)
                spent[kind].append(time.process_time() - started)
    return spent


def show_short(corpus: list[str], repeats: int) -> dict[str, float]:
    """Prints the third table. Returns its figures by name."""
    print("\nshort turns with native calls, microseconds")
    print(f"{'template':10} {'start':>8} {'extend, new':>12} {'extend, sibling':>16}")
    figures: dict[str, float] = {}
    for name in SHORT:
        tokenizer = short_tokenizer(name, corpus)
        renderer = HFRenderer(tokenizer, template_args={"date_string": "1 Jan 2030"})
        short_chains(name, tokenizer, renderer, 0)
        runs = [short_chains(name, tokenizer, renderer, NUM_GROUPS * (i + 1)) for i in range(repeats)]
        row = {kind: statistics.median([1e6 * s for run in runs for s in run[kind]]) for kind in ("start", "new", "sibling")}
        print(f"{name:10} {row['start']:8.1f} {row['new']:12.1f} {row['sibling']:16.1f}")
        figures |= {f"short_{kind}_us_{name}": value for kind, value in row.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--characters", type=int, default=800, help="length of each observation")
    args = parser.parse_args()
    corpus = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))] + [OBSERVATION] * 20

    rows = {name: measure(name, corpus, args.characters, args.repeats) for name in NAMES}
    print(f"{NUM_TURNS} turns, observations of {args.characters} characters; CPU time, median of {args.repeats}; bar {BAR}")
    print(
        f"{'template':10} {'tokens':>7} {'restarts':>8} {'render':>10} {'tokenise once':>14} {'ratio':>6} {'first chain':>12}"
    )
    for name, row in rows.items():
        print(
            f"{name:10} {row['tokens']:7.0f} {row['restarts']:8.0f} {row['render_ms']:7.1f} ms {row['once_ms']:11.1f} ms"
            f" {row['ratio']:6.2f} {row['first_ms']:9.1f} ms"
        )
    worst = max(row["ratio"] for row in rows.values())
    print(f"worst ratio {worst:.2f}: {'within' if worst <= BAR else 'ABOVE'} the bar")
    restarts = show_restarts(corpus, args.characters, args.repeats) | show_short(corpus, args.repeats)
    if args.json:
        figures = {f"{key}_{name}": value for name, row in rows.items() for key, value in row.items()}
        args.json.write_text(json.dumps(figures | restarts | {"worst_ratio": worst, "num_turns": NUM_TURNS}, indent=2) + "\n")


if __name__ == "__main__":
    main()
