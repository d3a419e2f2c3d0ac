"""`agentfly replay` agrees with sound runs of all kinds, and finds records that do not follow from the others."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly import reward, tool
from agentfly.cli import main
from agentfly.health import PROMISES, Check, replay
from agentfly.learn.algorithms.replay import identical
from agentfly.runs.codec import decode, encode
from agentfly.types import Action, Completion, Task, ToolCall, ToolResult, Trajectory
from tests.tiny import ROWS, TwoTurns, even, look, save_tiny_model, tiny_agent


@reward(name="even_turns")
def even_turns(trajectory: Trajectory) -> dict[str, Any]:
    """Pays each turn for its own tokens."""
    ids = [turn.completion.token_ids for turn in trajectory.turns]
    return {"reward": 0.5, "turn_rewards": [sum(token % 2 == 0 for token in own) / len(own) for own in ids]}


class Doors:
    """Two rooms: which of them the chain is in depends on its replies, and is not in what it reads."""

    def reset(self, task: Task) -> None:
        self.room = 0

    def look(self, room: int) -> ToolResult:
        self.room = room
        return ToolResult(observation=f"a door, number {random.random()}", reward=0.25 * room)

    def state_key(self) -> str:
        return f"room {self.room}"

    def close(self) -> None: ...


@tool(name="look", stateful=True, register=False)
async def look_in_rooms(room: int, doors: Doors) -> ToolResult:
    """Look around."""
    return doors.look(room)


class ByParity(TwoTurns):
    """Looks into the room that the sum of its tokens names."""

    def parse(self, completion: Completion) -> Action:
        return Action(calls=(ToolCall("look", {"room": sum(completion.token_ids) % 2}),))


SMALL: dict[str, Any] = {
    "num_tasks": 3, "num_chains": 4, "threads": 1, "lr": 1e-2, "steps": 3, "validation_count": 2, "validate_at_start": False,
    "validate_every": 0,
}  # fmt: skip
RAGGED = {"sampling": {"max_tokens": 12, "stop": ["e"]}}
LAG = {"max_lag": 2, "depth": 2, "steps": 5, "agent": RAGGED}
SOUND: dict[str, dict[str, Any]] = {
    "in turn": {"agent": RAGGED},
    "ppo, KL in the reward, several steps": {"algorithm": "ppo", "loss": {"kl_coef": 0.1}, "epochs": 2, "num_minibatches": 2},
    "ppo with a shared critic and entropy": {"algorithm": "ppo", "loss": {"critic": "shared", "entropy_coef": 0.01}},
    "rloo, KL in the reward, adapters": {"algorithm": "rloo", "loss": {"kl_coef": 0.1}, "lora": {"rank": 4}, "agent": RAGGED},
    "grpo, KL in the loss, small batches": {"loss": {"kl_coef": 0.1}, "max_tokens_per_batch": 100, "agent": RAGGED},
    "gspo with a lag and the sequence's weight": {"algorithm": "gspo", "loss": {"correction": "sequence"}, **LAG},
    "cispo with a lag, tokens masked": {"algorithm": "cispo", "loss": {"correction": "mask"}, "at_limit": "mask", **LAG},
    "sampled log-probs, sums of sequences": {"algorithm": "dr_grpo", "loss": {"old_logprobs": "sampled"}, **LAG},
    "older keys and values kept": {"at_update": "keep", **LAG},
    "older keys and values kept, no correction": {"at_update": "keep", "loss": {"correction": "off"}, **LAG},
    "gigpo": {"algorithm": "gigpo"},
    "ppo with a shared critic, credit per turn": {
        "algorithm": "ppo", "loss": {"critic": "shared", "turn_credit": True, "gamma": 0.9, "lam": 0.8},
    },
    "grpo, credit and rewards per turn": {"loss": {"turn_credit": True, "gamma": 0.9}, "agent": {"reward": even_turns}},
    "opo, a schedule": {"algorithm": "opo", "agent": RAGGED, "train": {"warmup_steps": 2, "schedule": "cosine"}},
    "reinforce++": {"algorithm": "reinforce++", "agent": RAGGED},
    "reinforce++ with a baseline": {"algorithm": "reinforce++_baseline", "agent": RAGGED},
    "the rate that follows from the model": {"lr": None, "lora": {"rank": 4}},
    "a rate below the rounding of the weights": {"lr": 1e-15},
    "bfloat16": {"agent": {"engine": {"kind": "local", "dtype": "bfloat16"}}},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def train(model: Path, folder: Path, **options: Any) -> Path:
    agent = options.pop("agent", {})
    settings = {name: value for name, value in (SMALL | options).items() if value is not None}
    agentfly.train(tiny_agent(model, **agent), ROWS, run={"dir": str(folder), "name": "run"}, **settings)
    return folder / "run"


@pytest.fixture(scope="module")
def ragged(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(model, tmp_path_factory.mktemp("ragged"), agent=RAGGED)


def checks(run: Path) -> dict[str, Check]:
    return {check.name: check for check in replay(run).checks}


def sql(run: Path, statement: str) -> None:
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        assert db.execute(statement).rowcount > 0


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_run_is_computed_again(model: Path, tmp_path: Path, kind: str) -> None:
    run = train(model, tmp_path, **SOUND[kind])
    found = checks(run)
    assert {name: (check.problems, check.skipped) for name, check in found.items()} == dict.fromkeys(PROMISES, ([], None))
    steps = SOUND[kind].get("steps", SMALL["steps"])
    assert found["credit"].evidence.startswith(f"{steps} steps, ")
    assert found["loss"].evidence.startswith(f"{steps - ('several' in kind)} steps"), "one of PPO's is the critic's alone"
    assert found["reference"].evidence.startswith(f"{steps if 'KL' in kind else 0} steps")


class SomeEnd(TwoTurns):
    """Replies with an even sum of tokens are answers; the other chains end at `max_turns`."""

    def parse(self, completion: Completion) -> Action:
        return super().parse(completion) if sum(completion.token_ids) % 2 else Action(answer=completion.text)


def test_a_run_whose_truncated_chains_are_masked_is_computed_again(model: Path, tmp_path: Path) -> None:
    agent = SomeEnd(str(model), tools=[look], reward=even, max_turns=2, **RAGGED)
    run = {"dir": str(tmp_path), "name": "run"}
    result = agentfly.train(agent, ROWS, run=run, loss={"truncated": "mask"}, **SMALL)
    assert all(0 < row["train/masked_tokens"] < row["train/tokens"] for row in result.history)
    found = checks(tmp_path / "run")
    assert {name: (check.problems, check.skipped) for name, check in found.items()} == dict.fromkeys(PROMISES, ([], None))


def test_gigpo_over_the_stored_names_of_states_and_rewards_of_tools_is_computed_again(model: Path, tmp_path: Path) -> None:
    agent = ByParity(str(model), tools=[look_in_rooms], reward=even_turns, max_turns=4, sampling={"max_tokens": 4})
    agentfly.train(agent, ROWS, algorithm="gigpo", run={"dir": str(tmp_path), "name": "run"}, **(SMALL | {"steps": 2}))
    found = checks(tmp_path / "run")
    assert {name: (check.problems, check.skipped) for name, check in found.items()} == dict.fromkeys(PROMISES, ([], None))
    with closing(sqlite3.connect(tmp_path / "run" / "run.db")) as db, db:
        chains = {key: decode(body) for key, body in db.execute("SELECT key, body FROM bodies")}
        assert {turn.state for chain in chains.values() for turn in chain} == {"Doors: room 0", "Doors: room 1"}
        key, chain = next((key, chain) for key, chain in chains.items() if len(chain) == 4)
        chain.turns[0].reward += 0.125
        chain.turns[1].reward -= 0.125
        db.execute("UPDATE bodies SET body = ? WHERE key = ?", (encode(chain), key))
    (problem,) = checks(tmp_path / "run")["rescored"].problems
    assert problem.startswith(f"turn 1 of chain {chain.id} has the reward"), problem


RECORDS: dict[str, tuple[str, str]] = {
    "another advantage": ("credit", "UPDATE trajectories SET advantage = advantage + 0.01 WHERE id = 't2-1-0'"),
    "another learning rate": ("updates", "UPDATE metrics SET value = 0.011 WHERE step = 2 AND name = 'train/lr'"),
    "another number of tokens": ("updates", "UPDATE metrics SET value = value + 1 WHERE step = 2 AND name = 'train/tokens'"),
    "a step that Adam did not count": ("updates", "UPDATE metrics SET value = 1 WHERE step = 2 AND name = 'train/adam_steps'"),
    "weights that did not move": ("updates", "UPDATE metrics SET value = 0 WHERE step = 2 AND name = 'train/weight_change'"),
    "a version that did not grow": ("updates", "UPDATE metrics SET value = 1 WHERE step = 3 AND name = 'train/version'"),
    "another loss": ("loss", "UPDATE metrics SET value = value + 0.01 WHERE step = 2 AND name = 'train/policy_loss'"),
    "another gap": ("loss", "UPDATE metrics SET value = value + 1e-5 WHERE step = 2 AND name = 'train/logprob_gap'"),
    "another gradient": ("loss", "UPDATE metrics SET value = 1.01 * value WHERE step = 2 AND name = 'train/slope'"),
}


@pytest.mark.parametrize("fault", RECORDS)
def test_a_record_that_does_not_follow_is_found(tmp_path: Path, ragged: Path, fault: str) -> None:
    run = Path(shutil.copytree(ragged, tmp_path / "run"))
    name, statement = RECORDS[fault]
    sql(run, statement)
    assert {check for check, found in checks(run).items() if not found.ok} == {name}


def test_the_command_prints_the_checks_and_fails_if_one_does(ragged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(ragged)]) == 0
    assert capsys.readouterr().out.endswith("6 checks hold, 0 do not, 0 skipped\n")
    assert main(["replay", str(ragged), "--json"]) == 0
    assert [check["name"] for check in json.loads(capsys.readouterr().out)["checks"]] == list(PROMISES)


def test_a_run_that_did_not_record_its_settings_is_skipped(ragged: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(ragged, tmp_path / "run"))
    sql(run, "DELETE FROM meta WHERE key = 'rules'")
    assert {check.skipped for check in checks(run).values()} == {"the run did not record the settings of its steps"}


def test_equal_siblings_are_counted_beside_what_chance_gives() -> None:
    chains = [(0, [1, 2], -10.0), (0, [1, 2], -10.0), (0, [1, 3], -8.0), (1, [1, 2], -10.0)]
    pairs, expected = identical(chains)
    assert pairs == 1
    assert expected == pytest.approx(2 * 4.53999e-05 + 3.354626e-04, rel=1e-4)
