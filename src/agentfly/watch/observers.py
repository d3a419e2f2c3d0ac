"""Who looks at a run: progress, recorder and trackers are told the same events through one `Observers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from .warnings import OFTEN, WATCHED, Warned, warnings_of

if TYPE_CHECKING:
    from pathlib import Path

    from ..rollout.activity import Activities
    from ..types import Trajectory


class Observer:
    """The events of a run. An observer has those methods that it needs, and is called for these only; it need not inherit.

    An observer is told and never asked. `span`, `chain` and `note` may be called in any thread.
    """

    def note(self, text: str) -> None:
        """A sentence for the user."""

    def opened(self, directory: Path) -> None:
        """The run has a folder."""

    def phase(self, text: str, total: int = 0, unit: str = "chains") -> None:
        """The run begins something that takes a while, of `total` units if this is known."""

    def advance(self, done: int) -> None:
        """So many units of the phase are done."""

    def begin(self, step: int) -> None:
        """A step begins."""

    def span(self, name: str) -> None:
        """A part of the step begins (see `training.breakdown`)."""

    def chain(self, trajectory: Trajectory, *, ended: bool) -> None:
        """A chain starts or has ended."""

    def chains(self, done: int, total: int) -> None:
        """So many chains of the step have ended."""

    def log_chains(self, chains: Sequence[Trajectory], split: str, step: int) -> None:
        """All chains of a step or of a validation, before its `log`."""

    def look(self, figures: Mapping[str, float], activities: Activities, holders: Mapping[str, Sequence[str]] | None) -> None:
        """Twice a second: metrics of the environments, the running chains, and the environments that each chain holds."""

    def checks(self, step: int, checked: Mapping[str, tuple[bool, float | None, float | None]]) -> None:
        """The invariants of a step that were checked: whether each holds, its value and its bound."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The metrics of a step, also if its validation fails. Step 0 is before the first one."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step has ended well."""

    def validated(self, metrics: Mapping[str, float]) -> None:
        """The validation before the first step has ended."""

    def warned(self, warnings: Sequence[Warned]) -> None:
        """The warnings that hold after a step."""

    def truncate_after(self, step: int) -> None:
        """The run goes on after this step: what was told of later ones is void."""

    def close(self) -> None:
        """The run has ended."""


class Observers(Observer):
    """Forwards each event to those of its members that have the method, in their order."""

    def __init__(self, *members: object) -> None:
        self._members = list(members)

    def add(self, member: object) -> None:
        """Tell this observer, too, from now on."""
        self._members.append(member)

    @contextmanager
    def running(self, **description: object) -> Iterator[None]:
        """The body is the run. Enters `running` of every member that has it."""
        with ExitStack() as entered:
            for enter in self._methods("running"):
                entered.enter_context(enter(**description))
            yield

    def _methods(self, name: str) -> list[Callable[..., Any]]:
        methods = (getattr(member, name, None) for member in self._members)
        return [method for method in methods if callable(method)]


def _forward(name: str) -> Callable[..., None]:
    def forward(self: Observers, *args: object, **options: object) -> None:
        for method in self._methods(name):
            method(*args, **options)

    return forward


for _name in [name for name in vars(Observer) if not name.startswith("_")]:
    setattr(Observers, _name, _forward(_name))


class RunWarnings:
    """Observes the metrics of a run. A warning that begins to hold becomes a note; `observe` is told of all that hold.

    `max_logprob_gap` is the limit of the run.
    """

    def __init__(self, observe: Observer, max_logprob_gap: float | None = None) -> None:
        self._observe, self._max_logprob_gap = observe, max_logprob_gap
        self._series: dict[str, list[tuple[int, float]]] = {}
        self._names: set[str] = set()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in WATCHED:
            if name in metrics:
                self._series.setdefault(name, []).append((step, metrics[name]))
        if step > OFTEN and step % 10:
            return
        # The loop itself tells of steps in which nothing was learned.
        warnings = [
            warned
            for warned in warnings_of(self._series, max_logprob_gap=self._max_logprob_gap)
            if "train/idle_steps" not in dict(warned.evidence)
        ]
        self._observe.warned(warnings)
        for warned in warnings:
            if warned.name not in self._names:
                self._observe.note(f"warning: {warned.text}. Try: {warned.tips[0]}")
        self._names = {warned.name for warned in warnings}
