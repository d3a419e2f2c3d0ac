"""Where tokens come from.

In: a model's name, or an engine. Out: the engine, and the renderer that writes its prompts (None for chat engines, which
write their own).

    pocket, smollm2, a directory, a hub name      LocalEngine, in this process          smollm2: agentfly[smollm2]
      ... with kind="vllm"                        VllmEngine, in this process           agentfly[vllm]
      ... with kind="openai"                      ServedEngine, a vLLM or SGLang server that is trained from
    openai:MODEL@http://host:port/v1              OpenAIEngine, any compatible server   without @: OPENAI_BASE_URL
    an Engine                                     itself

Nothing heavy is imported before a name is opened. Refuses options that the engine does not have, instead of ignoring them;
`check_engine` does so without opening anything, when a config is read.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .. import plugins
from ..errors import ConfigError
from ..types import Engine, Renderer, Sampling
from .prompt import cuts

__all__ = ["check_engine", "engine_options", "open_engine"]

_LOADING = ("device", "dtype")
_RENDERING = ("chat_template", "template_args")


def open_engine(model: str | Path | Engine, *, kind: str | None = None, **options: Any) -> tuple[Engine, Renderer | None]:
    """The engine behind a name, and its renderer.

    Options of local models: device, dtype; chat_template, template_args; and what `LocalEngine` takes (max_context, max_batch,
    kv_gib, ...). Options of servers: what `OpenAIEngine` takes (api_key, timeout_s, ...). Of the other kinds: what their
    classes take.
    """
    if not isinstance(model, str | Path):
        return _already_open(model, {"kind": kind, **options} if kind is not None else options)
    kind = _kind(model, kind)
    _refuse_unknown(kind, options)
    if kind == "chat":
        return _open_chat(str(model).removeprefix("openai:"), options), None
    if kind == "local":
        return _open_local(model, options)
    engine = plugins.resolve("engines", kind)(model, **options)
    return engine, engine.renderer


def engine_options(value: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """`"vllm"` stands for `{"kind": "vllm"}`."""
    return {"kind": value} if isinstance(value, str) else dict(value or {})


def check_engine(
    model: str | Path, value: str | Mapping[str, Any] | None, sampling: Sampling, *, training: bool = False
) -> None:
    """Refuse what the engine cannot do, before anything is opened. `training` asks for more than running does."""
    options = engine_options(value)
    kind = _kind(model, options.pop("kind", None))
    if options:  # the options of a local engine are those of a class that is heavy to import
        _refuse_unknown(kind, options)
    if not training:
        return
    if kind == "chat":
        raise ConfigError(
            "a chat server gives text, not token ids: it can be evaluated with, not trained from. For training, set model to "
            'the model\'s folder, agent.engine.kind = "openai" and agent.engine.base_url to a vLLM or SGLang server'
        )
    server = options.get("server", "vllm")
    if kind == "openai" and options.get("weights_dir") is None:
        raise ConfigError(
            "training from a server hands weights over in a folder that both see: set agent.engine.weights_dir, or use "
            "agent.engine.server_weights_dir too where the server sees it elsewhere"
        )
    cut = cuts(sampling)
    if cut is not None and (kind == "vllm" or (kind == "openai" and server == "vllm")):
        raise ConfigError(
            f"sampling.{cut} cuts the distribution, and vLLM's log-probs are then not those that training needs: leave it off, "
            "or use the local engine"
        )


def _kind(model: str | Path, kind: Any) -> str:
    known = ["local", *plugins.names("engines")]
    if kind is not None and kind not in known:
        near = difflib.get_close_matches(str(kind), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}."
        raise ConfigError(f"no engine is called {kind!r}; {hint}")
    if str(model).startswith("openai:"):
        if kind not in (None, "openai"):
            raise ConfigError(f"the model {str(model)!r} is behind a server, so its engine cannot be {kind!r}")
        return "chat"
    return kind or "local"


def _already_open(model: Any, options: Mapping[str, Any]) -> tuple[Engine, Renderer | None]:
    if not isinstance(model, Engine):
        raise ConfigError(f"a model is a name, a directory or an engine, not {type(model).__name__}")
    if options:
        raise ConfigError(f"{type(model).__name__} is already open: give {', '.join(map(repr, options))} where it is made")
    return model, _renderer_of(model)


def _open_chat(text: str, options: Mapping[str, Any]) -> Engine:
    from .openai import OpenAIEngine

    name, _, base_url = text.partition("@")
    if not name:
        raise ConfigError("'openai:' needs a model: openai:MODEL or openai:MODEL@http://host:port/v1")
    if base_url:
        if "base_url" in options:
            raise ConfigError(f"the address of {name!r} is given twice: behind the @ and as base_url")
        options = {**options, "base_url": base_url}
    return OpenAIEngine(name, **options)


def _open_local(name: str | Path, options: Mapping[str, Any]) -> tuple[Engine, Renderer]:
    from ..render import HFRenderer
    from .local import LocalEngine, load_model

    loading = {key: value for key, value in options.items() if key in _LOADING}
    rendering = {key: value for key, value in options.items() if key in _RENDERING}
    running = {key: value for key, value in options.items() if key not in (*_LOADING, *_RENDERING)}
    model, tokenizer = load_model(name, **loading)
    engine = LocalEngine(model, tokenizer, **running)
    renderer = HFRenderer(tokenizer, stop_ids=sorted(engine.stop_ids), **rendering)
    engine.stop_ids = engine.stop_ids.union(renderer.stop_ids)
    engine.renderer = renderer
    return engine, renderer


def _renderer_of(engine: Any) -> Renderer | None:
    """The renderer an open engine carries, or one for its tokenizer."""
    if engine.reads != "ids":
        return None
    found: Renderer | None = getattr(engine, "renderer", None)
    if found is None and getattr(engine, "tokenizer", None) is not None:
        from ..render import HFRenderer

        found = HFRenderer(engine.tokenizer, stop_ids=sorted(engine.stop_ids))
        engine.stop_ids = engine.stop_ids.union(found.stop_ids)
        engine.renderer = found
    return found


def _maker(kind: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """The class behind a kind, and the options that are read before it is made."""
    if kind == "chat":
        from .openai import OpenAIEngine

        return OpenAIEngine, ()
    if kind == "local":
        from .local import LocalEngine

        return LocalEngine, (*_LOADING, *_RENDERING)
    return plugins.resolve("engines", kind), ()


def _refuse_unknown(kind: str, options: Mapping[str, Any]) -> None:
    maker, extra = _maker(kind)
    known = set(extra) | {name for name, p in inspect.signature(maker).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}."
            raise ConfigError(f"the engine has no option {key!r}; {hint}")
