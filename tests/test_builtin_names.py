"""Every built-in tool and reward can be imported by its name, and importing the packages loads none of them."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

from agentfly import plugins, rewards, tools
from agentfly.rewards import Factory, Reward
from agentfly.tools import Tool


@pytest.mark.parametrize("name", plugins.BUILTIN["tools"])
def test_a_built_in_tool_can_be_imported_by_its_name(name: str) -> None:
    found = getattr(tools, name)
    assert isinstance(found, Tool)
    assert found is plugins.resolve("tools", name)
    assert name in dir(tools)


@pytest.mark.parametrize("name", plugins.BUILTIN["rewards"])
def test_a_built_in_reward_can_be_imported_by_its_name(name: str) -> None:
    found = getattr(rewards, name)
    assert isinstance(found, Reward | Factory)
    assert name in dir(rewards)


@pytest.mark.parametrize("package", [tools, rewards], ids=["tools", "rewards"])
def test_no_module_hides_a_tool_or_reward(package: ModuleType) -> None:
    """Importing a submodule sets it as an attribute of its package, which would hide the tool or reward of that name."""
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert not modules & set(plugins.BUILTIN[package.__name__.rpartition(".")[2]])


def test_open_has_a_name_that_hides_no_builtin_of_python_and_unknown_names_are_refused() -> None:
    assert tools.open_passage is tools.open
    with pytest.raises(ImportError, match="no_such_tool"):
        from agentfly.tools import no_such_tool  # noqa: F401
    with pytest.raises(AttributeError, match=r"module 'agentfly.rewards' has no attribute 'nothing'"):
        _ = rewards.nothing


def test_importing_the_packages_loads_no_world() -> None:
    code = "import sys, agentfly.tools, agentfly.rewards; print([m for m in sys.modules if m.startswith('agentfly.envs')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=800)
    assert done.stdout.strip() == "[]"
