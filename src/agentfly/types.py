"""The values that flow through one step. `protocols` says what the parts that exchange them promise.

Values are dataclasses with slots that check themselves once. This module imports nothing heavy and reads no file.

    Task -> (agent.start) -> Message* -> (render.start) -> prompt ids -> Request -> (engine.generate) -> Completion
         -> (agent.parse) -> Action -> (tools) -> ToolResult* -> Turn -> ... -> Trajectory -> (learn.samples) -> Sample*
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, overload

from . import old_names
from .display import Displayed, chains_html, data_frame, trajectory_html
from .errors import ConfigError, InvariantError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_Class = TypeVar("_Class")
Role = Literal["system", "user", "assistant", "tool"]
ROLES = ("system", "user", "assistant", "tool")
RowReason = Literal[
    "", "first", "tools changed", "system changed", "history cut", "reply edited", "thinking dropped", "template restarts",
    "rewritten",
]  # fmt: skip
"""Why a training row begins with a turn: "first" where nothing of it was read before, "rewritten" by the agent's `rewrite`."""
Reaction = Literal["continue", "end", "raise"]
"""How a chain reacts to a mistake: tell the model and continue, end the chain, or raise ConfigError and stop the run."""
SandboxLimit = Literal["time", "memory", "cpu", "processes", "disk", "files", "output"]
"""What a sandbox limits: seconds of a cell, memory, CPU time, processes, what is written, open files, characters of output."""
SANDBOX_LIMITS = get_args(SandboxLimit)


def _begin(text: Any, length: int = 60) -> str:
    """The beginning of a text in quotes, for a representation."""
    shown = str(text)
    return repr(shown if len(shown) <= length else shown[: length - 3] + "...")


def quick_init(cls: type[_Class]) -> type[_Class]:
    """Gives a frozen dataclass with slots an `__init__` that takes half the time: a turn makes ten such values.

    The `__init__` of `dataclass` looks up `object.__setattr__` for every field, and that looks up the slot. This one calls the
    setters of the slots. Parameters, defaults and `__post_init__` are the same.
    """
    given: Any = cls
    names: dict[str, Any] = {"unset": _Factory()}
    parameters, lines = ["self"], []
    for each in sorted(fields(given), key=lambda each: bool(each.kw_only)):
        if each.kw_only and "*" not in parameters:
            parameters.append("*")
        names[f"set_{each.name}"] = getattr(cls, each.name).__set__
        value = each.name
        if each.default_factory is not MISSING:
            names[f"new_{each.name}"] = each.default_factory
            parameters.append(f"{each.name}=unset")
            value = f"new_{each.name}() if {each.name} is unset else {each.name}"
        elif each.default is not MISSING:
            names[f"default_{each.name}"] = each.default
            parameters.append(f"{each.name}=default_{each.name}")
        else:
            parameters.append(each.name)
        lines.append(f"set_{each.name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n " + "\n ".join(lines), names)
    made, before = names["__init__"], given.__init__
    made.__annotations__, made.__qualname__, made.__module__ = before.__annotations__, before.__qualname__, cls.__module__
    given.__init__ = made
    return cls


class _Factory:
    """Stands for a default that is made anew for each value."""

    def __repr__(self) -> str:
        return "<factory>"


@quick_init
@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call of the model. `error` is set if the call could not be parsed: the model reads it, and no tool runs."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = ""
    error: str | None = None


@quick_init
@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. The `content` of an assistant message is the reply as sampled, thinking included."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    tool_call_id: str | None = None
    images: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """One row of the data set: the opening messages, and all other fields, which rewards and tools request by name.

    `row` is the number of the row in its file or list, counted from 0. `source` names the one of `data.sources` that has it.
    """

    id: str
    messages: tuple[Message, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    row: int | None = field(default=None, compare=False)
    source: str | None = field(default=None, compare=False)


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. `max_tokens` limits one reply. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        numbers = 0.0 <= self.temperature < math.inf and 0.0 < self.top_p <= 1.0 and 0.0 <= self.min_p < 1.0
        if numbers and self.top_k >= 0 and self.max_tokens >= 1 and type(self.stop) is tuple and all(self.stop):
            return  # one is made for every reply
        checks = [
            (0.0 <= self.temperature < math.inf, f"temperature must be 0 or more, not {self.temperature}"),
            (0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], not {self.top_p}"),
            (self.top_k >= 0, f"top_k must be 0 (off) or more, not {self.top_k}"),
            (0.0 <= self.min_p < 1.0, f"min_p must be in [0, 1), not {self.min_p}"),
            (self.max_tokens >= 1, f"max_tokens must be at least 1, not {self.max_tokens}"),
            (isinstance(self.stop, tuple), f"stop is a list of strings, not {self.stop!r}"),
            (all(self.stop), "a stop string must not be empty"),
        ]
        for ok, sentence in checks:
            if not ok:
                raise ConfigError(f"sampling: {sentence}")

    def seeded(self, seed: int | None, max_tokens: int) -> Sampling:
        """The same parameters with another seed and limit: what `dataclasses.replace` returns, in a third of its time."""
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p, max_tokens=max_tokens,
            stop=self.stop, stop_ids=self.stop_ids, seed=seed,
        )  # fmt: skip


@dataclass(slots=True)
class Request:
    """One call of an engine. Token engines read `prompt_ids`; chat engines read `messages` and `tools`.

    The caller extends `prompt_ids` in place after the call, so an engine that keeps the list must copy it. `session` names
    a row of a chain: an engine may keep its KV cache between turns, until `release(session)`. If the call is cancelled,
    engines that hold the tokens sampled so far pass them to `on_cut`.
    """

    prompt_ids: list[int]
    sampling: Sampling
    session: str = ""
    messages: Sequence[Message] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    on_text: Callable[[str], None] | None = None
    on_cut: Callable[[Completion], None] | None = None


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Completion:
    """A sampled reply.

    `token_ids` includes the end-of-turn token if one was sampled (`stop` is then "stop"). `logprobs` are natural logs
    under softmax(logits / temperature), before top-k, top-p and min-p truncate it (temperature 0: under softmax(logits)).
    `versions` holds, per token, the version of the weights that drew it. Chat engines leave the token lists empty;
    `prompt_tokens` and `reply_tokens` are then the numbers that the server reports, 0 if it reports none.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    stop: Literal["stop", "length"] = "stop"
    tool_calls: tuple[ToolCall, ...] = ()
    prompt_tokens: int = 0
    reply_tokens: int = 0

    def __repr__(self) -> str:
        return f"<Completion {_begin(self.text)}, {self.num_sampled} tokens, {self.stop}>"

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise InvariantError(
                f"a completion has {len(self.token_ids)} tokens, {len(self.logprobs)} log-probs and "
                f"{len(self.versions)} versions"
            )

    @property
    def num_sampled(self) -> int:
        """Tokens of the reply."""
        return len(self.token_ids) or self.reply_tokens


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of a tool call. A tool may return one to add an image, a step reward or `done`.

    The model reads `observation`. `error` is the kind of failure, for counting. `limit` is the limit of a sandbox that the call
    reached, for counting too: it does not make the call a failure.
    """

    observation: str
    image: Any = None
    reward: float | None = None
    done: bool = False
    error: Literal["unknown_tool", "bad_arguments", "raised", "timeout"] | None = None
    limit: SandboxLimit | None = None

    @property
    def invalid(self) -> bool:
        """Whether the model made the mistake, and not the tool."""
        return self.error in ("unknown_tool", "bad_arguments")


@quick_init
@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A parsed reply: tool calls, or a final answer, or neither (then the agent's `on_no_tool_call` decides)."""

    calls: tuple[ToolCall, ...] = ()
    answer: str | None = None
    nudge: str | None = None


class Outcome(StrEnum):
    """How a chain ended. The last three are failures of the world: such a chain has no reward and is not trained on.

    MAX_TIME: its replies and tools used up a time limit. A chain that waited for the world until then is a WORLD_FAILURE.
    """

    FINISHED = "finished"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    MAX_TIME = "max_time"
    NO_TOOL_CALL = "no_tool_call"
    TOOL_ERROR = "tool_error"
    WORLD_FAILURE = "world_failure"
    CANCELLED = "cancelled"

    @property
    def trainable(self) -> bool:
        """Whether the chain ended by itself or by a limit, not by a failure of the world."""
        return self not in (Outcome.TOOL_ERROR, Outcome.WORLD_FAILURE, Outcome.CANCELLED)

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens, turns or time ended the chain."""
        return self in (Outcome.MAX_TOKENS, Outcome.MAX_TURNS, Outcome.MAX_TIME)


@dataclass(slots=True, repr=False)
class Turn:
    """One reply and the tool results that followed it.

    `context_ids` are the ids between the last sampled token of its row and this reply. If `restarts` is true (the first turn,
    or history was rewritten) they are the whole prompt, and a new training row begins: `why` says for which reason. `row` is
    its number (None: recorded before rows had numbers, see `rows`). `prompt_digest` is the checksum of the ids that the engine
    was given. `sampled_s` are the seconds from the request to the reply, `tools_s` those that its calls took, `calls_s` those
    of each call. `began_s` are the seconds from the start of the chain to the request. Times are 0 or absent in turns that were
    recorded before they existed. `state` is what the chain's environments call the state in which the turn began; it is empty
    if they name none.
    """

    context_ids: list[int]
    restarts: bool
    completion: Completion
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    reward: float = 0.0
    sampled_s: float = 0.0
    tools_s: float = 0.0
    began_s: float = 0.0
    calls_s: list[float] = field(default_factory=list)
    state: str = ""
    row: int | None = None
    why: RowReason = ""
    prompt_digest: int | None = None

    @property
    def text(self) -> str:
        """The reply."""
        return self.completion.text

    @property
    def reached(self) -> list[str]:
        """The tool of each call that reached one. Without results, a limit or a failure ended the calls that had begun."""
        if self.results:
            return [call.name for call, result in zip(self.calls, self.results, strict=False) if not result.invalid]
        return [call.name for call, seconds in zip(self.calls, self.calls_s, strict=False) if seconds]

    def __repr__(self) -> str:
        # A chain may have ended during its calls.
        pairs = zip(self.calls, [*self.results, *(None for _ in self.calls)], strict=False)
        calls = "".join(f", {call.name} -> {_begin(result.observation) if result else None}" for call, result in pairs)
        return f"<Turn {_begin(self.text)}{calls}>"


@dataclass(slots=True, repr=False)
class Trajectory(Displayed):
    """The record of one chain; iterating gives its turns. It is created before the chain starts, so a failure does not lose the
    turns before it.

    `reward` is the final score (None if the world failed or the agent has no reward). `turns[i].reward` holds the step
    rewards of tools and of per-turn rewards. `total_reward` is the sum of all, which group algorithms compare.

    A rollout may hold a task more than once: at the end of an epoch, or if a step has more tasks than there are rows. `draw`
    counts these, from 0. Each draw is a separate group of chains with separate seeds.

    `started` is the time of day at which the chain began (0: not recorded), `seconds` its duration. Of these, `waited_s` passed
    while it waited for environments, and `scored_s` while its reward was computed.

    `foreign_marks` are the texts with which an observation or a user's turn begins in the agent's format and in the chat
    template (None: not recorded, or there are none). `final_row` is the training row that ended the chain, which has the final
    reward (None: that of the last turn).
    """

    id: str
    task: Task
    chain: int = 0
    messages: list[Message] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    outcome: Outcome = Outcome.CANCELLED
    error: str | None = None
    prediction: str = ""
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    draw: int = 0
    started: float = 0.0
    waited_s: float = 0.0
    scored_s: float = 0.0
    foreign_marks: list[str] | None = None
    final_row: int | None = None

    def __iter__(self) -> Iterator[Turn]:
        return iter(self.turns)

    def __len__(self) -> int:
        return len(self.turns)

    def __bool__(self) -> bool:
        return True  # also before its first turn

    @overload
    def __getitem__(self, index: int) -> Turn: ...
    @overload
    def __getitem__(self, index: slice) -> list[Turn]: ...
    def __getitem__(self, index: int | slice) -> Turn | list[Turn]:
        return self.turns[index]

    def __repr__(self) -> str:
        reward = "no reward" if self.reward is None else f"reward {self.total_reward:.4g}"
        return (
            f"<Trajectory {self.id}: task {self.task.id!r}, {self.outcome.value}, {reward}, {len(self.turns)} turns, "
            f"{self.num_sampled} tokens, answer {_begin(self.prediction)}>"
        )

    def _repr_html_(self) -> str:
        return trajectory_html(self)

    def to_pandas(self) -> Any:
        """A pandas.DataFrame with a row per turn: reply, calls, results, tokens, reward and times. Raises MissingExtra."""
        columns = ["turn", "reply", "calls", "results", "tokens", "reward", "sampled_s", "tools_s"]
        rows = [
            (number, turn.text, [call.name for call in turn.calls], [result.observation for result in turn.results],
             len(turn.completion.token_ids), turn.reward, turn.sampled_s, turn.tools_s)
            for number, turn in enumerate(self.turns)
        ]  # fmt: skip
        return data_frame((dict(zip(columns, row, strict=True)) for row in rows), columns)

    @property
    def total_reward(self) -> float:
        """The final score and the rewards of all turns."""
        return (self.reward or 0.0) + sum(turn.reward for turn in self.turns)

    @property
    def scored(self) -> bool:
        """Whether the chain has a reward and did not fail."""
        return self.outcome.trainable and self.reward is not None

    @property
    def trainable(self) -> bool:
        """Whether the chain is scored and has token ids (a chat server returns none)."""
        return self.scored and any(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def tool_counts(self) -> Counter[str]:
        """Number of calls that reached a tool, by the tool's name."""
        return Counter(name for turn in self.turns for name in turn.reached)

    @property
    def num_invalid_calls(self) -> int:
        """Calls that reached no tool: an unknown name or bad arguments."""
        return sum(result.invalid for turn in self.turns for result in turn.results)

    @property
    def num_sampled(self) -> int:
        """Tokens that the model sampled in all turns."""
        return sum(turn.completion.num_sampled for turn in self.turns)


@dataclass(slots=True, eq=False)
class Sample:
    """One training row: token ids, and NumPy arrays of the same length with the values per token.

    `mask[i]` is true exactly if the policy sampled `token_ids[i]`. `logprobs`, `versions`, `rewards` and `advantages` are
    meaningful only there (0 elsewhere; versions -1). `group` names the task (and its draw) whose siblings are compared,
    `trajectory` names the chain: a chain whose history was rewritten has several rows, in order. Lists become arrays.
    """

    token_ids: NDArray[Any]
    mask: NDArray[Any]
    logprobs: NDArray[Any]
    versions: NDArray[Any]
    rewards: NDArray[Any]
    advantages: NDArray[Any]
    group: str = ""
    trajectory: str = ""

    def __post_init__(self) -> None:
        import numpy as np  # late: reading a config or playing a chain needs no arrays

        shapes = set()
        for name, kind in _SAMPLE_ARRAYS.items():
            array = np.asarray(getattr(self, name), dtype=kind)
            setattr(self, name, array)
            shapes.add(array.shape)
        if len(shapes) != 1 or array.ndim != 1:
            raise InvariantError(f"the arrays of a training row differ in length: {sorted(shapes)}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sample):
            return NotImplemented
        same = (self.group, self.trajectory) == (other.group, other.trajectory)
        return same and all(getattr(self, name).tolist() == getattr(other, name).tolist() for name in _SAMPLE_ARRAYS)


_SAMPLE_ARRAYS = {
    "token_ids": "int64", "mask": "bool", "logprobs": "float64", "versions": "int64", "rewards": "float64",
    "advantages": "float64",
}  # fmt: skip
"""The arrays of a Sample and the types of their elements."""


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """What an update did with the sampled tokens of one chain, named by its id.

    `advantage` is the mean over the tokens, `num_trained` the number that was in the loss of an optimizer step. `series` holds
    values per sampled token, row by row (`rows`), as a type ("f" float32, "e" float16, "B" bytes) and little-endian
    bytes: advantage and trained unless all tokens have the same, trainer_logprob and entropy where the learner computed them.
    """

    trajectory: str
    advantage: float | None
    num_trained: int
    series: Mapping[str, tuple[str, bytes]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a running chain.

    kind and data: chain_started {}; text {text}; tool_call {call}; observation {call, result}; finished {trajectory}.
    """

    kind: Literal["chain_started", "text", "tool_call", "observation", "finished"]
    task: str
    chain: int
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, repr=False)
class RunResult(Displayed):
    """The result of `agent.run`: the trajectories in the order of the tasks, siblings together.

    Iterating and indexing give trajectories. `to_pandas()` is a table of them.
    """

    trajectories: list[Trajectory]
    num_chains: int
    seconds: float

    @property
    def rewards(self) -> list[float | None]:
        """The final score of each trajectory; None if it has none."""
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def groups(self) -> list[list[Trajectory]]:
        """The sibling chains of each task."""
        n = self.num_chains
        return [self.trajectories[i : i + n] for i in range(0, len(self.trajectories), n)]

    @property
    def outcomes(self) -> Counter[str]:
        """How many chains ended in which way."""
        return Counter(trajectory.outcome.value for trajectory in self.trajectories)

    @property
    def best(self) -> Trajectory:
        """The trajectory with the highest total reward; those without a reward come last."""
        return max(self.trajectories, key=lambda trajectory: (trajectory.scored, trajectory.total_reward))

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat dict per trajectory: id, task, chain, outcome, reward, answer, numbers of turns, calls and tokens, time."""
        return [
            {
                "id": each.id, "task": each.task.id, "chain": each.chain, "outcome": each.outcome.value, "reward": each.reward,
                "total_reward": each.total_reward if each.scored else None, "prediction": each.prediction,
                "turns": len(each.turns), "tool_calls": each.tool_counts.total(), "tokens": each.num_sampled,
                "seconds": each.seconds, "error": each.error, **each.components,
            }
            for each in self.trajectories
        ]  # fmt: skip

    def to_pandas(self) -> Any:
        """`to_rows` as a pandas.DataFrame. Raises MissingExtra."""
        return data_frame(self.to_rows())

    def _repr_html_(self) -> str:
        return chains_html(repr(self).strip("<>"), self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    def __len__(self) -> int:
        return len(self.trajectories)

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> list[Trajectory]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | list[Trajectory]:
        return self.trajectories[index]

    def __repr__(self) -> str:
        scores = [trajectory.total_reward for trajectory in self.trajectories if trajectory.scored]
        mean = f"mean reward {sum(scores) / len(scores):.4g}" if scores else "no reward"
        ends = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes.most_common())
        return f"<RunResult {len(self.trajectories)} chains, {self.num_chains} per task: {mean}; {ends}; {self.seconds:.1f} s>"


@dataclass(frozen=True, slots=True)
class Proof:
    """Evidence that an engine samples from `version`, by log-probs on a fixed prompt.

    They differ from the learner's by `gap` nats on average; the update moved them by `moved`.
    """

    version: int
    gap: float
    moved: float


@dataclass(frozen=True, slots=True)
class TokenFit:
    """Log-probs of each row's sampled tokens and, over those that test the sampler, sums of log-likelihood ratios.

    `ratios`: of other samplers, by name; `ids`: of those that draw an id so often; `astray`: tokens not at their numbers.
    """

    logprobs: list[list[float]]
    ratios: dict[str, float]
    ids: dict[float, NDArray[Any]]
    astray: int = 0


@quick_init
@dataclass(frozen=True, slots=True)
class Extension:
    """The ids that follow a reply: the new ids alone or, if the template rewrites history, the whole prompt (`restarts`)."""

    ids: list[int]
    restarts: bool = False


if not TYPE_CHECKING:
    __getattr__ = old_names.of(__name__)
