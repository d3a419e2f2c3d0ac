"""The recipe of the search world reads, and its names are known; the README's examples name what exists."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from agentfly import plugins
from agentfly.build import build_agent, build_tasks
from agentfly.config import Config
from agentfly.envs.search.env import SearchEnv

ROOT = Path(__file__).parents[3]
README = ROOT / "src" / "agentfly" / "envs" / "search" / "README.md"


def test_the_recipe_reads_and_its_names_are_known():
    config = Config.load(ROOT / "recipes" / "search.toml", ["data.train_count=20", "data.validation_count=5"])
    agent = build_agent(config)
    train, validation = build_tasks(config)
    agent.check(train)
    agent.check(validation)
    assert list(agent.tools) == ["search"]
    assert (len(train), len(validation)) == (20, 5)


def test_the_options_that_the_readme_shows_are_options():
    text = README.read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    options = tomllib.loads(block)["resources"]["pools"]["SearchEnv"]["options"]
    SearchEnv(**options)
    for name in re.findall(r"^\| `(\w+)`.* \| (?:tool|env|reward) \|", text, re.MULTILINE):
        assert any(name in plugins.names(kind) for kind in ("tools", "envs", "rewards"))
