"""2 and 4 ranks over gloo give the losses, metrics and weights of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly.learn.model.storage import load_state
from agentfly.runs.checkpoints import STATE, broken_files
from tests.close import ROUNDING, TERMS, assert_close_to_norm
from tests.scale.rank_cases import CASES, SIZES, groups_of, make_learner, make_model, run_case, updates_of, weights_of
from tests.scale.rank_checks import PLAIN, SAVED, go_on, other_model, save
from tests.scale.rank_pool import ROOT, run_pool

pytestmark = pytest.mark.timeout(1200)  # a busy machine imports torch four times
DIVISION = {"train/padding_waste"}
"""Metrics of the division into micro batches, which is another one on several ranks."""
TERMS_OF = {torch.float32: TERMS, torch.bfloat16: 1}


def limit_of(name: str) -> float:
    """How far metrics and log-probs of a case may differ: by the roundings of long sums, or of a few bfloat16 numbers."""
    return ROUNDING if "dtype" not in CASES[name] else 4 * torch.finfo(torch.bfloat16).eps


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases: four processes run them once."""
    folder = tmp_path_factory.mktemp("ranks")
    for name in SAVED:
        learner = make_learner(CASES[name], make_model(CASES[name]))
        learner.update(groups_of(CASES[name], 0))
        save(learner, folder, f"1-ranks-{name}")
    run_pool(folder, SIZES)
    return folder


def end_ranks(groups: int) -> None:
    """A thread of gloo that releases a tensor while the interpreter ends would abort the process."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})}
    words = [sys.executable, "-m", "tests.scale.short_groups", f"{groups}"]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=1100, check=True)
    assert json.loads(done.stdout) == [0] * 2 * groups, done.stderr


def test_a_rank_that_ends_right_after_a_collective_ends_well() -> None:
    end_ranks(6)


def test_a_hundred_ranks_that_end_right_after_a_collective_end_well() -> None:
    end_ranks(50)


def assert_near(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], terms: int | None = None) -> None:
    """The optimizer keeps bfloat16 weights in float32 and rounds each of them once."""
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        assert got[key].dtype == tensor.dtype
        assert_close_to_norm(got[key], tensor, terms=TERMS_OF[tensor.dtype] if terms is None else terms, of=key)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_computes(name: str, size: int, found: Path) -> None:
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
@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_is_loaded_exactly_by_any_number_of_ranks(name: str, size: int, found: Path) -> None:
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
