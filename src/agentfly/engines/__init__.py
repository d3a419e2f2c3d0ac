"""Engines: where tokens come from. `open_engine` turns a model's name into an engine and the renderer that writes its prompts.

    pocket, smollm2, a directory, a hub name      LocalEngine, in this process          smollm2: agentfly[smollm2]
      ... with kind="vllm"                        VllmEngine, in this process           agentfly[vllm]
      ... with kind="openai"                      ServedEngine, a vLLM or SGLang server that is trained from
    openai:MODEL@http://host:port/v1              OpenAIEngine, any compatible server   without @: OPENAI_BASE_URL
    an Engine                                     itself

Chat engines render their own prompts, so their renderer is None. Nothing heavy is imported before a model is opened. An option
that the engine does not have, or a value out of bounds, raises a ConfigError; `check_engine` does so without opening anything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import plugins
from ..errors import ConfigError
from ..net.address import is_url
from ..protocols import Engine, Renderer
from ..types import Sampling
from .options import LocalOptions, check_cache_size, check_trained_sampling, check_value, options_of

__all__ = ["beside_learner", "check_engine", "check_trained_sampling", "engine_options", "open_engine", "short_name"]

_LOADING = ("device", "dtype")
_RENDERING = ("chat_template", "template_args")


def open_engine(model: str | Path | Engine, *, kind: str | None = None, **options: Any) -> tuple[Engine, Renderer | None]:
    """Return the engine for a model and its renderer (None for a chat engine).

    Options of local models: device, dtype, chat_template, template_args and the fields of `LocalOptions` (max_context,
    max_batch, kv_gib, ...). Options of other kinds: the keyword arguments of their classes, such as `OpenAIEngine`.
    """
    if not isinstance(model, str | Path):
        return _already_open(model, {"kind": kind, **options} if kind is not None else options)
    kind = _kind(model, kind)
    _check_options(kind, options)
    if kind == "chat":
        from .openai import OpenAIEngine

        name, options = _chat_options(str(model), options)
        return OpenAIEngine(name, **options), None
    if kind == "local":
        return _open_local(model, options)
    engine = plugins.resolve("engines", kind)(model, **options)
    return engine, _renderer_of(engine)


def engine_options(value: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Engine options as a dict; the string `"vllm"` is short for `{"kind": "vllm"}`."""
    return {"kind": value} if isinstance(value, str) else dict(value or {})


def beside_learner(model: str | Path | Engine, options: Mapping[str, Any], learner_bytes: float) -> dict[str, Any]:
    """Returns the options for an engine beside a learner in the same process that keeps so much memory per weight.

    Only the local engine leaves it free, unless the size of its cache is given.
    """
    if not isinstance(model, str | Path) or _kind(model, options.get("kind")) != "local":
        return dict(options)
    return {"learner_bytes": learner_bytes, **options}


def check_engine(
    model: str | Path, value: str | Mapping[str, Any] | None, sampling: Sampling, *, training: bool = False
) -> None:
    """Raise a ConfigError for options that the engine does not support, without opening it. `training` checks more."""
    options = engine_options(value)
    kind = _kind(model, options.pop("kind", None))
    _check_options(kind, options)
    if kind == "chat":
        _chat_options(str(model), options)
    if not training:
        return
    if kind == "chat":
        raise ConfigError(
            "a chat server gives text, not token ids: it can be evaluated with, not trained from. For training, set model to "
            'the model\'s folder, agent.engine.kind = "openai" and agent.engine.base_url to a vLLM or SGLang server'
        )
    if kind == "openai" and options.get("weights_dir") is None:
        raise ConfigError(
            "training from a server hands weights over in a shared folder: set agent.engine.weights_dir, and "
            "agent.engine.server_weights_dir if the server sees it under another path"
        )
    check_trained_sampling(sampling)


def _kind(model: str | Path, kind: object) -> str:
    kinds = ["local", *plugins.names("engines")]
    if kind is not None and kind not in kinds:
        raise ConfigError(f"no engine is called {kind!r}; {_hint(str(kind), kinds)}")
    if str(model).startswith("openai:"):
        if kind not in (None, "openai"):
            raise ConfigError(f"the model {str(model)!r} is behind a server, so its engine cannot be {kind!r}")
        return "chat"
    return kind or "local"


def _hint(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}."


def _already_open(model: object, options: Mapping[str, Any]) -> tuple[Engine, Renderer | None]:
    if not isinstance(model, Engine):
        raise ConfigError(f"a model is a name, a directory or an engine, not {type(model).__name__}")
    if options:
        raise ConfigError(f"{type(model).__name__} is already open: give {', '.join(map(repr, options))} where it is made")
    return model, _renderer_of(model)


def _chat_options(model: str, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Split openai:NAME@URL: the name, and the options with the URL as base_url."""
    name, base_url = _split(model)
    if not name:
        raise ConfigError("'openai:' needs a model: openai:MODEL or openai:MODEL@http://host:port/v1")
    if not base_url:
        return name, options
    if "base_url" in options:
        raise ConfigError(f"the address of {name!r} is given twice: behind the @ and as base_url")
    if not is_url(base_url):
        raise ConfigError(
            f"the text after the @ of the model {name!r} must be an address like http://host:port/v1, without a user name "
            "or password in it"
        )
    return name, {**options, "base_url": base_url}


def _split(model: str) -> tuple[str, str]:
    """The name and the address of openai:NAME@URL. A name may have an @, as in `@cf/meta/llama` and `claude@20250219`."""
    whole = model.removeprefix("openai:")
    if match := re.search(r"@(?=\w+:/)", whole):
        return whole[: match.start()], whole[match.end() :]
    name, _, tail = whole.rpartition("@")
    return (name, tail) if name and not tail.isdigit() else (whole, "")


def short_name(model: str | Path) -> str:
    """The name of a model to show: the last part of a path or hub name, and no address."""
    remote = str(model).startswith("openai:")
    text = _split(str(model))[0] if remote else str(model)
    return ("openai:" if remote else "") + (Path(text).name or "model")


def _open_local(name: str | Path, options: Mapping[str, Any]) -> tuple[Engine, Renderer]:
    from ..kernels.memory import naming_memory
    from ..render import HFRenderer
    from ..render.template import sources
    from .local import LocalEngine, load_model

    loading = {key: value for key, value in options.items() if key in _LOADING}
    rendering = {key: value for key, value in options.items() if key in _RENDERING}
    running = {key: value for key, value in options.items() if key not in (*_LOADING, *_RENDERING)}
    with naming_memory("opening the model"):
        model, tokenizer = load_model(
            name,
            **loading,
            max_context=options.get("max_context"),
            sampled=True,
            check=lambda tokenizer: sources(tokenizer, options.get("chat_template")),
        )
        engine = LocalEngine(model, tokenizer, LocalOptions(**running))
    renderer = HFRenderer(tokenizer, stop_ids=sorted(engine.stop_ids), **rendering)
    engine.stop_ids = engine.stop_ids.union(renderer.stop_ids)
    engine.renderer = renderer
    return engine, renderer


def _renderer_of(engine: Any) -> Renderer | None:
    """The renderer of an open engine, or a new one for its tokenizer. None for a chat engine."""
    if engine.reads != "ids":
        return None
    renderer: Renderer | None = getattr(engine, "renderer", None)
    if renderer is None and getattr(engine, "tokenizer", None) is not None:
        from ..render import HFRenderer

        renderer = HFRenderer(engine.tokenizer, stop_ids=sorted(engine.stop_ids))
        engine.stop_ids = engine.stop_ids.union(renderer.stop_ids)
        engine.renderer = renderer
    return renderer


def _options_of(kind: str) -> dict[str, Any]:
    """The options of a kind with their types."""
    if kind == "local":  # loading and rendering take the same options as the learner's copy of a served model
        shared = options_of(plugins.resolve("engines", "openai"))
        return {**options_of(LocalOptions), **{name: shared[name] for name in (*_LOADING, *_RENDERING)}}
    if kind == "chat":
        from .openai import OpenAIEngine

        return options_of(OpenAIEngine)
    return options_of(plugins.resolve("engines", kind))


def _check_options(kind: str, options: Mapping[str, Any]) -> None:
    if not options:
        return
    kinds_of_option = _options_of(kind)
    for key, value in options.items():
        if key not in kinds_of_option:
            raise ConfigError(f"the engine has no option {key!r}; {_hint(key, sorted(kinds_of_option))}")
        if not (
            kind == "local" and key in _LOADING and type(value).__module__ == "torch"
        ):  # torch.dtype and torch.device are fine in Python
            check_value(key, value, kinds_of_option[key])
    if kind == "local":
        check_cache_size(options)
