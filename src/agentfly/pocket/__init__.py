"""The miniature model that ships inside the package, its tasks, and the script that makes it.

`model_dir()` is the folder that `from_pretrained` loads. Nothing heavy is imported here: torch and transformers come in only
with `agentfly.pocket.build` and the modules it uses.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_dir"]


def model_dir() -> Path:
    """The folder of the bundled model, in Hugging Face format."""
    return Path(__file__).parent / "model"
