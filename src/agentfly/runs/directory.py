"""The folder of a run.

    runs/<name>/
        config.toml      the config as used
        run.db           metrics and trajectories (RunStore)
        metrics.jsonl    the same metrics, a line per step (JsonlTracker)
        checkpoints/     step-N, each in Hugging Face format

A new run is refused in a folder that is not empty, so a run is never overwritten by mistake.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

_BAD = re.compile(r"[^A-Za-z0-9._+-]+")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths inside the folder of one run. Made by `create`, `fresh` or `existing`, which raise ConfigError."""

    path: Path

    @classmethod
    def create(cls, path: str | Path) -> RunDirectory:
        """A new run in this folder, which must be absent or empty."""
        path = Path(path)
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; a run needs a folder")
        if path.is_dir() and any(path.iterdir()):
            raise ConfigError(f"{path} is not empty: resume it with --resume {path}, or choose another run.name")
        directory = cls(path)
        try:
            directory.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the run folder {path} cannot be created: {error.strerror}") from error
        return directory

    @classmethod
    def fresh(cls, name: str, *, root: str | Path = "runs", stamp: str | None = None) -> RunDirectory:
        """A new run `<root>/<name>-<stamp>`. The default stamp is the time; a second run in the same second gets a number."""
        clean = _BAD.sub("-", name).strip("-.") or "run"
        if stamp is not None:
            return cls.create(Path(root) / f"{clean}-{stamp}")
        base = f"{clean}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(1, 1000):
            path = Path(root) / (base if number == 1 else f"{base}-{number}")
            if not path.exists():
                return cls.create(path)
        raise ConfigError(f"there are too many runs named {base} in {root}")

    @classmethod
    def existing(cls, path: str | Path) -> RunDirectory:
        """The folder of a run that exists."""
        directory = cls(Path(path))
        if not directory.path.is_dir():
            raise ConfigError(f"there is no run folder {directory.path}")
        if not directory.database.is_file() and not directory.config.is_file():
            raise ConfigError(f"{directory.path} is not the folder of a run: it has neither config.toml nor run.db")
        return directory

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def database(self) -> Path:
        return self.path / "run.db"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"
