"""Dialogues of the text worlds, from the demonstration sets `easy_<world>`, and the tokenizer trained on them.

The system message is the one that `ReactAgent` writes for the tools of `recipes/<world>.toml`, so a rollout sees the token ids
that were trained on. Dialogues are made in chunks; a chunk depends only on its number, so the number of workers does not
change the data. A world whose demonstrations cannot be made (ScienceWorld without Java) is left out with a printed notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chat import REACT_FIRST_LINE, REACT_HOW, Phase, react_system
from tokens import WORD, corpus, train_tokenizer

from agentfly import plugins
from agentfly.agents.react import ReactAgent
from agentfly.errors import ConfigError, MissingExtra
from agentfly.pocket.demos import Demo

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHUNK = 500
CHUNK_S = 600.0


@dataclass(frozen=True, slots=True)
class WorldSettings:
    """What the recipe of a world says, and how its demonstrations are drawn.

    `weight` is its share of a batch, `most` the dialogues of a phase that are worth their time, `mistakes` the share of them
    with a slip in the mixed phase. `apart` says that the set keeps itself on disk and is parallel by itself: it is asked once
    for everything, in this process.
    """

    tool: str
    argument: str
    reward: str
    max_turns: int
    max_tokens: int
    weight: int
    mistakes: float
    most: int = 1_000_000
    apart: bool = False


WORLDS = {
    "alfworld": WorldSettings("alfworld_step", "action", "alfworld_success", 8, 40, 38, 0.7),
    "webshop": WorldSettings("webshop_step", "action", "webshop_success", 6, 48, 27, 0.6),
    "scienceworld": WorldSettings(
        "scienceworld_explorer", "action", "scienceworld_success", 7, 48, 12, 0.6, most=1000, apart=True
    ),
    "search": WorldSettings("search", "query", "qa_exact_match", 4, 40, 23, 0.6),
}

# Fixed text that is one token each: what the worlds say in every dialogue. The lines of the tools are added to it.
PHRASES = (
    "You are in the middle of a room. Looking quickly around you, you see",
    "\nYour task is to:",
    "You arrive at",
    ", you see",
    "You pick up the",
    "You move the",
    "You teleport to the",
    " to the inventory.",
    " Then move it to the",
)
VERBS = r"go to|teleport to|focus on|pick up|look around|search\[|click\["
# As in tokens.py, but a word before a name or a number takes the blank with it: a name is then written with the same tokens in
# a question, in a page, in JSON and in an answer, and can be copied.
SPLITS = "|".join(
    (
        r"\d",
        r"(?:system|user|assistant)\n(?:Observation: ?)?",
        r"Thought: (?:choose|[^\d\n]*)",
        r"\nAction:",
        r"\n?Answer:(?: (?=[A-Z\d]))?",
        rf'\nInput: \{{"{WORD}": "',
        VERBS,
        r'\]?"\}',
        rf" ?{WORD} (?=[A-Z\d])",
        rf" ?{WORD}",
        r" ?[^\w\s]+ (?=[A-Z\d])",
        r" ?[^\w\s]+",
        r"\s+",
    )
)


def worlds_named(names: str) -> tuple[str, ...]:
    """`alfworld,search` as names, each once and known."""
    found = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in found if name not in WORLDS]
    if unknown or not found:
        raise ConfigError(f"--worlds is a list of {', '.join(WORLDS)}, not {names!r}")
    return found


def agent_of(name: str, model: str | Path = "pocket", **options: Any) -> ReactAgent:
    """The agent of `recipes/<world>.toml`, judged by success alone. The model is opened when it is first needed."""
    world = WORLDS[name]
    sampling = {"temperature": 1.0, "max_tokens": world.max_tokens, "seed": 0}
    return ReactAgent(model, tools=[world.tool], reward=world.reward, max_turns=world.max_turns, sampling=sampling, **options)


def prompt_of(name: str) -> str:
    return agent_of(name).prompt


def chunk(name: str, phase: Phase, seed: int, number: int, size: int) -> list[list[dict[str, str]]]:
    """The messages of `size` dialogues, without the system message: fewer where the set has no more in one draw."""
    world = WORLDS[name]
    make = plugins.resolve("demos", f"easy_{name}")
    rows = make(size, _chunk_seed(seed, phase, number), mistakes=world.mistakes if phase == "mixed" else 0.0)
    return [row["messages"] for row in rows]


def _chunk_seed(seed: int, phase: Phase, number: int) -> int:
    return 1_000_000 * seed + 2 * number + (phase == "mixed")


def dialogues(
    names: Sequence[str], phase: Phase, seed: int, count: int, pool: ProcessPoolExecutor | None = None
) -> dict[str, list[Demo]]:
    """`count` dialogues of every world, or as many as it has to give; a world that cannot be played here is left out."""
    waiting: dict[str, list[Any]] = {}
    for name in names:
        wanted = min(count, WORLDS[name].most)
        size = wanted if WORLDS[name].apart else min(CHUNK, wanted)
        jobs = [(name, phase, seed, number, min(size, wanted - at)) for number, at in enumerate(range(0, wanted, size))]
        waiting[name] = [pool.submit(chunk, *job) for job in jobs] if pool and not WORLDS[name].apart else jobs
    found: dict[str, list[Demo]] = {}
    for name, jobs in waiting.items():
        system = prompt_of(name)
        try:
            made = [chunk(*job) if isinstance(job, tuple) else job.result(timeout=CHUNK_S) for job in jobs]
        except MissingExtra as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        found[name] = [as_demo(name, system, messages) for messages in (each for rows in made for each in rows)]
    if not found:
        raise ConfigError("none of the worlds can be played here, so there is nothing to learn from")
    return found


def as_demo(name: str, system: str, messages: list[dict[str, str]]) -> Demo:
    replies = sum(message["role"] == "assistant" for message in messages)
    return Demo([{"role": "system", "content": system}, *messages], learn=[True] * replies, kind=name)


def fixed_text(names: Iterable[str]) -> list[str]:
    """Every phrase that is one token: the prompt around the tools, the tools' lines, how a call begins."""
    found = [REACT_FIRST_LINE, REACT_HOW, *PHRASES]
    for name in names:
        world = WORLDS[name]
        prompt = prompt_of(name)
        lines = prompt.removeprefix(REACT_FIRST_LINE).removesuffix(REACT_HOW)
        assert react_system([lines.removeprefix("\nTools:\n- ")]) == prompt
        found += [lines, f'\nAction: {world.tool}\nInput: {{"{world.argument}": "']
    return found


def world_tokenizer(names: Sequence[str], demos: Iterable[Demo], vocabulary: int) -> Tokenizer:
    return train_tokenizer(corpus(demos), vocabulary, splits=SPLITS, added=fixed_text(names))
