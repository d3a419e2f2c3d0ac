"""The two miniature models that ship inside the package, their tasks, and the scripts that make them.

`model_dir()` ("pocket") and `worlds_dir()` ("pocket-worlds") are folders that `from_pretrained` loads. Nothing heavy is
imported here: torch and transformers come in only with `agentfly.pocket.build` and the modules it uses.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_dir", "worlds_dir"]


def model_dir() -> Path:
    """The folder of the bundled model, in Hugging Face format."""
    return Path(__file__).parent / "model"


def worlds_dir() -> Path:
    """The folder of the bundled model for the text worlds, in the same format."""
    return Path(__file__).parent / "worlds_model"
