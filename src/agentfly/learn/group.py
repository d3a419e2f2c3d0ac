"""The processes that share one learner: `ALONE` is a single process, `ranks.group.RankGroup` are several.

Every rank runs the same code on its own micro batches and calls each method at the same points.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypeVar

from torch import Tensor

from ..errors import AgentFlyError

T = TypeVar("T")


class LearnerGroup(Protocol):
    """This process as one of `size` ranks."""

    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place. Returns it."""

    def least(self, value: int) -> int:
        """Returns the smallest value of all ranks."""

    def from_leader(self, make: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
        """Returns what rank 0 makes. An AgentFlyError of `make` is raised on every rank."""

    def agree(self, error: AgentFlyError | None) -> None:
        """Raises the error of the lowest rank that has one, on every rank."""

    def together(self) -> AbstractContextManager[None]:
        """Leave the body on all ranks, or raise on all ranks if one raises an AgentFlyError in it."""


class Alone:
    """One process."""

    rank, size, leads = 0, 1, True

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def least(self, value: int) -> int:
        return value

    def from_leader(self, make: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
        return make()

    def agree(self, error: AgentFlyError | None) -> None:
        if error is not None:
            raise error

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()


ALONE = Alone()
