"""Which engine a config asks for, and what is refused when it is read."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest

import agentfly
from agentfly.config import Config
from agentfly.engines import open_engine, short_name
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
        ({"kv_tokens": 5, "kv_fraction": 0.5}, "kv_tokens and kv_fraction all say how large the cache is"),
        ({"max_bach": 4}, "no option 'max_bach'; did you mean 'max_batch'"),
        ({**SERVER, "api_key": "sk-canary"}, "set OPENAI_API_KEY"),
    ],
)
def test_what_an_engine_does_not_have_is_refused_when_the_config_is_read(engine, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        config(engine)
    assert "canary" not in str(caught.value)


LOCAL, VLLM, CHAT = {"kind": "local"}, {"kind": "vllm"}, {}
BAD = [
    (LOCAL, "cache", "books", "'slots' or 'pages'"),
    (LOCAL, "dtype", "int8", "'float32', 'bfloat16' or 'float16'"),
    (LOCAL, "device", "tpu", "a device such as 'cpu', 'cuda' or 'cuda:1'"),
    (LOCAL, "kv_gib", -1, "a number above 0"),
    (LOCAL, "kv_gib", float("nan"), "a number above 0"),
    (LOCAL, "kv_fraction", 1.5, "a number above 0 and at most 1"),
    (LOCAL, "max_batch", 0, "an integer of at least 1"),
    (LOCAL, "max_batch", "many", "an integer of at least 1"),
    (LOCAL, "max_batch", 2.5, "an integer of at least 1"),
    (LOCAL, "max_batch", True, "an integer of at least 1"),
    (LOCAL, "chat_template", "", "a string that is not empty"),
    (VLLM, "sleep", "yes", "true or false"),
    (VLLM, "eager", 1, "true or false"),
    (VLLM, "memory_fraction", 2.0, "a number above 0 and at most 1"),
    (VLLM, "block_size", -4, "an integer of at least 1"),
    (VLLM, "learner_device", "toaster", "a device such as"),
    (SERVER, "server", "tgi", "'vllm' or 'sglang'"),
    (SERVER, "base_url", "ftp://x", "an address like http://host:port/v1"),
    (SERVER, "base_url", "http://host:eighty/v1", "an address like http://host:port/v1"),
    (SERVER, "timeout_s", -1, "a number above 0"),
    (SERVER, "max_retries", "x", "an integer of at least 0"),
    (SERVER, "max_retries", -1, "an integer of at least 0"),
    (SERVER, "retry_s", -0.5, "a number of at least 0"),
    (SERVER, "stop_ids", "abc", "a list of token ids"),
    (SERVER, "template_args", 5, "a table"),
    (SERVER, "weights_dir", "", "a string that is not empty or a path"),
    (CHAT, "extra_body", [1], "a table"),
    (CHAT, "max_tokens_key", 3, "a string that is not empty"),
]


@pytest.mark.parametrize(
    ("engine", "key", "value", "wanted"), BAD, ids=lambda part: None if isinstance(part, dict) else str(part)
)
def test_a_value_that_an_option_does_not_take_is_refused_when_the_config_is_read(engine, key, value, wanted):
    with pytest.raises(ConfigError) as caught:
        config({**engine, key: value}, model="openai:m" if engine is CHAT else "pocket")
    sentence = str(caught.value)
    assert sentence.startswith(f"agent.engine.{key} must be {wanted}")
    assert sentence.endswith(f", not {value!r}")


@pytest.mark.parametrize(
    "engine",
    [
        {"cache": "pages", "dtype": "bfloat16", "device": "cuda:1", "kv_gib": 1, "stop_ids": [0, 7], "template_args": {"a": 1}},
        {**VLLM, "sleep": True, "memory_fraction": 1, "block_size": 16, "eager": False, "max_gap": 1e-3},
        {**SERVER, "server": "sglang", "max_retries": 0, "retry_s": 0, "deadline_s": 5, "weights_dir": "w", "max_context": 64},
    ],
)
def test_values_that_options_take_are_read(engine):
    assert config(engine).agent.engine == engine


def test_the_version_of_the_weights_is_not_an_option():
    with pytest.raises(ConfigError, match="no option 'version'"):
        config({"version": 3})


def test_a_key_or_an_address_with_a_password_is_not_repeated():
    for engine in ({**SERVER, "api_key": 471_200}, {**SERVER, "base_url": "http://me:471200@host/v1"}):
        with pytest.raises(ConfigError, match=r"agent\.engine\.(api_key|base_url) must be") as caught:
            config(engine)
        assert "471200" not in str(caught.value)
    with pytest.raises(ConfigError, match="must be an address") as caught:
        config({}, model="openai:m@http://me:471200@host/v1")
    assert "471200" not in str(caught.value)


def test_every_option_of_the_local_engine_has_a_type_that_is_checked():
    from dataclasses import fields
    from typing import get_args

    from agentfly.engines.local.load import DTYPES
    from agentfly.engines.options import Dtype, LocalOptions, options_of

    hints = options_of(LocalOptions)
    assert list(hints) == [field.name for field in fields(LocalOptions)]
    assert all(hint is not Any for hint in hints.values())
    assert get_args(Dtype) == tuple(DTYPES)


def test_an_engine_of_others_is_checked_by_its_types_alone(monkeypatch):
    class Elsewhere:
        def __init__(self, name: str, *, offset: int = 0, odd: Unheard = None, plain=None) -> None: ...  # noqa: F821

    class Typed:
        def __init__(self, name: str, *, offset: int = 0) -> None: ...

    monkeypatch.setitem(agentfly.plugins._registered, "engines", {"elsewhere": Elsewhere, "typed": Typed})
    config({"kind": "elsewhere", "offset": -1, "odd": 5, "plain": "x"})
    config({"kind": "typed", "offset": -1})
    with pytest.raises(ConfigError, match=r"agent\.engine\.offset must be an integer, not 'x'"):
        config({"kind": "typed", "offset": "x"})


@pytest.mark.parametrize(
    ("engine", "key", "value", "sentence"),
    [
        (LOCAL, "stop_ids", [5, "x"], "agent.engine.stop_ids[1] must be a token id, not 'x'"),
        (SERVER, "stop_ids", [-1], "agent.engine.stop_ids[0] must be a token id, not -1"),
        (LOCAL, "dtype", "float8", "not 'float8'; did you mean 'float32'?"),
    ],
)
def test_the_sentence_names_the_item_of_a_list_and_the_nearest_choice(engine, key, value, sentence):
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        config({**engine, key: value})


def test_torchs_own_names_of_dtypes_and_devices_are_fine_in_python():
    import torch

    from agentfly.engines import check_engine
    from agentfly.types import Sampling

    check_engine("pocket", {"dtype": torch.float32, "device": torch.device("cpu")}, Sampling())


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
        "Config.from_dict({'agent': {'engine': {'kind': 'local', 'max_batch': 8, 'dtype': 'float32'}}}); "
        "print(sorted({'torch', 'transformers', 'vllm', 'httpx'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize(
    ("model", "name", "address", "shown"),
    [
        ("openai:mine@http://host:8/v1", "mine", "http://host:8/v1", "openai:mine"),
        ("openai:org/mine@http://host/v1", "org/mine", "http://host/v1", "openai:mine"),
        ("openai:@cf/meta/llama@https://host/v1", "@cf/meta/llama", "https://host/v1", "openai:llama"),
        ("openai:@cf/meta/llama", "@cf/meta/llama", None, "openai:llama"),
        ("openai:claude@20250219", "claude@20250219", None, "openai:claude@20250219"),
        ("openai:claude@20250219@https://host", "claude@20250219", "https://host", "openai:claude@20250219"),
    ],
)
def test_the_address_begins_at_the_last_at_sign_and_is_not_shown(
    model: str, name: str, address: str | None, shown: str
) -> None:
    engine, _ = open_engine(model, api_key="k", **({} if address else {"base_url": "http://default/v1"}))
    assert (engine.model_name, engine.base_url) == (name, address or "http://default/v1")
    assert short_name(model) == shown
    assert short_name("/a/b/") == "b"
