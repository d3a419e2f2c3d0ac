"""`agentfly sweep`: which runs it makes, and how it drives their processes, with scripts in the place of `agentfly train`."""

from __future__ import annotations

import json
import signal
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfly.cli import main, make_parser
from agentfly.cli.sweep import Processes, Variant, name_of, read_variants, share_gpus, split_values
from agentfly.config import Config
from agentfly.errors import ConfigError
from agentfly.training.ranks import process

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")


def variants_of(*words: str) -> tuple[Path, list[Variant]]:
    return read_variants(make_parser().parse_args(["sweep", *words]))


# ---- which runs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("3", ["3"]),
        ("0..3", ["0", "1", "2", "3"]),
        ("-1..1", ["-1", "0", "1"]),
        ("1e-6,1e-5", ["1e-6", "1e-5"]),
        ("grpo, rloo", ["grpo", "rloo"]),
        ("[add,mul]", ["[add,mul]"]),
        ("[add,mul],[add]", ["[add,mul]", "[add]"]),
        ('"one, two",three', ['"one, two"', "three"]),
        ("{kind='a',n=1},b", ["{kind='a',n=1}", "b"]),
        ("../other", ["../other"]),
        ("0..a", ["0..a"]),
    ],
)
def test_a_word_has_the_values_between_its_commas_or_those_of_its_range(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.mark.parametrize("text", ["4..0", "a,,b", "a,"])
def test_a_word_without_a_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="empty"):
        split_values(text)


def test_a_run_is_named_by_its_values() -> None:
    assert name_of({"seed": "3", "train.lr": "1e-6"}) == "seed-3_lr-1e-6"
    assert name_of({"train.lr": "1", "warm_start.lr": "2"}) == "train.lr-1_warm_start.lr-2"
    assert name_of({"agent.model": "../my models/a"}) == "model-..-my-models-a"


def test_a_sweep_trains_each_combination_in_its_own_folder() -> None:
    root, variants = variants_of("quickstart", "seed=0..2", "algorithm=grpo,rloo", "train.steps=3", "run.name=mine")
    assert root == Path("runs/mine")
    assert [(each.config.seed, each.config.algorithm) for each in variants] == [
        (0, "grpo"), (0, "rloo"), (1, "grpo"), (1, "rloo"), (2, "grpo"), (2, "rloo"),
    ]  # fmt: skip
    assert all(each.config.train.steps == 3 for each in variants)
    assert [each.folder for each in variants[:2]] == [root / "seed-0_algorithm-grpo", root / "seed-0_algorithm-rloo"]
    for each in variants:  # the arguments that its process gets mean the same
        _, config, *words = each.arguments
        assert Config.load(config, words) == each.config
        assert Path(each.config.run.dir) / str(each.config.run.name) == each.folder


def test_runs_at_once_share_the_processors_unless_the_user_says_how_many_threads_they_have(monkeypatch) -> None:
    monkeypatch.setattr("agentfly.training.stopping.available_processors", lambda: 8)
    assert variants_of("quickstart", "seed=0..2")[1][0].config.run.threads is None
    assert variants_of("quickstart", "seed=0..2", "--at-once", "3")[1][0].config.run.threads == 2
    assert variants_of("quickstart", "seed=0..2", "run.threads=1", "--at-once", "3")[1][0].config.run.threads == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("quickstart",), "needs a key with several values"),
        (("quickstart", "seed=3"), "needs a key with several values"),
        (("quickstart", "seed=0,0"), "two runs of the sweep have the same values"),
        (("quickstart", "run.name=a,b"), "run.name cannot vary"),
        (("quickstart", "seed=0..1", "--at-once", "0"), "--at-once must be at least 1"),
        (("quickstart", "seed=0..1", "train.lr=1e-5,-1"), "seed=0, train.lr=-1: train.lr must be"),
        (("quickstart", "seed=0..1", "train.lrr=1"), "train.lrr"),
    ],
)
def test_a_sweep_that_cannot_be_trained_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        variants_of(*words)


def test_several_gpus_are_shared_out() -> None:
    assert share_gpus(["0"], 1, 3) == [{}, {}, {}]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in share_gpus(["4", "5", "6"], 1, 4)] == ["4", "5", "6", "4"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in share_gpus(list("01234"), 2, 3)] == ["0,1", "2,3", "0,1"]


# ---- their processes -------------------------------------------------------------------------------------------------


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Processes, list[str]]]:
    """Returns a function: three seeds, each the shell command, whose $N is the number of its start and $SEED its seed."""

    def run(
        command: str, at_once: int = 1, restarts: int = 1, act: Callable[[Processes, str], None] | None = None
    ) -> tuple[Processes, list[str]]:
        script, said = tmp_path / "python", []
        script.write_text(
            f'#!/bin/sh\ncd {tmp_path}\nfor word; do case "$word" in seed=*) SEED="${{word#seed=}}";; esac; done\n'
            f'echo "$@" >> starts-$SEED; N=$(wc -l < starts-$SEED)\n{command}\n',
            encoding="utf-8",
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        words = ("seed=0..2", f"run.dir={tmp_path}", "run.name=sweep", f"fault.restarts={restarts}")
        root, variants = variants_of("quickstart", *words)
        root.mkdir()
        monkeypatch.setattr(sys, "executable", str(script))
        monkeypatch.setattr(process, "SILENT_S", 600.0)  # a script sends no sign of life

        def say(sentence: str) -> None:
            said.append(sentence)
            if act is not None:
                act(processes, sentence)

        processes = Processes(variants, at_once, say)
        return processes.run(), said

    return run


def wait_for(*paths: Path) -> None:
    ends = time.monotonic() + 120
    while not all(path.exists() for path in paths):
        assert time.monotonic() < ends, paths
        time.sleep(0.02)


def test_every_run_is_started_once_and_its_words_go_to_its_log(sweep, tmp_path: Path) -> None:
    outcome, said = sweep("echo seed $SEED")
    assert not outcome.failed
    assert outcome.stopped is None
    assert [line for line in said if line.endswith("started")] == [f"seed-{seed}: started" for seed in range(3)]
    for seed in range(3):
        assert (tmp_path / f"sweep/seed-{seed}.log").read_text() == f"seed {seed}\n"
        assert len((tmp_path / f"starts-{seed}").read_text().splitlines()) == 1


def test_so_many_runs_train_at_once_and_no_more(sweep, tmp_path: Path) -> None:
    # Seeds 0 and 1 wait for each other. Seed 2 fails if both are still there.
    meets = "touch up-$SEED; until [ -e up-0 ] && [ -e up-1 ]; do sleep 0.05; done; touch end-$SEED"
    last = "[ -e end-0 ] || [ -e end-1 ]"
    outcome, _ = sweep(f"if [ $SEED = 2 ]; then {last}; else {meets}; fi", at_once=2)
    assert not outcome.failed


def test_a_run_that_fails_is_named_with_its_error_and_the_others_go_on(sweep) -> None:
    outcome, said = sweep("if [ $SEED = 1 ]; then echo noise; echo 'error: no such model'; echo; exit 2; fi")
    assert [variant.values["seed"] for variant in outcome.failed] == ["1"]
    (failure,) = (line for line in said if "failed" in line)
    assert failure.startswith("seed-1: failed after")
    assert "error: no such model (log: " in failure
    assert sum("finished" in line for line in said) == 2


def test_a_run_that_is_killed_starts_again_and_resumes_its_checkpoint(sweep, tmp_path: Path) -> None:
    outcome, said = sweep('if [ "$SEED$N" = 11 ]; then mkdir -p sweep/seed-1/checkpoints/step-3; kill -9 $$; fi')
    assert not outcome.failed
    assert "seed-1: was killed by SIGKILL, and is started again (restart 1 of 1)" in said
    first, second = (tmp_path / "starts-1").read_text().splitlines()
    assert "--resume" not in first
    assert second.endswith(f"--resume {tmp_path}/sweep/seed-1")


def test_a_run_that_is_killed_again_and_again_is_given_up(sweep, tmp_path: Path) -> None:
    outcome, _ = sweep("if [ $SEED = 1 ]; then kill -9 $$; fi", restarts=2)
    assert [variant.values["seed"] for variant in outcome.failed] == ["1"]
    assert len((tmp_path / "starts-1").read_text().splitlines()) == 3


def test_a_signal_is_passed_on_to_every_run_and_no_other_starts(sweep, tmp_path: Path) -> None:
    def act(processes: Processes, sentence: str) -> None:
        if sentence == "seed-1: started":  # both are in their loops
            wait_for(tmp_path / "up-0", tmp_path / "up-1")
            processes._stop(signal.SIGTERM, None)

    command = "trap 'touch got-$SEED; exit 143' TERM; touch up-$SEED; while :; do sleep 0.05; done"
    outcome, said = sweep(command, at_once=2, act=act)
    assert outcome.stopped == signal.SIGTERM
    assert {path.name for path in tmp_path.glob("got-*")} == {"got-0", "got-1"}
    assert not (tmp_path / "starts-2").exists()
    assert not outcome.failed
    assert sum("stopped after" in line for line in said) == 2


# ---- the whole -------------------------------------------------------------------------------------------------------


def test_a_sweep_trains_its_seeds_and_the_same_command_finds_them_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "sweep", "quickstart", "seed=0..1", "train.steps=1", "rollout.num_tasks=2", "rollout.num_chains=2",
        "data.validation_count=2", "train.save_every=1", "--json", "results.json",
    ]  # fmt: skip
    assert main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("new ") == 2
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.count("finished after") == 2
    assert "2 of 2" in said
    results = json.loads(Path("results.json").read_text())
    assert [(each["values"], each["state"], each["step"]) for each in results] == [
        ({"seed": "0"}, "finished", 1), ({"seed": "1"}, "finished", 1),
    ]  # fmt: skip
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "2 runs, 2 of them finished" in said
    assert "started" not in said
    assert main([*words, "rollout.num_tasks=3"]) == 2
    assert "was trained with rollout.num_tasks = 2, not 3" in capsys.readouterr().err
    assert main([*words, "train.steps=2", "--dry-run"]) == 0
    assert "stopped   agentfly train quickstart" in (said := capsys.readouterr().out)
    assert "--resume runs/sweep-quickstart/seed-0" in said
