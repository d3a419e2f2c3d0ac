"""The real vLLM on a GPU: asleep while the learner updates, and beside a learner on another device.

Each test runs in a separate process: vLLM can make one engine that sleeps in a process's life.
"""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import agentfly
from agentfly.engines import open_engine
from agentfly.errors import ConfigError, EngineError
from agentfly.types import Request, Sampling
from tests.needs import needs_cuda
from tests.tiny import ROWS, save_tiny_model, tiny_agent

pytestmark = [
    pytest.mark.gpu,
    needs_cuda,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'agentfly[vllm]'"),
    pytest.mark.timeout(900),
]
PROMPT = [(31 * i + 5) % 900 for i in range(150)]
SETTINGS: dict[str, Any] = {"kind": "vllm", "max_batch": 16, "memory_fraction": 0.1, "eager": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=64)


def ask(engine: Any, **sampling: Any) -> Any:
    return asyncio.run(engine.generate(Request(list(PROMPT), Sampling(**sampling))))


def mean_gap(engine: Any, done: Any) -> float:
    """How far its log-probs are from those of a forward pass of the learner's copy."""
    model = engine.model
    ids = torch.tensor([PROMPT + done.token_ids], device=model.device)
    with torch.no_grad():
        logits = model(ids).logits[0, len(PROMPT) - 1 : -1].float()
    want = torch.log_softmax(logits, -1).gather(1, ids[0, len(PROMPT) :, None])[:, 0].cpu()
    return float((want - torch.tensor(done.logprobs)).abs().mean())


def change(engine: Any) -> None:
    with torch.no_grad():
        for number, weights in enumerate(engine.model.parameters()):
            generator = torch.Generator().manual_seed(number)
            weights.add_(0.05 * torch.randn(weights.shape, generator=generator).to(weights))


def in_its_own_process(work: Callable[..., None], *given: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=work, args=given)
    process.start()
    process.join(600)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, "its traceback is above"


def test_it_sleeps_while_the_learner_updates_and_wakes_with_the_new_weights(folder: Path) -> None:
    in_its_own_process(sleep_and_wake, folder)


@pytest.mark.parametrize("learner", [{}, {"learner_device": "cpu"}], ids=["shared card, sleeping", "learner elsewhere"])
def test_a_run_trains_on_vllm(folder: Path, tmp_path: Path, learner: dict[str, Any]) -> None:
    in_its_own_process(train, folder, tmp_path, learner)


def sleep_and_wake(folder: Path) -> None:
    engine, _ = open_engine(str(folder), **SETTINGS)
    try:
        assert engine.sleeps
        engine.publish(1)
        assert mean_gap(engine, ask(engine, max_tokens=12, seed=3)) < 0.02
        torch.cuda.synchronize()
        awake = torch.cuda.mem_get_info()[0]
        engine.rest()
        assert torch.cuda.mem_get_info()[0] > awake + 2**30  # a tenth of the card was its weights and cache
        with pytest.raises(EngineError, match="sleeps"):
            ask(engine, max_tokens=2)
        change(engine)
        engine.publish(2)
        assert engine.proof.gap < 0.05 < engine.proof.moved
        done = ask(engine, max_tokens=12, seed=3)
        assert set(done.versions) == {2}
        assert mean_gap(engine, done) < 0.02
    finally:
        engine.shut()
    with pytest.raises(ConfigError, match="supports only one"):
        open_engine(str(folder), **SETTINGS)


def train(folder: Path, tmp_path: Path, learner: dict[str, Any]) -> None:
    agent = tiny_agent(folder, engine={**SETTINGS, **learner})
    result = agentfly.train(
        agent,
        ROWS,
        steps=10,
        lr=2e-2,
        num_tasks=4,
        num_chains=4,
        run={"dir": str(tmp_path / "runs"), "name": "gpu"},
    )
    engine: Any = agent.engine
    assert engine.sleeps is (not learner)
    assert engine.model.device.type == ("cpu" if learner else "cuda")
    asyncio.run(agent.close())
    assert max(metrics["handover/gap"] for metrics in result.history) < 0.05
    assert max(metrics["train/logprob_gap"] for metrics in result.history) < 0.05
    assert result.after["validation/reward"] > result.before["validation/reward"]
