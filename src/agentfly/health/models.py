"""What a model can do, told from its config: `agentfly doctor MODEL` tries it on a miniature with random weights.

Only the config is read or downloaded; of a folder, also the tokenizer and the headers of its weights. `learn.model.examine`
makes the tries.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..learn.model.examine import Finding


def is_model(name: str) -> bool:
    """Whether a name given to `agentfly doctor` is a model: a folder with a config.json, a bundled, hub or server model."""
    from ..engines.local.families.files import has_weights
    from ..engines.local.load import NAMES

    path = Path(name)
    if path.exists():
        return (path / "config.json").is_file() or (path.is_dir() and has_weights(path))
    return name in NAMES or name.startswith("openai:") or (name.count("/") == 1 and not path.parent.exists())


def diagnose_model(name: str, max_context: int | None = None) -> list[Finding]:
    """What the model can do. Raises ConfigError if there is no such model, or if its family has no miniature."""
    from ..engines.local.families.files import check_weights, has_weights
    from ..engines.local.families.support import check_tokenizer
    from ..engines.local.load import find_source, read_config, read_settings
    from ..learn.model.examine import Finding, examine

    if name.startswith("openai:"):
        why = "a chat server gives text, not token ids: give the model's folder or name instead"
        return [
            Finding("sampled", True, "by the chat server, in `agentfly eval` and `agentfly chat`"),
            Finding("trained", False, why),
        ]
    config = read_config(name)
    folder = Path("" if name == "smollm2" else find_source(name))
    if folder.name and folder.is_dir() and has_weights(folder):
        try:
            check_weights(name, folder)
            check_tokenizer(name, read_settings(name)[0], config)
        except ConfigError as error:
            return [Finding("loaded", False, str(error))]
    return examine(config, max_context)
