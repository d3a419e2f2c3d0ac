"""AgentFly: build LLM agents and train them by multi-turn reinforcement learning.

Importing the package loads nothing heavy: the module of each public name is imported when the name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "tool": "tools",
    "Tool": "tools",
    "FromTask": "tools",
    "reward": "rewards",
    "Reward": "rewards",
    "BaseAgent": "agents",
    "ReactAgent": "agents",
    "ToolAgent": "agents",
    "CodeAgent": "agents",
    "ThinkAgent": "agents",
    "SearchAgent": "agents",
    "OutsideAgent": "agents",
    "outside_agent": "agents",
    "train": "training",
    "evaluate": "training",
    "dpo": "training",
    "sft": "training",
    "load_tasks": "data",
    "Environment": "resources",
    "Cost": "resources",
    "ResourceManager": "resources",
    "check_env": "envs.check",
    "Config": "config",
    "Action": "types",
    "Completion": "types",
    "Event": "types",
    "Message": "types",
    "Outcome": "types",
    "RunResult": "types",
    "Sampling": "types",
    "Task": "types",
    "ToolCall": "types",
    "ToolResult": "types",
    "Trajectory": "types",
    "AgentFlyError": "errors",
    "ConfigError": "errors",
    "InvariantError": "errors",
    "ToolError": "errors",
    "WorldError": "errors",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from .agents import BaseAgent, CodeAgent, OutsideAgent, ReactAgent, SearchAgent, ThinkAgent, ToolAgent, outside_agent
    from .api import train
    from .config import Config
    from .data import load_tasks
    from .envs.check import check_env
    from .errors import AgentFlyError, ConfigError, InvariantError, ToolError, WorldError
    from .resources import Cost, Environment, ResourceManager
    from .rewards import Reward, reward
    from .tools import FromTask, Tool, tool
    from .training import dpo, evaluate, sft
    from .types import Action, Completion, Event, Message, Outcome, RunResult, Sampling, Task, ToolCall, ToolResult, Trajectory


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'agentfly' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
