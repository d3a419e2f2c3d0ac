"""What the parts of a step promise each other: sampler, engine, learner, renderer and tracker.

The values of a step that they exchange are in `types`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from .types import Completion, Extension, Message, Proof, Request, Sample, TokenFit, TokenRecord, Trajectory


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What came of one draw: the row, and reward and success of each of its chains that can be trained on."""

    row: int
    rewards: tuple[float, ...]
    successes: tuple[bool, ...]

    @property
    def teaches(self) -> bool:
        """Whether the rewards differ, so that an algorithm that compares the chains learns from them."""
        return len(set(self.rewards)) > 1


@runtime_checkable
class TaskSampler(Protocol):
    """Decides which row is drawn next. It is made as `Class(tasks, seed, **options)`; a row is an index into `tasks`.

    A draw follows from these arguments, the draws before it and what was learned, so a resumed run draws the same rows.
    """

    def draw(self) -> int: ...

    def state(self) -> Mapping[str, Any]:
        """Returns what `restore` needs to go on here, of numbers, texts, lists, tuples and dicts."""

    def restore(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class LearningSampler(TaskSampler, Protocol):
    """A sampler whose draws depend on what came of earlier ones."""

    def learn(self, result: GroupResult) -> None:
        """A group was trained. Called after its step, once for each draw, in the order of the draws of the step.

        With `rollout.max_lag` above 0, later rows have been drawn meanwhile.
        """


@runtime_checkable
class Engine(Protocol):
    """Samples tokens. `reads` says which half of a Request the engine uses; only an "ids" engine can be trained."""

    reads: Literal["ids", "messages"]
    version: int
    max_context: int

    async def generate(self, request: Request) -> Completion: ...

    def release(self, session: str) -> None:
        """The chain has ended: drop its KV cache."""

    async def close(self) -> None: ...


@runtime_checkable
class BoundedEngine(Protocol):
    """An engine that knows how many chains it serves well at once."""

    capacity: int | None


@runtime_checkable
class PreparedEngine(Protocol):
    """An engine that can do once, before a training, what would otherwise delay single steps."""

    def prepare(self, num_chains: int | None = None) -> float:
        """Prepare for so many concurrent chains. Returns the seconds that it took."""


@runtime_checkable
class RemoteEngine(Protocol):
    """An engine behind a server."""

    async def check_alive(self) -> None:
        """Raises EngineError within seconds if the server does not answer."""


@runtime_checkable
class TrainableEngine(Engine, Protocol):
    """An engine whose weights a learner can update.

    `model` is the torch module that the learner trains; reading it may load the module. If `shares_weights` is true, the
    engine samples from that module itself. Otherwise it holds a copy, which `publish` replaces and `proof` then covers.

    `at_update` says what happens to the replies in progress when new weights are published. "recompute": they go on with the
    new weights, and their keys and values are computed again. "keep": they go on with the keys and values that they have.
    "finish": they end first, and no reply starts meanwhile. Assigning a mode that the engine cannot do raises ConfigError. In
    every mode a token carries the version of the weights that sampled it, and a new request uses no cache of older weights.
    """

    shares_weights: bool
    proof: Proof | None
    tokenizer: Any
    at_update: Literal["recompute", "keep", "finish"]

    @property
    def model(self) -> Any: ...

    def hold(self, timeout_s: float = 600.0) -> AbstractContextManager[None]:
        """Inside the context no token is sampled from the module's weights, so the learner may change them.

        The thread that holds the engine may call `publish`. Engines that hold a copy do nothing. Raises DeadlineError.
        """

    def publish(self, version: int) -> None:
        """Sample from the module's current weights from now on, under this version."""

    def stats(self) -> dict[str, float]:
        """Counters since the engine was opened, the same names for every engine (see `engines.options.COUNTERS`)."""

    def rest(self) -> None:
        """Free device memory for the learner until the next `publish`. Engines that share weights do nothing."""


@runtime_checkable
class SeededEngine(TrainableEngine, Protocol):
    """An engine that draws a token where the cumulative distribution, in the order of ids, exceeds a number of its seed."""

    def uniforms(self, seed: int, count: int) -> Sequence[float]:
        """Returns the numbers, from 0 to below 1, of the first `count` tokens of a reply with this seed."""


@runtime_checkable
class ReplicatedEngine(TrainableEngine, Protocol):
    """A trainable engine whose replicas sample in other processes, together with the chains.

    `proofs` are the newest of the replicas, by number. `exact`: replicas compute with the learner's own kernels. `unproven`
    names the live replicas that have not proven the engine's version.
    """

    exact: bool
    proofs: Mapping[int, Proof]

    def open(self, plan: Any, log_dir: Any, note: Callable[[str], None]) -> Any:
        """An async context manager that starts the processes and yields the plan with them as its runner."""

    def use_learner(
        self,
        weights: Callable[[], Iterator[list[tuple[str, Any]]]],
        score: Callable[[Sequence[int], float], list[float]],
    ) -> None:
        """Take weights and scores from a learner of several ranks, which does one thing at a time."""

    def updating(self) -> AbstractContextManager[None]:
        """Around an update of the learner and the `publish` that follows."""

    def unproven(self) -> list[str]: ...

    def handover_metrics(self) -> dict[str, float]:
        """The metrics handover/* of the last publication, per replica."""


class Learner(Protocol):
    """Updates the weights of `model`. `version` counts the changes."""

    @property
    def model(self) -> Any: ...

    @property
    def version(self) -> int: ...

    @property
    def half_updated(self) -> bool:
        """Whether the last `update` raised after it had changed weights: they are then those of no step."""

    def update(
        self,
        groups: Sequence[Sequence[Trajectory]],
        check: Callable[[Mapping[str, float]], None] | None = None,
        changing: Callable[[], object] | None = None,
        window: int | None = None,
    ) -> dict[str, float]:
        """Improve the weights on one step's chains, siblings together. Returns metrics.

        `check` receives the metrics that are known before the weights change. `changing` is called once after it, right before
        the first change of weights that the engine samples from, and never if there is none. If either raises, the weights have
        not changed. Tokens drawn by versions below `version - window` are not trained; None trains tokens of every version.
        """

    def logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Returns the log-probs of a reply under the current weights, at the temperature that chains are sampled with."""

    def examine(self, samples: Sequence[Sample], drawn: int = 0, numbers: Sequence[float] = ()) -> TokenFit:
        """Returns those of the sampled tokens of several rows, and how the tokens of the last `drawn` rows fit.

        `numbers` are the uniform numbers at which the last tokens were drawn (see `SeededEngine`).
        """

    def weights(self) -> Iterator[list[tuple[str, Any]]]:
        """Yield all weights in buckets of at most 1 GiB: full tensors by their names in the state dict, adapters merged."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        """Load the weights of a checkpoint's folder and the learner's state in it."""


@runtime_checkable
class RecordingLearner(Protocol):
    """A learner that knows what its last update did with each token."""

    def token_records(self) -> list[TokenRecord]:
        """One record per chain of the last `update`. Chains that were not trainable have none."""


@runtime_checkable
class Renderer(Protocol):
    """Messages to ids. `start` is the only full render of a chain; the cost of `extend` is that of the new messages."""

    stop_ids: tuple[int, ...]

    def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[int]: ...

    def extend(
        self,
        messages: Sequence[Message],
        num_new: int,
        completion: Completion,
        tools: Sequence[Mapping[str, Any]],
    ) -> Extension:
        """`messages[-num_new:]` follow the assistant message `messages[-num_new - 1]`, which `completion` sampled."""

    def decode(self, ids: Sequence[int]) -> str: ...


@runtime_checkable
class MarkedRenderer(Protocol):
    """A renderer that knows its template."""

    @property
    def foreign_marks(self) -> tuple[str, ...]:
        """The texts with which the template begins a user's turn or the result of a call, and no part of a reply."""


class Tracker(Protocol):
    """Receives metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def close(self) -> None: ...
