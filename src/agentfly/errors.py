"""The exceptions of the framework.

    AgentFlyError
    |-- ConfigError          the user's config, data or call is wrong; stops the program, if possible before the run
    |   |-- UnknownName      no object has this name; the message suggests similar names
    |   |-- MissingExtra     an optional package is not installed; the message gives the pip command
    |   |-- DataError        a row of the data set is malformed; the message gives its index
    |   `-- TemplateError    a chat template doubles or loses marks of a reply; the message names them
    |-- InvariantError       a guarantee of the framework does not hold, for example about training data; stops the run
    |-- StorageError         a file of the run cannot be written or read, as on a full disk; stops the run, checkpoints stay
    |   `-- QueryTimeout     a query of a view was interrupted, because it took too long
    |-- RankError            a rank of the learner was lost; the supervisor restarts all ranks from the last checkpoint
    |-- RewardError          a reward function raised, or returned no valid score; stops the run
    |-- ToolError            raised by a tool as a message to the model; the chain continues
    `-- RolloutError         something outside the model failed; ends one chain, which is not trained on
        |-- EngineError      sampling failed
        |-- WorldError       an environment or the backend of a tool failed
        `-- DeadlineError    a time limit was exceeded

`blame` converts other exceptions to a RolloutError where they enter the framework.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class AgentFlyError(Exception):
    """Base class of all exceptions of the framework."""


class ConfigError(AgentFlyError):
    """The user's config, data or call is wrong."""


class UnknownName(ConfigError):
    """No object is registered under this name."""


class MissingExtra(ConfigError):
    """An optional package is not installed."""


class DataError(ConfigError):
    """A row of the data set is malformed."""


class TemplateError(ConfigError):
    """A chat template doubles or loses marks of a reply."""


class InvariantError(AgentFlyError):
    """A guarantee of the framework does not hold."""


class StorageError(AgentFlyError):
    """A file of the run cannot be written or read, for example because the disk is full."""


class QueryTimeout(StorageError):
    """A query of a stored run was interrupted, because it took too long."""


class RankError(AgentFlyError):
    """A rank of the learner was lost, or the ranks are not at the same point any more."""


class RewardError(AgentFlyError):
    """A reward function raised, or returned no valid score."""


class ToolError(AgentFlyError):
    """A message from a tool to the model."""


class RolloutError(AgentFlyError):
    """Something outside the model failed during one chain."""


class EngineError(RolloutError):
    """Sampling failed."""


class WorldError(RolloutError):
    """An environment or the backend of a tool failed."""


class DeadlineError(RolloutError):
    """A time limit was exceeded."""


class ForeignExit(RuntimeError):
    """Stands for an exception of a user's code that is no `Exception`; the text is its type and message. See `contained`."""


def mark_as_environments(error: Exception, what: str) -> None:
    """Record on an exception which call of an environment raised it, so that a reward's error can be told from the world's."""
    error.__dict__.setdefault("environment_call", what)


def environment_call(error: BaseException) -> str | None:
    """The call of an environment that raised the exception, or None."""
    call = getattr(error, "environment_call", None)
    return call if isinstance(call, str) else None


def contained(error: BaseException) -> Exception:
    """The exception to raise for one that a user's tool, reward or environment raised.

    An `Exception` is returned unchanged. KeyboardInterrupt, SystemExit, GeneratorExit and CancelledError would end the event
    loop or look like Ctrl-C, so they become a `ForeignExit`.
    """
    if isinstance(error, Exception):
        return error
    made = ForeignExit(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
    made.__cause__ = error
    return made


@contextmanager
def blame(kind: type[RolloutError], what: str) -> Iterator[None]:
    """Raises any exception of the block as `kind`, with `what` before its text. An AgentFlyError passes unchanged."""
    try:
        yield
    except AgentFlyError:
        raise
    except Exception as error:
        raise kind(f"{what}: {type(error).__name__}: {error}") from error
