"""The folder of a run.

    runs/<name>/
        config.toml      the config as used
        run.db           metrics and trajectories (RunStore)
        metrics.jsonl    the same metrics, a line per step (JsonlTracker)
        checkpoints/     step-N, each in Hugging Face format
        run.lock         while a trainer writes to the folder (see `lock`)

A new run is refused in a folder that holds anything but the remains of a run without a finished step, so a run is never
overwritten by mistake, and one that was killed early starts again by the same command.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .lock import LOCK, hold_lock

CHECKPOINT = re.compile(r"step-(\d+)")
"""The name of a finished checkpoint."""
_BAD = re.compile(r"[^A-Za-z0-9._+-]+")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths inside the folder of one run. Made by `create`, `fresh` or `existing`, which raise ConfigError."""

    path: Path

    @classmethod
    def create(cls, path: str | Path) -> RunDirectory:
        """A new run in this folder, which must be absent, empty, or left by a run without a finished step."""
        directory = cls(Path(path))
        directory.check_new()
        try:
            directory.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"the run folder {path} cannot be created: {error.strerror}") from error
        return directory

    def check_new(self) -> None:
        """Raises ConfigError if a new run would overwrite something in the folder."""
        path = self.path
        if not path.exists():
            return
        if not path.is_dir():
            raise ConfigError(f"{path} is a file; a run needs a folder")
        try:
            names = {entry.name for entry in path.iterdir()} - {LOCK}
            remains = names == {"checkpoints"} or names & {"config.toml", "run.db"}
            steps = self.saved_steps()
        except OSError as error:
            raise ConfigError(f"the run folder {path} cannot be read: {error.strerror}") from error
        if any(steps):
            raise ConfigError(f"{path} is not empty: resume it with --resume {path}, or choose another run.name")
        if names and not remains:
            raise ConfigError(
                f"{path} is not empty: resume it with --resume {path} if it holds a run, or choose another run.name"
            )

    def saved_steps(self) -> list[int]:
        """The steps of the finished checkpoints, intact or not."""
        if not self.checkpoints.is_dir():
            return []
        return sorted(int(match[1]) for entry in self.checkpoints.iterdir() if (match := CHECKPOINT.fullmatch(entry.name)))

    def lock(self) -> AbstractContextManager[None]:
        """Held by the process that trains in this folder. Raises ConfigError if another process holds it."""
        return hold_lock(self.path)

    def write_config(self, text: str) -> None:
        """Write config.toml in one operation: a killed process leaves a whole file or none."""
        temporary = self.path / ".config.toml.writing"
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.config)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise ConfigError(f"the run folder {self.path} cannot be written: {error.strerror}") from error

    @classmethod
    def fresh(cls, name: str, *, root: str | Path = "runs", stamp: str | None = None) -> RunDirectory:
        """A new run `<root>/<name>-<stamp>`. The default stamp is the time; a second run in the same second gets a number."""
        clean = _BAD.sub("-", name).strip("-.") or "run"
        if stamp is not None:
            path = Path(root) / f"{clean}-{stamp}"
            if path.is_dir() and any(path.iterdir()):
                raise ConfigError(f"{path} is not empty: a new run needs another name")
            return cls.create(path)
        base = f"{clean}-{time.strftime('%Y%m%d-%H%M%S')}"
        for number in range(1, 1000):
            path = Path(root) / (base if number == 1 else f"{base}-{number}")
            try:
                path.mkdir(parents=True)  # of two runs that start in the same second, one gets this name
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"the run folder {path} cannot be created: {error.strerror}") from error
            return cls.create(path)
        raise ConfigError(f"there are too many runs named {base} in {root}")

    @classmethod
    def existing(cls, path: str | Path) -> RunDirectory:
        """The folder of a run that exists."""
        directory = cls(Path(path))
        if not directory.path.is_dir():
            raise ConfigError(f"there is no run folder {path}")
        of = directory.path.resolve().parent
        if of.name == "checkpoints" and cls(of.parent).config.is_file():
            raise ConfigError(f"{path} is a checkpoint of the run {directory.path.parent.parent}: name the run")
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
