"""Learning curves: what real runs measured is collected, merged, drawn and set in a table."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import agentfly
from agentfly import Config
from agentfly.errors import ConfigError
from agentfly.runs import RunStore
from agentfly.watch.progress import Progress
from tests.tiny import ROWS, save_tiny_model, tiny_agent

RECIPES = Path(__file__).parents[2] / "recipes"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three real runs, two of one algorithm."""
    folder = tmp_path_factory.mktemp("curves")
    model = save_tiny_model(folder / "model")
    made = []
    for algorithm, seed in (("grpo", 0), ("grpo", 1), ("rloo", 0)):
        result = agentfly.train(
            tiny_agent(model),
            ROWS[:20],
            algorithm=algorithm,
            seed=seed,
            steps=3,
            validation_count=2,
            threads=1,
            num_tasks=2,
            num_chains=2,
            run={"dir": str(folder), "name": f"{algorithm}-{seed}"},
            progress=Progress(3),
        )
        made.append(result.directory)
    return made


@pytest.fixture(scope="module")
def collected(runs: list[Path]) -> Path:
    import curves

    path = runs[0].parent / "curves.json"
    assert curves.main(["collect", *map(str, runs), "--json", str(path)]) == 0
    return path


def test_a_collected_run_holds_what_its_store_holds_step_by_step(runs: list[Path], collected: Path) -> None:
    found = json.loads(collected.read_text())["runs"]
    assert [(run["name"], run["algorithm"], run["seed"]) for run in found] == [
        ("grpo-0", "grpo", 0), ("grpo-1", "grpo", 1), ("rloo-0", "rloo", 0),
    ]  # fmt: skip
    for folder, run in zip(runs, found, strict=True):
        assert [row["step"] for row in run["steps"]] == [0, 1, 2, 3]
        with RunStore(folder / "run.db", readonly=True) as store:
            for name in ("reward/mean", "rollout/turns", "rollout/tool_calls", "rollout/invalid_calls"):
                assert [row[name] for row in run["steps"][1:]] == [row.value for row in store.metrics(name)]
            held_out = [row.value for row in store.metrics("validation/success")]
        assert [row["validation/success"] for row in run["steps"] if "validation/success" in row] == held_out
        clock = [row["seconds"] for row in run["steps"]]
        assert clock == sorted(clock) and clock[0] >= 0


def test_a_run_made_in_python_has_no_recipe_and_no_command(collected: Path) -> None:
    run = json.loads(collected.read_text())["runs"][0]
    assert (run["recipe"], run["command"]) == (None, None)


def test_the_command_of_a_config_makes_that_config_again() -> None:
    import curves

    overrides = ["algorithm=ppo", "train.lr=1e-4", "seed=3", "agent.max_turns=8", 'run.trackers=["jsonl"]']
    config = Config.load(RECIPES / "quickstart.toml", [*overrides, "run.name=first"])
    recipe, command = curves.explain(config, sorted(RECIPES.glob("*.toml")))
    assert recipe == "quickstart"
    start, *words = command.split(" ")[1:]
    assert (start, words[0]) == ("train", "recipes/quickstart.toml")
    assert set(words[1:]) == {"algorithm=ppo", "train.lr=0.0001", "seed=3", "agent.max_turns=8"}
    again = Config.load(RECIPES / "quickstart.toml", words[1:])
    assert curves.flatten(again) == curves.flatten(config)


def test_a_table_in_a_config_is_written_so_that_it_can_be_read_back() -> None:
    import curves

    config = Config.load(RECIPES / "quickstart.toml", ['agent.engine={kind = "local", max_batch = 8}'])
    _, command = curves.explain(config, [RECIPES / "quickstart.toml"])
    assert command == """agentfly train recipes/quickstart.toml 'agent.engine={kind = "local", max_batch = 8}'"""


def test_merging_takes_each_run_once_and_refuses_two_of_one_name(collected: Path, tmp_path: Path, capsys) -> None:
    import curves

    both, other = tmp_path / "both.json", tmp_path / "other.json"
    assert curves.main(["merge", str(collected), str(collected), "--json", str(both)]) == 0
    assert json.loads(both.read_text()) == json.loads(collected.read_text())
    tree = json.loads(collected.read_text())
    tree["runs"][0]["seed"] = 7
    other.write_text(json.dumps(tree))
    assert curves.main(["merge", str(collected), str(other), "--json", str(both)]) == 2
    assert "two different runs are called 'grpo-0'" in capsys.readouterr().err


def test_the_drawing_has_a_panel_per_metric_and_a_line_per_algorithm(collected: Path, tmp_path: Path) -> None:
    import curves

    path = tmp_path / "curves.svg"
    wanted = ["--metric", "reward/mean", "--metric", "validation/success", "--metric", "rollout/turns"]
    assert curves.main(["draw", str(collected), "--svg", str(path), *wanted]) == 0
    root = ET.parse(path).getroot()
    panels = root.findall(f"{SVG}g")
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert len(panels) == 3
    assert [text.text for text in root.findall(f"{SVG}text")] == ["grpo", "rloo"]
    assert {"reward/mean", "validation/success", "rollout/turns", "step", "share"} <= set(texts)
    for panel in panels:
        lines, bands = panel.findall(f"{SVG}polyline"), panel.findall(f"{SVG}polygon")
        assert (len(lines), len(bands)) == (2, 1)  # the two runs of grpo are one line with a band
    assert [len(line.get("points").split()) for line in panels[0].findall(f"{SVG}polyline")] == [3, 3]


def test_lines_can_be_told_apart_by_any_key_of_the_config(collected: Path, tmp_path: Path) -> None:
    import curves

    path = tmp_path / "seeds.svg"
    assert curves.main(["draw", str(collected), "--svg", str(path), "--by", "seed"]) == 0
    assert [text.text for text in ET.parse(path).getroot().findall(f"{SVG}text")] == ["seed 0", "seed 1"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--metric", "reward/meen"], "did you mean 'reward/mean'?"),
        (["--metric", "train/loss"], "no run has the metric 'train/loss'"),
        (["--recipe", "quickstart"], "there is no run of the recipe 'quickstart'"),
        (["--by", "agent.turns"], "the runs have no such key"),
        (["--x", "minutes"], "over minutes they have no common points"),
    ],
)
def test_what_cannot_be_drawn_is_refused(collected: Path, tmp_path: Path, capsys, arguments, sentence) -> None:
    import curves

    path = tmp_path / "none.svg"
    assert curves.main(["draw", str(collected), "--svg", str(path), *arguments]) == 2
    assert sentence in capsys.readouterr().err
    assert not path.exists()


def test_runs_of_two_recipes_are_not_drawn_as_one(collected: Path) -> None:
    import curves

    runs = curves.load(collected)
    runs[0]["recipe"] = "quickstart"
    with pytest.raises(ConfigError, match="several recipes"):
        curves.one_recipe(runs, None)
    assert curves.one_recipe(runs, "quickstart") == runs[:1]


def test_the_table_shows_before_and_after(collected: Path, capsys) -> None:
    import curves

    capsys.readouterr()
    assert curves.main(["table", str(collected)]) == 0
    header, rule, *rows = capsys.readouterr().out.strip().splitlines()
    assert len(rows) == 3
    assert header.count("|") == rule.count("|") == rows[0].count("|")
    run = json.loads(collected.read_text())["runs"][0]
    before, after = (run["steps"][at]["validation/reward"] for at in (0, -1))
    assert f"| {before:.2f} → {after:.2f} |" in rows[0]


def test_the_table_lists_the_commands(collected: Path) -> None:
    import curves

    runs = curves.load(collected)
    runs[0]["command"] = "agentfly train recipes/quickstart.toml seed=1"
    assert curves.table(runs, commands=True).endswith("```bash\nagentfly train recipes/quickstart.toml seed=1\n```\n")


def test_a_run_without_steps_and_a_folder_without_a_run_are_named(runs: list[Path], tmp_path: Path, capsys) -> None:
    import curves

    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(runs[0] / "config.toml", empty)
    RunStore(empty / "run.db").close()
    for folder, sentence in ((empty, "has no metrics yet"), (tmp_path / "nowhere", "there is no run folder")):
        assert curves.main(["collect", str(folder), "--json", str(tmp_path / "x.json")]) == 2
        assert sentence in capsys.readouterr().err


def test_a_file_that_collect_did_not_write_is_refused(tmp_path: Path, capsys) -> None:
    import curves

    path = tmp_path / "other.json"
    path.write_text('{"runs": [{"name": "x"}]}')
    assert curves.main(["table", str(path)]) == 2
    assert "is not what `collect` writes" in capsys.readouterr().err


def test_a_figure_that_is_not_a_number_is_left_out_of_its_line() -> None:
    from agentfly.watch.charts.svg import Line, Panel, draw

    root = ET.fromstring(draw([Panel("a < b", "step", "share", [Line("one", [(0, 0.5), (1, float("nan")), (2, 1.0)])])]))
    assert [len(line.get("points").split()) for line in root.iter(f"{SVG}polyline")] == [2]
    assert "a < b" in [text.text for text in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [(0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (3.0, 17.0, [0.0, 5.0, 10.0, 15.0, 20.0]), (-1.0, 1.0, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round_and_hold_the_range(low: float, high: float, want: list[float]) -> None:
    from agentfly.watch.charts.svg import ticks

    assert ticks(low, high) == pytest.approx(want)


def test_a_flat_line_has_ticks_around_it() -> None:
    from agentfly.watch.charts.svg import ticks

    found = ticks(2.0, 2.0)
    assert found[0] < 2.0 < found[-1]
