"""The processes that share one learner. Every rank runs the same code on its own micro batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from torch import Tensor

from ..errors import AgentFlyError

T = TypeVar("T")


class LearnerGroup:
    """This process as one of `size` ranks. The methods are those of a single process, `ranks.group.RankGroup` has the others.

    All ranks call a method at the same point.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up a tensor over all ranks, in place. Returns it."""
        return tensor

    def least(self, value: int) -> int:
        """Returns the smallest value of all ranks."""
        return value

    def from_leader(self, make: Callable[[], T], pack: Callable[[T], bytes], unpack: Callable[[bytes], T]) -> T:
        """Returns what rank 0 makes. An AgentFlyError of `make` is raised on every rank."""
        return make()

    def agree(self, error: AgentFlyError | None) -> None:
        """Raises the error of the lowest rank that has one, on every rank."""
        if error is not None:
            raise error

    def together(self) -> AbstractContextManager[None]:
        """Leave the body on all ranks, or raise on all ranks if one raises an AgentFlyError in it."""
        return nullcontext()


ALONE = LearnerGroup()
