"""Write the tables of the documentation from the code.

In: README.md, docs/**/*.md and pyproject.toml with marks `<!-- generated: NAME -->` ... `<!-- /generated -->`. Out: the same
files with what stands between the marks made anew. `--check` writes nothing and fails if a file would change. Refuses a NAME
without a table.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from agentfly import plugins
from agentfly.cli import make_parser
from agentfly.config import keys
from agentfly.errors import AgentFlyError
from agentfly.foreign_names import foreign_names
from agentfly.learn.algorithms import ALGORITHMS, ALWAYS
from agentfly.learn.settings import LossSettings

ROOT = Path(__file__).parent.parent
LIMITS = """\
- A room has at most the lines of code of its row, all rooms together {0:,}.
- A file has at most {MAX_LINES_OF_A_FILE} lines, a function {MAX_LINES_OF_A_FUNCTION}, a folder {MAX_FILES_OF_A_FOLDER}
  modules, the docstring of a module {MAX_DOCSTRING_OF_A_MODULE} lines of prose. The longest chain of imports has
  {MAX_IMPORT_CHAIN} files, and at most {MAX_ANY} annotations are `Any`.
- {1} files, {2} functions, {3} circles of folders and {4} class names stand above their limit today. They are listed,
  and a test asks for every row that is no longer needed.
"""
MARKS = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def code(value: Any) -> str:
    return f"`{value}`"


def shown(value: Any) -> str:
    """A default as one would write it in a config file."""
    return "not set" if value is None else code(json.dumps(value, ensure_ascii=False))


def config_table() -> str:
    """One table per section, and the few keys that stand outside."""
    sections: dict[str, list[list[str]]] = {}
    for key, kind, default, text in keys():
        sections.setdefault(key.rpartition(".")[0], []).append([code(key), kind, shown(default), text])
    parts = []
    for name, rows in sections.items():
        title = f"## `[{name}]`" if name else "## At the top"
        parts.append(f"\n{title}\n\n{table(('key', 'type', 'default', 'meaning'), rows)}")
    return "".join(parts) + "\n"


def metrics_table() -> str:
    from agentfly.watch.metrics import METRICS

    return table(("metric", "unit", "meaning"), ([code(m.name), m.unit, m.description] for m in METRICS.values()))


def algorithms_table() -> str:
    rows = ([code(row.name), row.description, _paper(row.paper)] for row in ALGORITHMS.values())
    return table(("algorithm", "advantage", "paper"), rows)


def loss_always() -> str:
    return ", ".join(code(name) for name in (f.name for f in fields(LossSettings)) if name in ALWAYS) + ".\n"


def loss_table() -> str:
    rows = []
    for row in ALGORITHMS.values():
        also = ", ".join(code(name) for name in sorted(row.reads - ALWAYS)) or "-"
        own = {**row.defaults, **{f"options.{key}": value for key, value in row.options.items()}}
        defaults = ", ".join(code(f"{key} = {json.dumps(value)}") for key, value in own.items()) or "-"
        rows.append([code(row.name), also, defaults])
    return table(("algorithm", "also reads", "its own defaults"), rows)


def rooms_table() -> str:
    """Every room with its rank and limit (as tests/house/rooms.py has them) and the first line of its docstring."""
    rooms: dict[int, list[list[str]]] = {}
    for name, (rank, limit) in _plan()["ROOMS"].items():
        if name.startswith("__"):
            continue
        base = ROOT / "src" / "agentfly"
        folder, file = base / name / "__init__.py", base / f"{name}.py"
        found = folder if folder.is_file() else file
        if found.is_file():
            doc = ast.get_docstring(ast.parse(found.read_text(encoding="utf-8"))) or ""
            first = doc.partition("\n\n")[0].replace("\n", " ")
            row = [str(rank), code(f"{name}/" if found is folder else f"{name}.py"), first, f"{limit:,}"]
            rooms.setdefault(rank, []).append(row)
    return table(
        ("rank", "room", "what it is for", "lines of code, at most"), (row for rank in sorted(rooms) for row in rooms[rank])
    )


def limits_list() -> str:
    """The limits of shape that tests/house checks."""
    plan = _plan()
    listed = [len(plan[name]) for name in ("LONG_FILES", "LONG_FUNCTIONS", "FOLDERS_IN_A_CIRCLE", "SHARED_CLASS_NAMES")]
    return LIMITS.format(sum(room.limit for room in plan["ROOMS"].values()), *listed, **plan)


def agents_table() -> str:
    classes = {name: target.partition(":")[2] for name, target in plugins.BUILTIN["agents"].items()}
    return table(("name", "class", "how it acts"), ([code(n), code(c), _says("agents", n)] for n, c in classes.items()))


def parsers_table() -> str:
    from agentfly.render.parsers.families import MODELS

    return table(("parser", "models"), ([code(name), MODELS[name]] for name in plugins.BUILTIN["parsers"]))


def foreign_table(*libraries: str) -> Callable[[], str]:
    """The names of these libraries beside ours."""

    def make() -> str:
        rows = [row for row in foreign_names() if row.library in libraries]
        return table(("theirs", "ours", "note"), ([code(row.name), code(row.ours), row.note] for row in rows))

    return make


def names_table(kind: str) -> Callable[[], str]:
    return lambda: table((kind.removesuffix("s"), "what it does"), ([code(n), _says(kind, n)] for n in plugins.BUILTIN[kind]))


def extras() -> dict[str, dict[str, Any]]:
    return tomllib.loads((ROOT / "src" / "agentfly" / "extras.toml").read_text(encoding="utf-8"))


def extras_table() -> str:
    return table(("extra", "for"), ([code(f"agentfly[{name}]"), row["for"]] for name, row in extras().items()))


def untyped_packages() -> str:
    """The optional packages as a setting of mypy: one that is not installed, or has no types, is no error."""
    names = sorted(name for row in extras().values() for name in row.get("packages", ()))
    return "module = [\n" + "".join(f'  "{name}.*",\n' for name in names) + "]\n# "


def commands_table() -> str:
    """Every command with its arguments, from the parser of the command line."""
    parts = []
    for words, parser, text in _commands("agentfly", make_parser()):
        rows = [[code(_spelled(action)), _meaning(action)] for action in _arguments(parser)]
        parts.append(
            f"\n## `{words}`\n\n{text[:1].upper()}{text[1:]}.\n" + (f"\n{table(('argument', 'meaning'), rows)}" if rows else "")
        )
    return "".join(parts) + "\n"


def memory_table() -> str:
    """Peak memory of one update, from the stored figures of the GPU benchmark."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "gpu_learner.json").read_text(encoding="utf-8"))["learner"]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    peaks = {(row["shape"], row["way"]): f"{row['peak_gib']:.1f} GiB" for row in rows}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    return table(("", *shapes), ([way, *(peaks.get((shape, way), "-") for shape in shapes)] for way in ways))


def _commands(words: str, parser: argparse.ArgumentParser) -> Iterable[tuple[str, argparse.ArgumentParser, str]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                if any(isinstance(each, argparse._SubParsersAction) for each in child._actions):
                    yield from _commands(f"{words} {name}", child)
                else:
                    yield f"{words} {name}", child, texts.get(name, "").rstrip(".")


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse._HelpAction,)
    return [each for each in parser._actions if not isinstance(each, hidden) and each.help != argparse.SUPPRESS]


def _spelled(action: argparse.Action) -> str:
    value = action.metavar or (("{" + ",".join(map(str, action.choices)) + "}") if action.choices else action.dest.upper())
    if not action.option_strings:
        return str(value)
    return action.option_strings[-1] + ("" if action.nargs == 0 else f" {value}")


def _meaning(action: argparse.Action) -> str:
    text = (action.help or "").replace("%(default)s", str(action.default))
    return text or "-"


def verl_table() -> str:
    """Every config key and what becomes of it in verl."""
    from agentfly.verl.table import TABLE

    words = {"verl": "{}", "loop": "{}", "before": "{}", "refused": "only the default: {}"}
    rows = (
        [code(key), words[rule.kind].format(rule.text)] for key, rule in TABLE.items() if key in {name for name, *_ in keys()}
    )
    return table(("key", "in verl"), rows)


def plan_table() -> str:
    """Memory of one GPU per size, with and without LoRA, as `agentfly plan` computes it."""
    from agentfly.planning import memory_of
    from agentfly.planning.shapes import SHAPES

    rows = []
    for size in ("3B", "7B", "32B", "70B"):
        for lora in (0, 32):
            cells = [
                memory_of(
                    SHAPES[size], ranks=ranks, lora_rank=lora, batch_tokens=8192, again=True,
                    sampler_gpus=min(ranks, 4 if size == "70B" else 2 if size == "32B" else 1),
                ).total
                for ranks in (1, 8, 64)
            ]  # fmt: skip
            rows.append([size, "LoRA 32" if lora else "all weights", *(f"{cell:.0f} GiB" for cell in cells)])
    return table(("model", "trained", "1 GPU", "8 GPUs", "64 GPUs"), rows)


def fit_table() -> str:
    """Every point of the throughput model: measured, predicted, and whether the fit saw it."""
    from agentfly.planning.throughput import read_fit

    rows = (
        [
            point["part"], point["name"], f"{point['measured']:,.1f}", f"{point['predicted']:,.1f}",
            f"{point['predicted'] / point['measured'] - 1:+.0%}", "held back" if point["held_back"] else "fitted",
        ]
        for point in read_fit()["points"]
    )  # fmt: skip
    return table(("part", "point", "measured", "predicted", "error", ""), rows)


def published_table() -> str:
    """Published steps of another trainer beside what `agentfly plan` computes for the same work."""
    from agentfly.config import Config
    from agentfly.planning import PUBLISHED, find_plans

    rows = []
    for run in PUBLISHED:
        words = ["agent.model=pocket", "agent.max_turns=1", f"rollout.num_tasks={run.samples // 32}", "rollout.num_chains=32"]
        plan = find_plans(
            Config.load(None, words), run.gpus, run.size, card=run.card, turns=1, reply_tokens=run.row - 100, row_tokens=run.row
        )[0]
        low, high = plan.seconds
        rows.append(
            [run.run, f"{run.gpus} x {run.card}", f"{run.step_s:g} s", f"{low:.0f} to {high:.0f} s", f"{run.step_s / low:.1f}"]
        )
    return table(("run", "GPUs", "published", "planned", "published / computed"), rows)


CONV = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}
# Published models of a family of transformers, and keys that its default config lacks.
MODELS_OF: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama 2, 3, SmolLM2, R1 distills", {}),
    "qwen2": ("Qwen 2, 2.5", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3 A3B, A22B", {}),
    "qwen3_next": ("Qwen3-Next", {}),
    "qwen3_5_text": ("Qwen 3.5, 3.6", {}),
    "mistral": ("Mistral 7B", {}),
    "ministral3": ("Ministral 3, text part", {}),
    "mixtral": ("Mixtral", {}),
    "gemma2": ("Gemma 2", {}),
    "gemma3_text": ("Gemma 3", {}),
    "gemma4_text": ("Gemma 4", {}),
    "phi3": ("Phi 3, 3.5, 4-mini", {}),
    "phimoe": ("Phi-3.5-MoE", {}),
    "smollm3": ("SmolLM3", {}),
    "glm4_moe": ("GLM-4.5", {}),
    "glm_moe_dsa": ("GLM-5", {}),
    "deepseek_v3": ("DeepSeek V3, R1, Kimi K2", {}),
    "deepseek_v32": ("DeepSeek V3.2", {}),
    "minimax_m2": ("MiniMax-M2", {}),
    "gpt_oss": ("gpt-oss", {}),
    "mimo_v2_flash": ("MiMo-V2-Flash", {}),
    "lfm2": ("LFM2", CONV),
    "granite": ("Granite 3", {}),
    "granitemoehybrid": ("Granite 4 H", {}),
    "nemotron_h": ("Nemotron 3", {}),
    "olmo3": ("OLMo 3", {}),
    "cohere2": ("Command R7B, Command A", {}),
    "seed_oss": ("Seed-OSS", {}),
    "llama4_text": ("Llama 4, text part", {}),
    "bloom": ("BLOOM", {}),
    "falcon": ("Falcon", {}),
    "stablelm": ("StableLM", {}),
    "qwen3_vl": ("Qwen3-VL", {}),
}


def models_table() -> str:
    """Which families the local engine serves, which a learner can train beside another engine, and why not."""
    from agentfly.engines.local.families.support import what_works

    rows = []
    for family, (models, settings) in MODELS_OF.items():
        sampled, trained = what_works(family, settings)
        through = "no" if trained else "served" if not sampled else "through vLLM"
        rows.append([code(family), models, through, trained or sampled or ""])
    return table(("family", "models", "here", "why"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "models": models_table,
    "config": config_table,
    "extras": extras_table,
    "untyped_packages": untyped_packages,
    "commands": commands_table,
    "memory": memory_table,
    "metrics": metrics_table,
    "algorithms": algorithms_table,
    "loss": loss_table,
    "loss_always": loss_always,
    "rooms": rooms_table,
    "limits": limits_list,
    "agents": agents_table,
    "parser_names": parsers_table,
    "from_agentfly": foreign_table("AgentFly (original)"),
    "from_trl": foreign_table("transformers", "PEFT", "TRL"),
    "from_verl": foreign_table("verl"),
    "verl_keys": verl_table,
    "plan_memory": plan_table,
    "plan_fit": fit_table,
    "plan_published": published_table,
    "from_others": foreign_table("OpenRLHF", "verifiers"),
    **{kind: names_table(kind) for kind in ("tools", "rewards", "tasks", "samplers")},
}


def _says(kind: str, name: str) -> str:
    """The first sentence of what is registered under a name; a package that is not installed does not change the table."""
    thing = plugins.resolve(kind, name)
    text = getattr(thing, "description", None) or inspect.getdoc(thing) or ""
    return str(text).strip().partition("\n\n")[0].replace("\n", " ")


def _paper(paper: str) -> str:
    number = paper.removeprefix("arXiv:")
    return f"[{paper}](https://arxiv.org/abs/{number})" if number != paper else paper


def _plan() -> dict[str, Any]:
    """The names of tests/house/rooms.py: the rooms and all limits."""
    return runpy.run_path(str(ROOT / "tests" / "house" / "rooms.py"))


def pages() -> list[Path]:
    return [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml")),
        *sorted((ROOT / "docs").rglob("*.md")),
    ]


def generated(text: str) -> str:
    """A page with every table made anew."""

    def make(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise SystemExit(f"there is no table {match[2]!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]]()}{match[3]}"

    return MARKS.sub(make, text)


def stale() -> list[Path]:
    """The pages whose tables are not what the code says."""
    return [path for path in pages() if generated(path.read_text(encoding="utf-8")) != path.read_text(encoding="utf-8")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    arguments = parser.parse_args(argv)
    try:
        found = stale()
    except AgentFlyError as error:
        print(f"cannot make the tables: {error}", file=sys.stderr)
        return 1
    for path in found:
        if not arguments.check:
            path.write_text(generated(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"{'out of date' if arguments.check else 'written'}: {path.relative_to(ROOT)}")
    return int(arguments.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
