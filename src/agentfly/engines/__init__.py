"""Where tokens come from.

In: a model's name, or an engine. Out: the engine, and the renderer that writes its prompts (None for chat engines, which
write their own).

    pocket, smollm2, a directory, a hub name      LocalEngine, in this process          smollm2: agentfly[smollm2]
    openai:MODEL@http://host:port/v1              OpenAIEngine, any compatible server   without @: OPENAI_BASE_URL
    an Engine                                     itself

Nothing heavy is imported before a name is opened. Refuses options that the engine does not have, instead of ignoring them.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..types import Engine, Renderer

__all__ = ["open_engine"]

_LOADING = ("device", "dtype")
_RENDERING = ("chat_template", "template_args")


def open_engine(model: str | Path | Engine, **options: Any) -> tuple[Engine, Renderer | None]:
    """The engine behind a name, and its renderer.

    Options of local models: device, dtype; chat_template, template_args; and what `LocalEngine` takes (max_context, max_batch,
    kv_gib, ...). Options of servers: what `OpenAIEngine` takes (api_key, timeout_s, ...).
    """
    if isinstance(model, str) and model.startswith("openai:"):
        return _open_server(model.removeprefix("openai:"), options), None
    if isinstance(model, str | Path):
        return _open_local(model, options)
    if not isinstance(model, Engine):
        raise ConfigError(f"a model is a name, a directory or an engine, not {type(model).__name__}")
    if options:
        raise ConfigError(f"{type(model).__name__} is already open: give {', '.join(map(repr, options))} where it is made")
    return model, _renderer_of(model)


def _open_server(text: str, options: Mapping[str, Any]) -> Engine:
    from .openai import OpenAIEngine

    name, _, base_url = text.partition("@")
    if not name:
        raise ConfigError("'openai:' needs a model: openai:MODEL or openai:MODEL@http://host:port/v1")
    _refuse_unknown(options, [OpenAIEngine], ())
    if base_url:
        if "base_url" in options:
            raise ConfigError(f"the address of {name!r} is given twice: behind the @ and as base_url")
        options = {**options, "base_url": base_url}
    return OpenAIEngine(name, **options)


def _open_local(name: str | Path, options: Mapping[str, Any]) -> tuple[Engine, Renderer]:
    from ..render import HFRenderer
    from .local import LocalEngine, load_model

    _refuse_unknown(options, [LocalEngine], (*_LOADING, *_RENDERING))
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


def _refuse_unknown(options: Mapping[str, Any], makers: list[Callable[..., Any]], extra: tuple[str, ...]) -> None:
    known = set(extra)
    for maker in makers:
        known |= {name for name, p in inspect.signature(maker).parameters.items() if p.kind is p.KEYWORD_ONLY}
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}."
            raise ConfigError(f"the engine has no option {key!r}; {hint}")
