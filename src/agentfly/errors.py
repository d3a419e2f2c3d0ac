"""Every error of the framework, and who is to blame.

    AgentFlyError
    |-- ConfigError          the user's config, data or call is wrong: stop, before the run where it can be known
    |   |-- UnknownName      a name that nothing is registered under (carries a "did you mean")
    |   |-- MissingExtra     an optional package is not installed (carries the pip line)
    |   `-- DataError        a row of the data set is malformed (carries its index)
    |-- InvariantError       the framework caught itself training on something wrong: stop, nothing is lost
    |-- RewardError          a reward function raised or returned something that is not a score: stop
    |-- ToolError            raised by a tool for the model to read: becomes an observation, the chain goes on
    `-- RolloutError         the world failed under one chain: recorded on it, masked out of training, siblings go on
        |-- EngineError      sampling failed
        |-- WorldError       an environment or a tool's backend failed
        `-- DeadlineError    something took longer than it may

`blame` attributes a foreign exception once, at the boundary where it crossed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class AgentFlyError(Exception):
    """Root of the tree."""


class ConfigError(AgentFlyError):
    """The user's config, data or call is wrong."""


class UnknownName(ConfigError):
    """A name that nothing is registered under."""


class MissingExtra(ConfigError):
    """An optional package is not installed."""


class DataError(ConfigError):
    """A row of the data set is malformed."""


class InvariantError(AgentFlyError):
    """A promise the framework makes about training did not hold."""


class RewardError(AgentFlyError):
    """A reward function raised or returned something that is not a score."""


class ToolError(AgentFlyError):
    """Raised by a tool for the model to read."""


class RolloutError(AgentFlyError):
    """The world failed under one chain."""


class EngineError(RolloutError):
    """Sampling failed."""


class WorldError(RolloutError):
    """An environment or a tool's backend failed."""


class DeadlineError(RolloutError):
    """Something took longer than it may."""


def mark_as_environments(error: Exception, what: str) -> None:
    """Write on an exception which call of an environment it came out of, for whoever has to say whose fault it was."""
    error.__dict__.setdefault("environment_call", what)


def environment_call(error: BaseException) -> str | None:
    """The call of an environment that an exception came out of, if it did."""
    found = getattr(error, "environment_call", None)
    return found if isinstance(found, str) else None


@contextmanager
def blame(kind: type[RolloutError], what: str) -> Iterator[None]:
    """Re-raise a foreign exception as `kind`; errors of our own pass unchanged."""
    try:
        yield
    except AgentFlyError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
