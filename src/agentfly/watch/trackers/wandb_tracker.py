"""The Weights & Biases tracker: a run of the project `agentfly`, or of the project that WANDB_PROJECT names.

It never prompts: without an API key, or with WANDB_MODE=offline, the run is written to `<directory>/wandb` and can be uploaded
with `wandb sync`; `notice` says so. A resumed run keeps its id. Sample chains are tables, `chains/train` and
`chains/validation`.
"""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

import wandb

from ...types import Trajectory
from ..samples import sample_rows, wants_samples

Mode = Literal["online", "offline", "disabled", "shared"]


class WandbTracker:
    def __init__(self, directory: str | Path, config: Mapping[str, Any] | None = None, name: str = "") -> None:
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        id_file = directory / "wandb-id.txt"
        run_id = id_file.read_text(encoding="utf-8").strip() if id_file.exists() else None
        key = has_key()
        mode = choose_mode(os.environ.get("WANDB_MODE"), key)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "agentfly"),
            name=name or None,
            config=dict(config or {}),
            dir=str(directory),
            id=run_id,
            resume="allow" if run_id else None,
            mode=mode,
            # A prompt would block an unattended run forever.
            settings=wandb.Settings(silent=True, console="off", login_timeout=10, init_timeout=60),
        )
        id_file.write_text(self._run.id, encoding="utf-8")
        self.notice = explain_mode(mode, key, Path(self._run.dir).parent)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_chains(self, chains: Sequence[Trajectory], split: str, step: int) -> None:
        if not wants_samples(split, step):
            return
        rows = sample_rows(chains, step)
        table = wandb.Table(columns=list(rows[0]) if rows else [], data=[list(row.values()) for row in rows])
        # Not committed: the metrics of the same step follow.
        self._run.log({f"chains/{split}": table}, step=step, commit=False)

    def close(self) -> None:
        self._run.finish()


def choose_mode(asked: str | None, key: bool) -> Mode:
    """The mode that WANDB_MODE names; without it, online if there is a key and offline if not."""
    default: Mode = "online" if key else "offline"
    return cast(Mode, asked) if asked in get_args(Mode) else default


def explain_mode(mode: Mode, key: bool, folder: Path) -> str | None:
    """What the user should know about a mode: None if metrics go to the server."""
    if mode == "disabled":
        return "Weights & Biases is disabled (WANDB_MODE=disabled): it records nothing"
    if mode != "offline":
        return None
    why = "WANDB_MODE=offline" if key else "there is no API key: set WANDB_API_KEY, or run `wandb login`"
    return f"Weights & Biases is offline ({why}). The run can be uploaded later:\n  wandb sync {folder}"


def has_key() -> bool:
    """Whether login works without a prompt: a key in the environment, or one stored by `wandb login`."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    files = [Path(os.environ["NETRC"])] if os.environ.get("NETRC") else [Path.home() / name for name in (".netrc", "_netrc")]
    for file in files:
        try:
            if host in netrc.netrc(str(file)).hosts:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
