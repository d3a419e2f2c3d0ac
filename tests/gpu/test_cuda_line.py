"""The straight line on a CUDA device: the same code samples, scores, learns and publishes there."""

from __future__ import annotations

from pathlib import Path

import pytest

import agentfly
from tests.needs import needs_cuda
from tests.tiny import ROWS, save_tiny_model, tiny_agent

pytestmark = [pytest.mark.gpu, needs_cuda]


@pytest.mark.parametrize(("dtype", "gap"), [("float32", 1e-3), ("bfloat16", 0.02), ("float16", 0.005)])
def test_a_model_on_the_gpu_samples_what_the_learner_scores_and_improves(tmp_path: Path, dtype: str, gap: float) -> None:
    agent = tiny_agent(save_tiny_model(tmp_path / "model"), engine={"device": "cuda", "dtype": dtype, "kv_gib": 1})
    result = agentfly.train(
        agent,
        ROWS,
        steps=20,
        lr=2e-2,
        num_tasks=4,
        num_chains=4,
        run={"dir": str(tmp_path / "runs"), "name": "gpu"},
    )
    assert agent.engine.model.device.type == "cuda"  # type: ignore[attr-defined]
    assert max(metrics["train/logprob_gap"] for metrics in result.history) < gap
    assert result.after["validation/reward"] > result.before["validation/reward"] + 0.1
