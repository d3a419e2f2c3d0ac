"""2 and 4 ranks over gloo give the losses, metrics and weights of one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly.learn.model.storage import load_state
from agentfly.runs.checkpoints import STATE, broken_files
from tests.close import ROUNDING, TERMS, assert_close_to_norm
from tests.scale.rank_cases import CASES, SIZES, groups_of, make_learner, make_model, run_case, updates_of, weights_of
from tests.scale.rank_checks import CHECKS, GOES_BACK, PLAIN, SAVED, go_back, go_on, other_model, save
from tests.scale.rank_pool import ROOT, run_pool

pytestmark = pytest.mark.timeout(1200)  # a busy machine imports torch four times
FOUR = (
    "grpo in micro batches",
    "grpo, window",
    "gspo",
    "ppo",
    "lora, ppo",
    "a single row",
    "a loss over the minibatch",
    "bfloat16",
)
"""What runs on four ranks by day: each kind of batch, loss, critic and weights once. All cases run on two."""
SAVED_ON_FOUR = ("ppo, shared critic", "lora")
DIVISION = {"train/padding_waste"}
"""Metrics of the division into micro batches, which is another one on several ranks."""
TERMS_OF = {torch.float32: TERMS, torch.bfloat16: 1}


def limit_of(name: str) -> float:
    """How far metrics and log-probs of a case may differ: by the roundings of long sums, or of a few bfloat16 numbers."""
    return ROUNDING if "dtype" not in CASES[name] else 4 * torch.finfo(torch.bfloat16).eps


def pattern_of(names: Iterable[str]) -> str:
    return f"^({'|'.join(map(re.escape, names))})$"


def on_four(night: bool = False) -> list[str]:
    """The cases and checks of four ranks by day, or the others."""
    by_day = {*FOUR, *CHECKS} - {f"saved {name}" for name in SAVED} | {f"saved {name}" for name in SAVED_ON_FOUR}
    return [name for name in (*CASES, *CHECKS) if (name in by_day) != night]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases on two ranks, and of some on four: forked processes run them once."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in SAVED:
        learner = make_learner(CASES[name], make_model(CASES[name]))
        learner.update(groups_of(CASES[name], 0))
        save(learner, folder, f"1-ranks-{name}")
    run_pool(folder, [2])
    run_pool(folder, [4], pattern=pattern_of(on_four()))
    return folder


@pytest.fixture(scope="module")
def whole(found: Path) -> Path:
    """The results of all cases."""
    run_pool(found, [4], pattern=pattern_of(on_four(night=True)))
    return found


def end_ranks(groups: int) -> None:
    """A thread of gloo that releases a tensor while the interpreter ends would abort the process."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "tests.scale.short_groups", f"{groups}"]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1100, check=True)
    assert json.loads(done.stdout) == [0] * 2 * groups, done.stderr


def test_a_rank_that_ends_right_after_a_collective_ends_well() -> None:
    end_ranks(6)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_that_torchrun_starts_on_one_machine_listen_on_loopback_and_send_no_command_through_its_store(
    tmp_path: Path,
) -> None:
    """torchrun's store listens on every interface."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, sys\nsys.path[:0] = ['.']\nfrom contextlib import closing\n"
        "from agentfly.learn.ranks.environment import read_rank\nfrom agentfly.learn.ranks.group import RankGroup\n"
        "from tests.scale.rank_pool import LOOPBACK, listening\n"
        "with closing(RankGroup.join(read_rank(), 'cpu', 300.0)) as group:\n"
        "    assert group._store.underlying_store.port != int(os.environ['MASTER_PORT']), 'the store is that of torchrun'\n"
        "    assert listening() and set(listening()) <= LOOPBACK, listening()\n"
        "    if group.leads:\n        group.end_ranks()\n"
        "    else:\n        assert group.receive() == ('stop', {})\n        group.say_ended()\n"
    )
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_hundred_ranks_that_end_right_after_a_collective_end_well() -> None:
    end_ranks(50)


def assert_near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], terms: int | None = None) -> None:
    """The optimizer keeps bfloat16 weights in float32 and rounds each of them once."""
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype
        assert_close_to_norm(got[key], tensor, terms=TERMS_OF[tensor.dtype] if terms is None else terms, of=key)


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in CASES), *((name, 4) for name in FOUR)])
def test_ranks_compute_what_one_process_computes(name: str, size: int, found: Path) -> None:
    assert_computed(name, size, found)


@pytest.mark.parametrize("name", [name for name in CASES if name not in FOUR])
def test_four_ranks_compute_what_one_process_computes(name: str, whole: Path) -> None:
    assert_computed(name, 4, whole)


def assert_computed(name: str, size: int, found: Path) -> None:
    """Assert that these ranks have the losses, metrics and weights of one process."""
    got: dict[str, Any] = torch.load(found / f"{size}-{name}.pt", weights_only=True)
    want = run_case(CASES[name], updates=updates_of(CASES[name], size))
    limit = limit_of(name)
    assert got["version"] == want["version"]
    for told, expected in zip(got["metrics"] + got["measured"], want["metrics"] + want["measured"], strict=True):
        assert told.keys() == expected.keys()
        for key in expected.keys() - DIVISION:
            assert told[key] == pytest.approx(expected[key], rel=limit, abs=limit), key
    assert got["logprobs"] == pytest.approx(want["logprobs"], abs=limit)
    assert_near(got["weights"], want["weights"])


REFUSED = "InvariantError: refused"
NOT_FINITE = "InvariantError: step 0: the loss is nan"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("a check refuses", REFUSED),
        ("the announcement fails", REFUSED),
        ("a loss raises on one rank", "ZeroDivisionError: the first chain"),
        ("a loss is not finite on one rank", NOT_FINITE),
    ],
)
def test_an_error_of_one_rank_is_one_of_all_and_changes_nothing(name: str, error: str, size: int, found: Path) -> None:
    told = torch.load(found / f"{size}-{name}.pt", weights_only=True)
    assert error in told["error"]
    assert told["unchanged"]
    assert not told["half_updated"]
    assert told["version"] == 0
    assert told["answers"] == 2


@pytest.mark.parametrize("size", SIZES)
def test_an_error_after_the_first_step_leaves_half_an_update(size: int, found: Path) -> None:
    told = torch.load(found / f"{size}-a later step is not finite.pt", weights_only=True)
    assert NOT_FINITE in told["error"]
    assert told["half_updated"]
    assert not told["unchanged"]
    assert told["version"] == 1


@pytest.mark.parametrize("size", SIZES)
def test_ranks_agree_on_the_size_of_micro_batches(size: int, found: Path) -> None:
    told = torch.load(found / f"{size}-budgets differ.pt", weights_only=True)
    learner = make_learner(PLAIN, make_model(PLAIN))
    metrics = learner.update(groups_of(PLAIN, 0))
    assert told["tokens"] == 16
    assert told["metrics"]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=ROUNDING)
    assert_near(told["weights"], weights_of(learner))


@pytest.mark.parametrize("size", SIZES)
def test_ranks_that_go_back_to_a_checkpoint_go_on_as_one_process_does(size: int, found: Path, tmp_path: Path) -> None:
    weights, metrics = torch.load(found / f"{size}-goes back.pt", weights_only=True)
    own, expected = go_back(make_learner(GOES_BACK, make_model(GOES_BACK)), tmp_path)
    assert_near(weights, own)
    for key in expected.keys() - DIVISION:
        assert metrics[key] == pytest.approx(expected[key], rel=ROUNDING, abs=ROUNDING), key


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in SAVED), *((name, 4) for name in SAVED_ON_FOUR)])
def test_a_checkpoint_is_loaded_exactly_by_any_number_of_ranks(name: str, size: int, found: Path) -> None:
    assert_loaded(name, size, found)


@pytest.mark.parametrize("name", [name for name in SAVED if name not in SAVED_ON_FOUR])
def test_a_checkpoint_is_loaded_exactly_by_four_ranks(name: str, whole: Path) -> None:
    assert_loaded(name, 4, whole)


def assert_loaded(name: str, size: int, found: Path) -> None:
    """Assert that what one, two and four ranks have saved was loaded by these ranks, which went on as one process does."""
    told = torch.load(found / f"{size}-saved {name}.pt", weights_only=True)
    own = told.pop("own")
    assert told.keys() >= {"1-ranks", f"{size}-ranks"}
    assert size != 4 or "2-ranks" in told
    limit = limit_of(name)
    for source, (loaded, version, metrics, weights) in told.items():
        checkpoint = found / f"{source}-{name}" / "step-000001"
        assert not broken_files(checkpoint)
        saved = make_learner(CASES[name], other_model(CASES[name]))
        saved.restore(checkpoint, load_state(checkpoint / STATE)["learner"])
        assert_near(loaded, weights_of(saved), 0)
        assert version == saved.version == own[1] == 1
        if source == f"{size}-ranks":
            assert_near(loaded, own[0], 0)
            assert_near(weights, own[3], 0)
        further = go_on(saved, name)
        for key in further[0].keys() - DIVISION:
            assert metrics[key] == pytest.approx(further[0][key], rel=limit, abs=limit), key
        assert_near(weights, further[1])
