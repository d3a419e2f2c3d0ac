"""Messages to tokens and back: the renderer for Hugging Face chat templates, and the parsers of tool calls (`parsers`).

Importing the package loads neither transformers nor Jinja; `HFRenderer` is imported on first use.
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
