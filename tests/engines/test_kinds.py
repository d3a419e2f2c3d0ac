"""Which engine a config asks for, and what is refused when it is read."""

from __future__ import annotations

import subprocess
import sys

import pytest

import agentfly
from agentfly.config import Config
from agentfly.engines import open_engine
from agentfly.errors import ConfigError
from agentfly.testing import ScriptedEngine

SERVER = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1"}


def config(engine, model="pocket", **sampling):
    return Config.from_dict({"agent": {"engine": engine, "model": model}, "sampling": sampling})


@pytest.mark.parametrize(
    "engine", ["local", "vllm", "openai", {"kind": "vllm", "sleep": False}, {**SERVER, "server": "sglang"}]
)
def test_a_kind_is_a_word_or_a_table(engine):
    assert config(engine).agent.engine == engine


@pytest.mark.parametrize(
    ("engine", "sentence"),
    [
        ("vlm", "no engine is called 'vlm'; did you mean 'vllm'"),
        ({"kind": "vllm", "kv_tokens": 5}, "no option 'kv_tokens'"),
        ({"kind": "vllm", "max_step_tokens": 5}, "no option 'max_step_tokens'"),
        ({**SERVER, "kv_gib": 1.0}, "no option 'kv_gib'"),
        ({**SERVER, "sleep": True}, "no option 'sleep'"),
        ({"kind": "local", "memory_fraction": 0.5}, "no option 'memory_fraction'"),
        ({"max_bach": 4}, "no option 'max_bach'; did you mean 'max_batch'"),
        ({**SERVER, "api_key": "sk-canary"}, "set OPENAI_API_KEY"),
    ],
)
def test_what_an_engine_does_not_have_is_refused_when_the_config_is_read(engine, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        config(engine)
    assert "canary" not in str(caught.value)


def test_a_served_chat_model_has_no_other_engine():
    with pytest.raises(ConfigError, match="behind a server"):
        config("vllm", model="openai:m@http://127.0.0.1:9/v1")


def test_a_chat_servers_options_are_its_own():
    with pytest.raises(ConfigError, match="no option 'weights_dir'"):
        config({"weights_dir": "x"}, model="openai:m@http://127.0.0.1:9/v1")
    assert config({"timeout_s": 3.0}, model="openai:m@http://127.0.0.1:9/v1").agent.model.startswith("openai:")


def train(engine, model="pocket", **sampling):
    tree = {
        "agent": {"engine": engine, "model": model, "tools": ["add"]}, "data": {"train": "arithmetic"}, "sampling": sampling,
    }  # fmt: skip
    agentfly.train(Config.from_dict(tree))


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
@pytest.mark.parametrize("engine", ["vllm", {**SERVER, "weights_dir": "w"}])
def test_training_on_vllm_refuses_what_would_spoil_its_log_probs(engine, cut):
    with pytest.raises(ConfigError, match=f"sampling.{next(iter(cut))} cuts the distribution"):
        train(engine, **cut)


def test_evaluating_does_not():
    assert config("vllm", top_p=0.9).sampling.top_p == 0.9


def test_training_from_a_server_needs_a_folder_that_both_see():
    with pytest.raises(ConfigError, match=r"set agent\.engine\.weights_dir"):
        train(SERVER)


def test_training_from_a_chat_server_is_refused_before_anything_is_opened():
    with pytest.raises(ConfigError, match="text, not token ids"):
        train({}, model="openai:m@http://127.0.0.1:9/v1")


def test_a_missing_vllm_says_how_to_get_it():
    import importlib.util

    if importlib.util.find_spec("vllm") is not None:
        pytest.skip("vLLM is installed here")
    with pytest.raises(agentfly.errors.MissingExtra, match=r"pip install 'agentfly\[vllm\]'"):
        open_engine("pocket", kind="vllm")


def test_an_open_engine_takes_no_kind():
    with pytest.raises(ConfigError, match="already open"):
        open_engine(ScriptedEngine([]), kind="vllm")


def test_reading_such_a_config_loads_nothing_heavy():
    code = (
        "import sys; from agentfly.config import Config; "
        "Config.from_dict({'agent': {'engine': {'kind': 'vllm', 'max_batch': 8}}}); "
        "Config.from_dict({'agent': {'engine': {'kind': 'openai', 'server': 'sglang'}}}); "
        "print(sorted({'torch', 'transformers', 'vllm', 'httpx'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
