"""The two miniature models that ship inside the package, and the arithmetic tasks of the quick start.

`model_dir()` ("pocket") and `worlds_dir()` ("pocket-worlds") are folders that `from_pretrained` loads. `scripts/pocket` in the
repository builds them.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_dir", "worlds_dir"]


def model_dir() -> Path:
    """The folder of the model "pocket", in Hugging Face format."""
    return Path(__file__).parent / "model"


def worlds_dir() -> Path:
    """The folder of the model "pocket-worlds", in Hugging Face format."""
    return Path(__file__).parent / "worlds_model"
