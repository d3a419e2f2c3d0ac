"""First contact: recipes by name, a new project, training from keys alone, and the wheel that carries all of it."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from agentfly import Config
from agentfly.cli import main
from agentfly.errors import ConfigError
from agentfly.recipes import describe_recipe, find_config, recipes, start_project
from agentfly.runs import RunDirectory

ROOT = Path(__file__).parent.parent
SMALL = ["train.steps=1", "rollout.num_tasks=2", "rollout.num_chains=2", "run.threads=1", "train.validate_every=0"]
ROWS = [{"question": f"What is {number} plus 1?", "answer": str(number + 1)} for number in range(12)]


def test_every_recipe_has_a_name_and_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(recipes()) == {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(recipes())
    assert lines[0].startswith("quickstart ")
    assert all(line.endswith(".") for line in lines)
    for name, path in recipes().items():
        assert len(describe_recipe(path)) > 20
        assert f"{name} " in "\n".join(lines)
    assert main(["recipes", "quickstart"]) == 0
    assert capsys.readouterr().out == (ROOT / "recipes" / "quickstart.toml").read_text()


@pytest.mark.parametrize("name", ["quickstart", "quickstart.toml", "recipes/quickstart.toml", "recipes/quickstart"])
def test_a_recipe_is_found_by_name_from_any_folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Config.load(name) == Config.load(ROOT / "recipes" / "quickstart.toml")


def test_a_checkpoint_and_a_model_are_no_configs_and_a_checkpoint_is_no_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-000002"
    checkpoint.mkdir(parents=True)
    (tmp_path / "config.toml").touch()
    with pytest.raises(ConfigError, match=f"step-000002 is a checkpoint: name its run, {tmp_path}, and the checkpoint as a"):
        find_config(checkpoint)
    with pytest.raises(ConfigError, match=f"step-000002 is a checkpoint of the run {tmp_path}: name the run"):
        RunDirectory.existing(checkpoint)
    with pytest.raises(ConfigError, match="^openai:mine@http://here/v1 is a model: name a config file"):
        find_config("openai:mine@http://here/v1")
    with pytest.raises(ConfigError, match="^no such config file: /nope"):
        find_config("/nope")


def test_a_file_of_the_user_comes_before_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    assert find_config("quickstart").stem == "quickstart"
    (tmp_path / "quickstart.toml").write_text('[data]\ntrain = "mine.jsonl"\n')
    assert Config.load("quickstart.toml").data.train == "mine.jsonl"
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        find_config("quikstart")
    with pytest.raises(ConfigError, match="no such config file: elsewhere/quickstart.toml"):
        find_config("elsewhere/quickstart.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        find_config(tmp_path)


def test_a_new_project_trains_with_the_bundled_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my-shop"]) == 0
    assert "agentfly train train.toml" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "my-shop").iterdir()}
    assert names == {"README.md", "task.py", "make_data.py", "train.toml", "train.jsonl", "held_out.jsonl"}
    assert "my-task" not in (tmp_path / "my-shop" / "README.md").read_text()
    monkeypatch.chdir(tmp_path / "my-shop")
    assert main(["train", "train.toml", *SMALL, "train.steps=2", "data.validation_count=2"]) == 0
    run = tmp_path / "my-shop" / "runs" / "my-shop"
    (first, *_, last) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert (first["step"], last["step"]) == (0, 2)
    assert main(["init", "."]) == 2
    assert "not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "a b", "-x", "a/..b c"])
def test_a_project_needs_a_name_that_a_run_can_have(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be the name|not an empty folder"):
        start_project(tmp_path / "x" / name if name else ROOT)


def test_a_run_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    keys = ["algorithm=grpo", "data.train=rows.jsonl", "agent.tools=[add,subtract]", "agent.max_turns=2", "run.name=keys"]
    assert main(["train", *keys, "sampling.max_tokens=8", "data.validation_count=1", *SMALL]) == 0
    told = capsys.readouterr().out
    assert "agentfly eval runs/keys --chains 4" in told and "train runs/keys algorithm=rloo run.name=keys-rloo" in told
    assert "before training: " in told
    assert main(["eval", "runs/keys", "sampling.max_tokens=4", "--json", "own.json"]) == 0
    told = capsys.readouterr().out
    assert f"1 of {len(ROWS)} rows of rows.jsonl, which its training held out (all rows: --data FILE)" in told
    config = (max(Path("runs").glob("eval-*")) / "config.toml").read_text()
    assert "runs/keys/checkpoints/step-" in config and 'tools = ["add", "subtract"]' in config
    assert Config.load("runs/keys/config.toml").agent.tools == ["add", "subtract"]
    keys = ["data.train=rows.jsonl", "agent.tools=add", "sampling.max_tokens=4", "agent.max_turns=1", "run.threads=1"]
    assert main(["eval", *keys, "--json", "figures.json"]) == 0
    assert main(["eval"]) == 2
    assert "needs a config file" in capsys.readouterr().err


@pytest.mark.parametrize("tools", ["add,subtract", "[add, subtract]", '["add", "subtract"]', "['add', 'subtract']"])
def test_a_list_of_names_survives_the_shell(tools: str) -> None:
    assert Config.load(None, ["data.train=arithmetic", f"agent.tools={tools}"]).agent.tools == ["add", "subtract"]


def test_a_module_of_the_current_folder_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "corner_shop.py").write_text(
        "from agentfly import reward\nimport corner_words\n@reward\ndef polite(prediction):\n    return corner_words.SCORE\n"
    )
    (tmp_path / "corner_words.py").write_text("SCORE = 1.0\n")
    code = (
        "import sys; sys.path[:] = [path for path in sys.path if path]\n"
        "from agentfly import plugins; print(plugins.resolve('rewards', 'corner_shop:polite').name)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.stdout.strip() == "polite", done.stderr


def test_the_wheel_holds_the_recipes_and_the_project(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'hatchling'")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import agentfly; assert agentfly.__file__.startswith(sys.argv[1])\n"
        "from agentfly.cli import main\n"
        "assert main(['recipes']) == 0 and main(['init', 'my-task']) == 0\n"
        "raise SystemExit(main(['train', 'quickstart', 'data.train_count=8', 'data.validation_count=2', '--dry-run']))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "site")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    assert "# first prompt:" in done.stdout
    assert (tmp_path / "my-task" / "train.jsonl").is_file()
