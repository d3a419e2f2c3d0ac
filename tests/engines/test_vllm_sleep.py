"""What is refused before vLLM is asked: it need not be installed."""

from __future__ import annotations

import pytest

from agentfly.engines import vllm_engine
from agentfly.errors import ConfigError


def test_a_second_engine_that_sleeps_is_refused_with_the_way_out(monkeypatch):
    vllm_engine._check_first_sleeper()
    monkeypatch.setattr(vllm_engine.VllmEngine, "slept", True)
    with pytest.raises(ConfigError, match=r"start a new process, or set agent\.engine\.sleep = false"):
        vllm_engine._check_first_sleeper()
