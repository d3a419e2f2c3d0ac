"""Agents: how a prompt is written and how a reply becomes tool calls."""

from .base import BaseAgent
from .code import CodeAgent
from .outside import OutsideAgent, outside_agent
from .react import ReactAgent
from .search import SearchAgent
from .think import ThinkAgent
from .tool import ToolAgent

__all__ = ["BaseAgent", "CodeAgent", "OutsideAgent", "ReactAgent", "SearchAgent", "ThinkAgent", "ToolAgent", "outside_agent"]
