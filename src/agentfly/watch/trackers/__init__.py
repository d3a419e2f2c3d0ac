"""The trackers of a run: JSON lines always; TensorBoard, Weights & Biases, MLflow, Trackio and OpenTelemetry by name.

Each receives the metrics under their own names. A tracker that cannot be opened stops the run before it begins. A tracker that
fails later is dropped with one warning, and the run continues. A tracker is a class `T(directory, config, name)` with
`log(metrics, step)`, `close()` and, optionally, `log_chains(chains, split, step)`, which is called before `log` of the same
step, `truncate_after(step)`, and `notice`, a text that the user is shown when the tracker is opened.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ... import plugins
from ...errors import AgentFlyError, ConfigError
from ...protocols import Tracker
from ...types import Trajectory


class Trackers:
    """Several trackers as one. `warn` receives the text when a tracker is dropped, and notices of trackers."""

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None] | None = None) -> None:
        self._open = dict(trackers)
        self.warn = warn or (lambda text: warnings.warn(text, RuntimeWarning, stacklevel=4))

    @classmethod
    def open(
        cls,
        names: Iterable[str],
        directory: str | Path,
        config: Mapping[str, Any],
        name: str,
        warn: Callable[[str], None] | None = None,
    ) -> Trackers:
        """Opens the trackers of these names, and "jsonl" always. Raises ConfigError if one cannot be opened."""
        opened: dict[str, Tracker] = {}
        try:
            for kind in dict.fromkeys(["jsonl", *names]):
                opened[kind] = _open_one(kind, Path(directory), config, name)
        except BaseException:
            cls(opened).close()
            raise
        trackers = cls(opened, warn)
        for tracker in opened.values():
            if notice := getattr(tracker, "notice", None):
                trackers.warn(str(notice))
        return trackers

    @property
    def names(self) -> list[str]:
        """The trackers that have not failed."""
        return list(self._open)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name in self.names:
            self._try(name, "log", metrics, step)

    def log_chains(self, chains: Sequence[Trajectory], split: str, step: int) -> None:
        """The chains of a step, for the trackers that show some of them."""
        for name, tracker in list(self._open.items()):
            if hasattr(tracker, "log_chains"):
                self._try(name, "log_chains", chains, split, step)

    def truncate_after(self, step: int) -> None:
        """For a resumed run: deletes what came after its checkpoint from the trackers that support it."""
        for name, tracker in list(self._open.items()):
            if hasattr(tracker, "truncate_after"):
                self._try(name, "truncate_after", step)

    def close(self) -> None:
        for name in self.names:
            self._try(name, "close")
        self._open.clear()

    def _try(self, name: str, method: str, *args: object) -> None:
        try:
            getattr(self._open[name], method)(*args)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a failing disk or server must not end the run
            del self._open[name]
            self.warn(f"the tracker {name!r} failed in {method} and is dropped: {type(error).__name__}: {error}")


def _open_one(kind: str, directory: Path, config: Mapping[str, Any], name: str) -> Tracker:
    make = plugins.resolve("trackers", kind)
    try:
        tracker: Tracker = make(directory, config, name)
    except AgentFlyError:
        raise
    except Exception as error:
        raise ConfigError(f"the tracker {kind!r} could not be opened: {type(error).__name__}: {error}") from error
    return tracker


open_trackers = Trackers.open
