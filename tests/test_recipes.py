"""Every recipe runs, at miniature size, with every algorithm that the README offers for it."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentfly
from agentfly import Config
from agentfly.watch.progress import Progress

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))
MINIATURE = [
    "train.steps=1",
    "rollout.num_tasks=2",
    "rollout.num_chains=2",
    "data.train_count=8",
    "data.validation_count=2",
    "run.threads=1",
]


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce++", "grpo", "rloo"])
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_with_each_algorithm(recipe: Path, algorithm: str, tmp_path: Path) -> None:
    config = Config.load(recipe, [*MINIATURE, f"algorithm={algorithm}", f"run.dir={tmp_path}", "run.name=mini"])
    result = agentfly.train(config, progress=Progress(1))
    assert result.steps == 1
    assert result.checkpoint is not None


def test_there_are_recipes() -> None:
    assert "quickstart" in {path.stem for path in RECIPES}
