"""The recipe of the code world, at miniature size: it runs end to end on the bundled model and leaves a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentfly.build import build_agent, build_tasks
from agentfly.config import Config

RECIPE = Path(__file__).parents[3] / "recipes" / "code.toml"


def test_the_recipe_reads_and_its_names_are_known():
    config = Config.load(RECIPE, ["data.train_count=20", "data.validation_count=5"])
    agent = build_agent(config)
    train, validation = build_tasks(config)
    agent.check(train)
    assert list(agent.tools) == ["python"]
    assert (len(train), len(validation)) == (20, 5)


@pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")
def test_the_recipe_trains_for_one_small_step(tmp_path, monkeypatch):

    import agentfly

    monkeypatch.chdir(tmp_path)
    small = ["data.train_count=8", "data.validation_count=4", "rollout.num_tasks=2", "rollout.num_chains=2", "train.steps=1"]
    result = agentfly.train(Config.load(RECIPE, small))
    assert result.steps == 1
    assert (result.checkpoint / "model.safetensors").is_file()
    assert 0.0 <= result.after["validation/success"] <= 1.0
