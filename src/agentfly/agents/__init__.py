"""Agents: how a prompt is written and how a reply becomes tool calls."""

from .base import BaseAgent
from .code import CodeAgent
from .react import ReactAgent
from .search import SearchAgent
from .think import ThinkAgent
from .tool import ToolAgent

__all__ = ["BaseAgent", "CodeAgent", "ReactAgent", "SearchAgent", "ThinkAgent", "ToolAgent"]
