"""Two FSDP2 ranks that share one GPU (over gloo) compute what one process computes there, with the fused kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.needs import needs_cuda

pytestmark = [pytest.mark.gpu, needs_cuda]

NAMES = ("grpo in micro batches", "grpo, gradient checkpointing", "ppo", "lora", "gspo", "bfloat16")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.scale.rank_pool import run_pool

    folder = tmp_path_factory.mktemp("ranks")
    run_pool(folder, [2], "cuda:0", f"^({'|'.join(NAMES)})$")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_on_one_gpu_compute_what_one_process_computes(name: str, found: Path) -> None:
    from tests.scale.rank_cases import CASES, run_case

    got = torch.load(found / f"2-{name}.pt", weights_only=True)
    want = run_case(CASES[name], device="cuda:0")
    limit = 1e-4 if "dtype" not in CASES[name] else 2e-2
    assert got["version"] == want["version"]
    assert got["path"] == "; ".join(["2 ranks", *(note for note in want["path"].split("; ") if "CUDA graphs" not in note)])
    for told, expected in zip(got["metrics"], want["metrics"], strict=True):
        for key in expected.keys() - {"train/padding_waste"}:
            assert told[key] == pytest.approx(expected[key], rel=limit, abs=limit), key
    for key, tensor in want["weights"].items():
        assert (got["weights"][key].float() - tensor.float()).abs().max() <= limit, key
