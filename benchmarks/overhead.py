"""What the rollout itself costs: turns per second with a scripted engine and a trivial tool, beside a bare asyncio loop.

The bare loop awaits the same two things a turn (the engine's `generate` and the tool's own coroutine) and does nothing
else. Reported for 1, 64 and 1,024 chains of 10 turns, and for chains of 100 turns, which should cost ten times as much and
not a hundred. Each figure is the median of several runs, the two kinds taken in turn. A last row has 512 chains with native
calls and the tokenizer of the bundled model: each turn also renders the chat template's text and parses the call.
`--json PATH` writes the figures by name.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import time
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

from agentfly import ReactAgent, ToolAgent, tool
from agentfly.pocket import model_dir
from agentfly.render import HFRenderer
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Completion, Request, Sampling

REPLY = 'Thought: add\nAction: plus\nInput: {"a": 1, "b": 2}'


async def plus_plain(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


@tool(name="plus")
async def plus(a: int, b: int) -> int:
    """Add two numbers."""
    await asyncio.sleep(0)
    return a + b


class YieldingEngine(ScriptedEngine):
    """Gives way to the loop once per call, as every real engine does."""

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        return await super().generate(request)


def engine_for(turns: int) -> ScriptedEngine:
    return YieldingEngine([REPLY] * turns)


async def bare(chains: int, turns: int) -> float:
    engine = engine_for(turns)
    sampling = Sampling()

    async def chain(number: int) -> None:
        prompt = ByteRenderer().encode("question")
        session = str(number)
        for _ in range(turns):
            await engine.generate(Request(prompt, sampling, session))
            await plus_plain(1, 2)

    started = time.perf_counter()
    await asyncio.gather(*(chain(number) for number in range(chains)))
    return time.perf_counter() - started


async def framework(chains: int, turns: int) -> float:
    agent = ReactAgent(engine_for(turns), tools=[plus], renderer=ByteRenderer(), max_turns=turns)
    rows = [{"question": "question"}]
    started = time.perf_counter()
    result = await agent.run(rows, num_chains=chains, max_concurrency=chains)
    seconds = time.perf_counter() - started
    assert all(len(trajectory.turns) == turns for trajectory in result)
    assert all(trajectory.turns[0].results[0].observation == "3" for trajectory in result)
    return seconds


class CallingEngine(ScriptedEngine):
    """Replies with a native call each time, one of 50."""

    def __init__(self, renderer: HFRenderer) -> None:
        super().__init__([])
        texts = [f'<tool_call>\n{{"name": "plus", "arguments": {{"a": {i}, "b": 2}}}}\n</tool_call>' for i in range(50)]
        self.replies = cycle([(text, [*renderer.encode(text), renderer.stop_ids[0]]) for text in texts])

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        text, ids = next(self.replies)
        return Completion(text=text, token_ids=list(ids), logprobs=[0.0] * len(ids), versions=[0] * len(ids))


@lru_cache
def bundled_renderer() -> HFRenderer:
    from transformers import PreTrainedTokenizerFast

    return HFRenderer(PreTrainedTokenizerFast.from_pretrained(model_dir()))


async def native(chains: int, turns: int) -> float:
    renderer = bundled_renderer()
    agent = ToolAgent(CallingEngine(renderer), tools=[plus], renderer=renderer, max_turns=turns)
    rows = [{"question": f"question {row}"} for row in range(chains // 8)]
    agent.check_model()
    started = time.perf_counter()
    result = await agent.run(rows, num_chains=8, max_concurrency=chains)
    seconds = time.perf_counter() - started
    assert all(len(trajectory.turns) == turns and trajectory.turns[0].results[0].error is None for trajectory in result)
    return seconds


def measure(chains: int, turns: int, repeats: int, run: Any = framework) -> tuple[float, float]:
    """Microseconds per turn of the bare loop and of the framework."""
    times: dict[str, list[float]] = {"bare": [], "framework": []}
    for _ in range(repeats):
        for name, function in (("bare", bare), ("framework", run)):
            gc.collect()
            times[name].append(asyncio.run(function(chains, turns)))
    scale = 1e6 / (chains * turns)
    return statistics.median(times["bare"]) * scale, statistics.median(times["framework"]) * scale


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH", help="write the figures to a file")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    measure(8, 10, 2)
    print(f"{'chains':>7} {'turns':>6} {'bare us/turn':>13} {'agentfly us/turn':>17} {'ratio':>6} {'turns/s':>9}")
    for chains, turns in ((1, 10), (64, 10), (1024, 10), (64, 100)):
        plain, full = measure(chains, turns, arguments.repeats * (20 if chains == 1 else 1))
        name = f"{chains}x{turns}"
        figures[f"bare_us_per_turn_{name}"] = plain
        figures[f"agentfly_us_per_turn_{name}"] = full
        figures[f"ratio_{name}"] = full / plain
        figures[f"turns_per_s_{name}"] = 1e6 / full
        print(f"{chains:>7} {turns:>6} {plain:>13.1f} {full:>17.1f} {full / plain:>6.2f} {1e6 / full:>9.0f}")
    plain, full = measure(512, 10, arguments.repeats, native)
    figures |= {"native_us_per_turn_512x10": full, "native_ratio_512x10": full / plain}
    print(f"{512:>7} {10:>6} {plain:>13.1f} {full:>17.1f} {full / plain:>6.2f} {1e6 / full:>9.0f}  native calls, tokenizer")
    figures["cost_of_100_turns_over_10"] = 10 * figures["agentfly_us_per_turn_64x100"] / figures["agentfly_us_per_turn_64x10"]
    figures["growth_1024_over_64_chains"] = figures["agentfly_us_per_turn_1024x10"] / figures["agentfly_us_per_turn_64x10"]
    print(f"a chain of 100 turns costs {figures['cost_of_100_turns_over_10']:.1f}x one of 10")
    print(f"a turn among 1,024 chains costs {figures['growth_1024_over_64_chains']:.2f}x one among 64")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
