"""Messages to tokens and back: the renderer over Hugging Face chat templates, and (in `parsers`) how a reply is read.

Importing this room loads neither transformers nor Jinja: `HFRenderer` is fetched when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hf import HFRenderer

__all__ = ["HFRenderer"]


def __getattr__(name: str) -> Any:
    if name == "HFRenderer":
        from .hf import HFRenderer

        return HFRenderer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
