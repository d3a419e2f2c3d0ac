"""Nothing that users of version 0.1 could name is lost: names, commands, config keys, plugins, metrics, recipes.

`data/surface_0_1.json` lists them as they were. A name that has changed stands in `RENAMED` and in CHANGELOG.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import pytest

from agentfly import cli, plugins
from agentfly.config import keys
from agentfly.engines import _options_of
from agentfly.resources.spec import OPTIONS, SETTINGS
from agentfly.watch.metrics import METRICS

ROOT = Path(__file__).parent.parent
BEFORE = json.loads((Path(__file__).parent / "data" / "surface_0_1.json").read_text())
RENAMED = {
    "agentfly.resources.serve:EnvServer": "agentfly.resources.rpc.env_server:EnvServer",
    "agentfly.envs.code.apart:count_apart": "agentfly.envs.code.isolated.run:count_isolated",
    "agentfly.rollout:prepare": "agentfly.rollout:open_task",
    "train.minibatches": "train.num_minibatches",
}
"""Old name to new name, of any kind below; each is in the changelog."""


def current(name: str) -> str:
    return RENAMED.get(name, name)


def options_of(parser: argparse.ArgumentParser, prefix: str = "") -> dict[str, set[str]]:
    """Every command and its long options."""
    found = {prefix: {option for action in parser._actions for option in action.option_strings}}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found |= options_of(inner, f"{prefix} {name}".strip())
    return found


@pytest.mark.parametrize("name", BEFORE["names"])
def test_a_public_name_can_be_imported(name: str) -> None:
    module, _, attribute = current(name).partition(":")
    assert getattr(importlib.import_module(module), attribute) is not None


@pytest.mark.parametrize("command", BEFORE["commands"])
def test_a_command_has_its_options(command: str) -> None:
    known = options_of(cli.make_parser())
    assert current(command) in known
    missing = {current(option) for option in BEFORE["commands"][command]} - known[current(command)]
    assert not missing, f"agentfly {command} has lost {sorted(missing)}"


def test_config_keys_are_known() -> None:
    assert {current(key) for key in BEFORE["config_keys"]} <= {key for key, *_ in keys()}


def test_pool_settings_are_known() -> None:
    assert {current(key) for key in BEFORE["pool_settings"]} <= {*SETTINGS, *OPTIONS}


@pytest.mark.parametrize("kind", BEFORE["engine_options"])
def test_engine_options_are_known(kind: str) -> None:
    assert {current(name) for name in BEFORE["engine_options"][kind]} <= set(_options_of(kind))


@pytest.mark.parametrize("kind", BEFORE["plugins"])
def test_built_in_names_can_be_resolved(kind: str) -> None:
    assert {current(name) for name in BEFORE["plugins"][kind]} <= set(plugins.names(kind))


def test_metrics_are_described() -> None:
    assert {current(name) for name in BEFORE["metrics"]} <= set(METRICS)


@pytest.mark.parametrize("recipe", BEFORE["recipes"])
def test_a_recipe_is_there(recipe: str) -> None:
    assert (ROOT / "recipes" / current(recipe)).is_file()


def test_a_changed_name_is_in_the_changelog() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    for old, new in RENAMED.items():
        for name in (old, new):
            assert name.rpartition(":")[2] in changelog, f"CHANGELOG.md does not mention {name}"
