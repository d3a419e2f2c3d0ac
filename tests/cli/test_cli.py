"""The command line: what it lists, what it says about bad input, and one small run of each command."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentfly.cli import main
from agentfly.cli.train import RANK_0_S
from agentfly.config import Config
from agentfly.errors import ConfigError, RewardError
from agentfly.runs import RunStore
from agentfly.training.evaluation import evaluate_run
from agentfly.training.ranks.process import free_port
from agentfly.types import Completion, Outcome, Task, Trajectory, Turn
from tests.tiny import ROWS, save_tiny_model

KINDS = {
    "algorithms": ["ppo", "grpo", "rloo", "reinforce++"],
    "agents": ["react", "tool", "code", "think", "search"],
    "tools": ["add", "calculator", "python"],
    "rewards": ["exact_match", "qa_f1", "math_equal"],
    "tasks": ["arithmetic"],
    "samplers": ["epochs", "curriculum"],
    "envs": ["guess"],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verb", [[], ["list"]])
def test_each_kind_can_be_listed(kind: str, verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([kind, *verb]) == 0
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0]: line for line in lines}
    for name in KINDS[kind]:
        assert len(listed[name].split()) > 1, f"{name} has no description"


def test_algorithms_are_listed_with_their_papers_and_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert all(re.search(r"arXiv:\d{4}\.\d{5} \(credit: .*; loss: .*\)$", line) for line in listed.values())
    assert "(credit: a critic; loss: clipped ratio, arXiv:1707.06347; keys: loss.critic, loss.gamma, " in listed["ppo"]
    assert "(credit: groups; loss: its own, of each chain; " in listed["gspo"]
    assert listed["gigpo"].endswith("keys: loss.normalize_std, loss.options.turn_weight, loss.options.turn_gamma)")
    assert "(credit: a reference; " in listed["distill"] and "(credit: the batch; " in listed["reinforce++"]


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "agentfly" in capsys.readouterr().out


def test_every_config_key_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config"]) == 0
    assert "train.lr = " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["train", "nowhere.toml"], "no such config file"),
        (["train"], "needs a config file"),
        (["train", "{config}", "train.stps=3"], "did you mean 'train.steps'"),
        (["train", "{config}", "algorithm=gppo"], "no algorithm is called 'gppo'"),
        (["train", "{config}", "rollout.num_chains=1"], "num_chains"),
        (["train", "{config}", "agent.tools=['ad']"], "did you mean 'add'"),
        (["train", "{config}", "agent.kind=raect"], "did you mean 'react'"),
        (["train", "{config}", "agent.options.parsr='x'"], "agent.options does not fit"),
        (["train", "{config}", "data.train=nowhere.json"], "no such file"),
        (["train", "{config}", "data.train="], "data.train"),
        (["train", "{config}", "agent.model=no/such/model"], "no/such/model"),
        (["train", "{config}", "agent.max_context=10"], "context holds 10"),
        (["train", "--resume", "nowhere"], "nowhere"),
        (["train", "{config}", "--dry-run", "--profile"], "remove one of them"),
        (["eval", "{config}", "--chains", "0"], "at least 1"),
        (["eval", "{config}", "train.lr=1"], "agentfly eval does not use the config key train.lr"),
        (["sft", "{config}", "loss.clip_low=0.1"], "agentfly sft does not use the config key loss.clip_low"),
        (["sft", "{config}", "train.save_every=1"], "agentfly sft does not use the config key train.save_every"),
        (["show", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    assert main([argument.format(config=config) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "override", ["sampler.place=own", "run.trackers=['jsonlines']", "agent.reward=[]", "data.train=nowhere.json"]
)
def test_what_is_refused_without_the_model_opens_none_and_leaves_no_folder(
    override: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("agentfly.rollout.setup.open_engine", lambda *_, **__: pytest.fail("the model was opened"))
    assert main(["train", str(write_config(tmp_path)), override]) == 2
    assert capsys.readouterr().err.count("error: ") == 1
    assert not (tmp_path / "runs").exists()


def test_a_run_that_is_stopped_while_its_model_is_opened_says_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agentfly.api.open_parts", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["train", str(write_config(tmp_path))]) == 128 + signal.SIGTERM
    output, error = capsys.readouterr()
    assert "stopped by SIGTERM; there is no checkpoint yet: the same command starts again" in output
    assert f"to continue: agentfly train --resume {tmp_path}/runs/one" in output
    assert error == ""
    monkeypatch.undo()
    assert main(["train", "--resume", str(tmp_path / "runs" / "one")]) == 0


def test_a_rank_leaves_an_error_that_rank_0_has_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    assert main(["train", "nowhere.toml"]) == 2
    assert not waits
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "nowhere.toml"]) == 2
    assert waits == [RANK_0_S]


def write_config(folder: Path, model: str = "pocket") -> Path:
    path = folder / "run.toml"
    path.write_text(
        f'[agent]\nmodel = "{model}"\ntools = ["add"]\nmax_turns = 2\n[data]\ntrain = "arithmetic"\ntrain_count = 20\n'
        f"validation_count = 4\n[sampling]\nmax_tokens = 8\n[rollout]\nnum_tasks = 2\nnum_chains = 2\n"
        f'[train]\nsteps = 1\nlr = 1e-3\n[run]\ndir = "{folder}/runs"\nname = "one"\nthreads = 1\n'
    )
    return path


def test_a_dry_run_shows_the_config_and_the_first_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(write_config(tmp_path)), "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "[agent]" in output
    assert "- add(" in output
    assert not (tmp_path / "runs").exists()


SERVER = ["agent.engine.kind=openai", "agent.engine.base_url='http://127.0.0.1:9/v1'"]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["agent.model='openai:x@http://127.0.0.1:9/v1'"], "a chat server gives text, not token ids"),
        (SERVER, "set agent.engine.weights_dir"),
        ([*SERVER, "agent.engine.weights_dir={folder}/w", "sampling.top_p=0.9"], "sampling.top_p cuts the distribution"),
        ([*SERVER, "agent.engine.weights_dir={folder}/w"], "cannot train from the server"),
        (["lora.rank=2", "lora.targets=['nothing']"], "lora.targets"),
    ],
)
def test_a_dry_run_refuses_what_training_refuses(
    overrides: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", str(write_config(tmp_path)), *(text.format(folder=tmp_path) for text in overrides)]
    assert main([*arguments, "--dry-run"]) == 2
    refused = capsys.readouterr().err
    assert sentence in refused
    assert main(arguments) == 2
    assert capsys.readouterr().err == refused


def test_train_show_and_eval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    assert main(["train", str(config)]) == 0
    output = capsys.readouterr().out
    assert "try next" in output
    assert re.search(r"^time: \d+ % \w+", output, re.MULTILINE)
    assert not list((tmp_path / "runs" / "one").glob("profile.*"))
    assert main(["show", str(tmp_path / "runs" / "one"), "--limit", "2"]) == 0
    assert "assistant" in capsys.readouterr().out
    for split in ("train", "validation"):
        assert main(["show", str(tmp_path / "runs" / "one"), "--split", split]) == 0
        shown = capsys.readouterr().out
        assert ("and trained on" in shown) != ("not trained on: " in shown)
    assert "not trained on: a held-out task" in shown
    checkpoint = tmp_path / "runs" / "one" / "checkpoints" / "step-000001"
    figures = tmp_path / "figures.json"
    options = ["--model", str(checkpoint), "--chains", "2", "--json", str(figures)]
    assert main(["eval", str(config), *options, "data.validation_count=3"]) == 0
    assert {"validation/success", "validation/pass_at_1", "validation/pass_at_2"} <= set(json.loads(figures.read_text()))
    assert main(["train", "--resume", str(tmp_path / "runs" / "one"), "train.steps=2", "--profile"]) == 0
    assert "where the time of 2 steps went" in capsys.readouterr().out
    profile = json.loads((tmp_path / "runs" / "one" / "profile.json").read_text())
    assert profile["steps"] == 2
    assert sum(part["seconds"] for part in profile["parts"].values()) == pytest.approx(profile["seconds"], rel=0.01)
    assert "agentfly/training/loop.py" in (tmp_path / "runs" / "one" / "profile.txt").read_text()
    assert main(["runs", str(tmp_path / "runs")]) == 0
    listed = capsys.readouterr().out
    assert "one" in listed
    assert "eval-one" in listed.replace("\n", "")
    assert main(["doctor", str(tmp_path / "runs" / "one")]) == 0
    told = capsys.readouterr().out
    assert "ok      draws" in told  # over a resume, too
    for name, count in (("chains.jsonl", 4 + 4 + 4 + 4 + 4), ("metrics.csv", 3)):
        assert main(["export", str(tmp_path / "runs" / "one"), str(tmp_path / name)]) == 0
        assert capsys.readouterr().out.startswith(f"{count} ")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2"]
    assert float(rows[1]["time/step_s"]) > 0
    assert rows[0]["time/step_s"] == ""
    assert main(["export", str(tmp_path / "runs" / "one"), str(tmp_path / "chains.txt")]) == 2
    assert "to a .jsonl file" in capsys.readouterr().err


def test_a_chain_whose_siblings_have_the_same_reward_was_not_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = Completion(text="Answer: 4", token_ids=[1], logprobs=[0.0], versions=[0])
    config = tmp_path / "config.toml"
    with RunStore(tmp_path / "run.db") as store:
        store.add_metrics(1, {"train/skipped": 0.0})
        for position, rewards in enumerate([(1.0, 1.0, None), (1.0, 0.0, 0.0)]):
            for chain, reward in enumerate(rewards):
                outcome = Outcome.WORLD_FAILURE if reward is None else Outcome.FINISHED
                turns = [Turn([0], True, reply)]
                stored = Trajectory(f"t1-{position}-{chain}", Task("7", ()), chain, [], turns, outcome, reward=reward)
                store.add_trajectories(1, "train", [stored])
    for algorithm, untrained in (("grpo", 2), ("rloo", 2), ("reinforce++", 0)):
        config.write_text(f'algorithm = "{algorithm}"\n[data]\ntrain = "arithmetic"\n')
        assert main(["show", str(tmp_path), "--limit", "9"]) == 0
        shown = capsys.readouterr().out
        assert shown.count("not trained on: its siblings have the same reward, so its advantage is 0") == untrained
        assert shown.count("and trained on") == 5 - untrained
        assert shown.count("not trained on: the chain ended in world_failure") == 1


@pytest.mark.parametrize("word", ["--fast", "steps", "-x=1"])
def test_a_word_that_means_nothing_is_refused(word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["eval", str(write_config(tmp_path)), "--chains", "1", word])
    assert exit_.value.code == 2
    assert word in capsys.readouterr().err


def test_eval_on_a_file_uses_the_rows_that_training_holds_out(tmp_path: Path) -> None:
    from agentfly import Config
    from agentfly.build import build_tasks, held_out_tasks

    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    config = Config.load(write_config(tmp_path), [f"data.train={tmp_path}/rows.json"])
    train, held = build_tasks(config)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "trainer.pt").touch()  # a checkpoint
    told: list[str] = []
    checkpoint = replace(config, agent=replace(config.agent, model=str(tmp_path / "saved")))
    assert held_out_tasks(checkpoint, "validation", told.append) == held
    which = f"rows of {tmp_path}/rows.json, which its training held out (all rows: --data FILE)"
    assert told == [f"{len(held)} of {len(ROWS)} {which}"]
    assert not {task.id for task in train} & {task.id for task in held}


def test_eval_of_a_model_that_was_not_trained_plays_all_rows_of_its_file(tmp_path: Path) -> None:
    from agentfly import Config
    from agentfly.build import held_out_tasks

    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    told: list[str] = []
    for key in ("train", "validation"):
        config = Config.load(None, [f"data.{key}={tmp_path}/rows.json"])
        assert len(held_out_tasks(config, "validation", told.append)) == len(ROWS)
    assert told == [f"{len(ROWS)} of {len(ROWS)} rows of {tmp_path}/rows.json"] * 2
    with pytest.raises(ConfigError, match="set data.validation, or give --data FILE"):
        held_out_tasks(Config.load(None, ["agent.max_turns=2"]), "validation")


def test_eval_plays_the_file_that_is_given_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"What is {i} plus 1?", "answer": str(i + 1)} for i in range(7)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["eval", str(write_config(tmp_path)), "--data", f"{tmp_path}/mine.jsonl", "--json", f"{tmp_path}/figures.json"]
    for more, played in (([], 7), (["data.validation_count=3"], 3)):
        assert main([*command, *more]) == 0
        assert json.loads((tmp_path / "figures.json").read_text())["validation/tasks"] == played
        assert f"{played} of 7 rows of {tmp_path}/mine.jsonl\n" in capsys.readouterr().out


def test_eval_plays_all_rows_of_a_split_that_the_config_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(
        "def sums(split, count=None, seed=0):\n"
        "    rows = [{'question': f'What is {i} plus 1 ({split})?', 'answer': str(i + 1)} for i in range(6)]\n"
        "    return rows[:count]\n"
    )
    words = [f"data.train={tmp_path}/sums.py:sums", "--json", f"{tmp_path}/figures.json"]
    config = write_config(tmp_path)
    for more, played in (([], 4), (["--split", "test"], 6), (["--split", "test", "data.validation_count=2"], 2)):
        assert main(["eval", str(config), *words, *more]) == 0
        assert json.loads((tmp_path / "figures.json").read_text())["validation/tasks"] == played


def test_a_config_key_that_is_written_as_an_option_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "quickstart", "--steps", "3"])
    assert (
        "unrecognized argument: --steps; a config key is written without dashes: train.steps=VALUE" in capsys.readouterr().err
    )


def test_sft_lowers_the_loss_on_held_out_demonstrations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_model(tmp_path / "model")
    rows = [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": 'Thought: add\nAction: add\nInput: {"a": 1, "b": 2}'},
                {"role": "user", "content": "Observation: 3"},
                {"role": "assistant", "content": "Thought: done\nAnswer: 3"},
            ]
        }
        for row in ROWS
    ]
    (tmp_path / "demos.json").write_text(json.dumps(rows))
    config = write_config(tmp_path, str(model))
    overrides = [f"data.train={tmp_path}/demos.json", "train.steps=20", "train.lr=1e-2", "rollout.num_tasks=4"]
    assert main(["sft", str(config), *overrides]) == 0
    output = capsys.readouterr().out
    before, after = (float(part.split()[0]) for part in output.split("demonstrations:")[1].split(", "))
    assert after < before - 1.0


def test_an_environment_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["envs", "check", "guess"]) == 0
    report = capsys.readouterr().out
    assert "FAILED" not in report
    assert "steps " in report
    assert main(["envs", "check"]) == 2
    assert main(["envs", "check", "gues"]) == 2
    assert "did you mean 'guess'" in capsys.readouterr().err


def test_eval_on_a_dead_server_is_one_sentence_within_seconds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address, figures = f"http://127.0.0.1:{free_port()}/v1", tmp_path / "figures.json"
    began = time.monotonic()
    words = ["eval", str(write_config(tmp_path)), "--model", f"openai:m@{address}", "--json", str(figures)]
    assert main(words) == 1
    assert time.monotonic() - began < 120  # the engine alone would be asked for ten minutes
    output = capsys.readouterr()
    assert output.err.startswith(f"EngineError: m at {address} does not answer (")
    assert output.err.count("\n") == 1
    assert output.out == "4 rows of arithmetic, validation\n"
    assert not figures.exists()
    assert not (tmp_path / "runs").exists()


class Refusing(BaseHTTPRequestHandler):
    """A server that is alive and refuses every chat request."""

    def do_GET(self) -> None:
        self.send_error(404)

    do_POST = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass


def test_eval_without_any_score_fails_and_its_json_has_no_nan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures.json"
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        model = f"openai:m@http://127.0.0.1:{server.server_address[1]}/v1"
        assert main(["eval", str(write_config(tmp_path)), "--model", model, "--json", str(figures)]) == 1
        server.shutdown()
    output = capsys.readouterr()
    assert "4/4 chains  no score yet, 4 failed" in output.out
    assert "no chain has a score (4 world_failure); the first error: " in output.err
    read = json.loads(figures.read_text(), parse_constant=pytest.fail)
    assert (read["validation/success"], read["chains"], read["scored"]) == (None, 4, 0)


def test_an_evaluation_that_fails_keeps_the_chains_that_have_ended(tmp_path: Path) -> None:
    seen: list[Trajectory] = []

    def stop_at_two(trajectory: Trajectory) -> None:
        seen.append(trajectory)
        if len(seen) == 2:
            raise RewardError("enough")

    config = Config.load(write_config(tmp_path), ["run.name=mine", "rollout.max_concurrency=1"])
    with pytest.raises(RewardError):
        evaluate_run(config, on_trajectory=stop_at_two)
    (folder,) = (tmp_path / "runs").glob("eval-mine-*")
    with RunStore(folder / "run.db", readonly=True) as store:
        assert [row.id for row in store.rows()] == [trajectory.id for trajectory in seen]
        assert store.metrics() == []


def test_eval_shows_its_progress_and_stores_its_trajectories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write_config(tmp_path)
    assert main(["eval", str(config), "--chains", "2", "run.name=mine"]) == 0
    output = capsys.readouterr().out
    assert "0/8 chains" in output
    assert "8/8 chains  success " in output
    (folder,) = (tmp_path / "runs").glob("eval-mine-*")
    assert f"agentfly show {folder}" in output
    with RunStore(folder / "run.db", readonly=True) as store:
        assert store.count(split="validation") == 8
        assert {row.name for row in store.metrics()} >= {"validation/success", "validation/pass_at_2"}
    assert main(["show", str(folder), "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert "tokens sampled, not trained on" in shown
