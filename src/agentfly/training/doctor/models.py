"""What a model can do, told from its config: `agentfly doctor MODEL` tries it on a miniature with random weights.

Only the config is read or downloaded. `learn.model.examine` makes the tries.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...learn.model.examine import Finding


def is_model(name: str) -> bool:
    """Whether a name given to `agentfly doctor` is a model: a folder with a config.json, a bundled model, or a hub name."""
    from ...engines.local.load import NAMES

    path = Path(name)
    if path.exists():
        return (path / "config.json").is_file()
    return name in NAMES or (name.count("/") == 1 and not path.parent.exists())


def diagnose_model(name: str, max_context: int | None = None) -> list[Finding]:
    """What the model can do. Raises ConfigError if there is no such model, or if its family has no miniature."""
    from ...engines.local.load import read_config
    from ...learn.model.examine import examine

    return examine(read_config(name), max_context)
