"""The real vLLM as a server on loopback, trained from over HTTP. Skipped where it is not installed."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
import time

import httpx
import pytest
import torch

import agentfly
from agentfly.engines import open_engine
from agentfly.errors import InvariantError
from agentfly.training.ranks.process import free_port
from agentfly.types import Request, Sampling
from tests.close import assert_close_to_norm
from tests.tiny import ROWS, save_tiny_model, tiny_agent

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: pip install 'agentfly[vllm]'"),
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
PROMPT = [(31 * i + 5) % 900 for i in range(150)]
KEY = "sk-canary-4713"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=32)


def start(folder, log, *options):
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--served-model-name", "tiny",
        "--dtype", "float32", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port), *options,
    ]  # fmt: skip
    settings = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1", "VLLM_API_KEY": KEY, "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(command, env={**os.environ, **settings}, stdout=out, stderr=out)
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code == 200:
                return process, f"http://127.0.0.1:{port}/v1"
        except httpx.HTTPError:
            time.sleep(0.5)
    process.kill()
    process.wait(30)
    raise AssertionError(log.read_text(errors="replace")[-2000:])


@pytest.fixture(scope="module")
def url(folder, tmp_path_factory):
    process, address = start(folder, tmp_path_factory.mktemp("log") / "log", "--logprobs-mode", "processed_logprobs")
    yield address
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(30)


@pytest.fixture
def options(url, tmp_path):
    return {"kind": "openai", "base_url": url, "served_model": "tiny", "weights_dir": tmp_path / "weights", "device": "cpu"}


def test_weights_go_over_and_are_sampled_from(folder, options):
    engine, _ = open_engine(str(folder), **options, api_key=KEY, max_gap=1e-3)
    engine.publish(0)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for weights in engine.model.parameters():
            weights.add_(0.02 * torch.randn(weights.shape, generator=generator))
    engine.publish(1)
    assert engine.proof.gap < 1e-4 < engine.proof.moved
    done = asyncio.run(engine.generate(Request(PROMPT, Sampling(temperature=0.6, max_tokens=10, seed=3))))
    with torch.no_grad():
        logits = engine.model(torch.tensor([PROMPT + done.token_ids])).logits[0, len(PROMPT) - 1 : -1] / 0.6
    want = torch.log_softmax(logits, -1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0].tolist()
    assert_close_to_norm(done.logprobs, want, scale=1.0)
    assert set(done.versions) == {1}
    # Weights that the server is not told of are noticed.
    engine._dialect.load = lambda *args, **options: None
    with torch.no_grad():
        next(engine.model.parameters()).mul_(1.01)
    with pytest.raises(InvariantError, match="weights"):
        engine.publish(2)
    asyncio.run(engine.close())


def test_a_run_trains_from_it(folder, options, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    agent = tiny_agent(folder, engine=options)
    settings = {"run.dir": str(tmp_path / "runs"), "train.lr": 1e-2, "rollout.num_tasks": 2, "rollout.num_chains": 3}
    result = agentfly.train(
        agent, data=ROWS[:-2], validation=ROWS[-2:], steps=2, **{"train.validate_at_start": False}, **settings
    )
    asyncio.run(agent.close())
    assert all(row["handover/gap"] < 1e-4 and row["train/logprob_gap"] < 1e-4 for row in result.history)
    assert not any(KEY in path.read_text() for path in (tmp_path / "runs").rglob("*.toml"))
