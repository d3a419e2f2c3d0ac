"""Chains on verl's servers: `ServerEngine` samples from them, `SessionRunner` plays a session and returns its rows.

A session of verl is one chain. All sessions of a prompt run in one worker process, so a session waits here for its siblings:
a group of which one chain or none is left cannot be compared, and verl would train the raw reward of the one. This module
imports nothing of verl; `verl_loop` is the class that verl calls.

    session 0..n-1 -> chain -> trajectory -> siblings have ended -> rows, [] for a lost chain, or an error for a lost group
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..codec import decode
from ..engines.prompt import complete, room_for
from ..errors import AgentFlyError, ConfigError, EngineError, InvariantError, RolloutError
from ..learn.samples import check_tokens, to_samples
from ..rollout import Plan, open_task, run_chain
from ..rollout.chain import Opening
from ..rollout.scheduler import admission_timeout_s
from ..types import Completion, Request, Sample, Sampling, Task, Trajectory
from ..watch.metrics import is_success

log = logging.getLogger(__name__)

TASK = "agentfly_task"
"""The column of the Parquet files that holds the encoded task."""
SPLIT = "agentfly_split"
"""The column that tells training rows from validation rows: verl does not tell the agent loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What the launcher decides for all workers.

    `one_row` is the reason why a chain may have only one training row ("" if it may have several). `compares` is true for an
    algorithm that compares siblings. `window` is the number of chains over which `max_failed_share` counts.
    """

    num_chains: int
    validate_chains: int
    max_prompt: int
    max_response: int
    max_context: int
    server: Literal["vllm", "sglang"]
    compares: bool
    seeded: bool
    seed: int
    success_at: float
    window: int
    max_failed_share: float
    one_row: str = ""
    turn_timeout_s: float | None = None
    group_timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One training row as verl takes it: the prompt ends before the first sampled token, the response with the last one."""

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float]
    rewards: list[float]
    versions: list[int]
    reward: float
    num_turns: int
    sampled_s: float
    tools_s: float
    extra: dict[str, Any]


class ServerEngine:
    """Samples one chain's replies from verl's servers, token ids in and out. Implements `types.Engine`.

    `client` is verl's LLMServerClient; one request id for all turns keeps a chain on the server that holds its cache. `base`
    are the sampling parameters that verl passes (they differ between training and validation). `version` labels tokens if a
    server does not say which weights drew them. A reply that spans several versions is labelled with the oldest: verl reports
    the oldest and the newest of a reply, not those of single tokens.
    """

    reads: Literal["ids", "messages"] = "ids"

    def __init__(
        self,
        client: Any,
        tokenizer: Any,
        stop_ids: frozenset[int],
        base: Mapping[str, Any],
        settings: LoopSettings,
        version: int,
    ) -> None:
        self.version, self.max_context = version, settings.max_context
        self.newest: int | None = None
        self._client, self._tokenizer, self._stop_ids = client, tokenizer, stop_ids
        self._base, self._server, self._seeded = dict(base), settings.server, settings.seeded

    async def generate(self, request: Request) -> Completion:
        room = room_for(request, self.max_context)
        stops = sorted({*self._stop_ids, *request.sampling.stop_ids})
        output = await self._client.generate(
            request_id=request.session,
            prompt_ids=list(request.prompt_ids),
            sampling_params=self._parameters(request.sampling, room, stops),
        )
        ids = [int(token) for token in output.token_ids]
        if output.stop_reason == "aborted" or not ids:
            raise EngineError(f"verl's server ended the request without a reply ({output.stop_reason or 'no tokens'})")
        if output.log_probs is None or len(output.log_probs) != len(ids):
            raise InvariantError("verl's server gave no log-prob for each token: actor_rollout_ref.rollout.calculate_log_probs")
        if len(ids) > room:
            raise InvariantError(f"verl's server sampled {len(ids)} tokens where {room} were allowed")
        oldest = self._versions(output.extra_fields)
        logprobs = [min(0.0, float(value)) if value < 1e-6 else float(value) for value in output.log_probs]
        by_id = ids[-1] in stops
        done = complete(self._tokenizer, ids, logprobs, [oldest] * len(ids), "stop" if by_id else "length", stops)
        return replace(done, stop="stop") if any(text in done.text for text in request.sampling.stop) else done

    def release(self, session: str) -> None:
        """Nothing to release: verl's servers evict by themselves."""

    async def close(self) -> None:
        """Nothing to close: verl owns its servers."""

    def _parameters(self, sampling: Sampling, room: int, stops: list[int]) -> dict[str, Any]:
        parameters = {**self._base, "max_tokens": room, "stop_token_ids": stops, "ignore_eos": True, "logprobs": True}
        if sampling.stop:
            parameters["stop"] = list(sampling.stop)
            parameters["include_stop_str_in_output" if self._server == "vllm" else "no_stop_trim"] = True
        if self._seeded and sampling.seed is not None and self._server == "vllm":
            parameters["seed"] = sampling.seed
        return parameters

    def _versions(self, extra: Mapping[str, Any]) -> int:
        """Returns the version of the oldest weights that drew a token of this reply."""
        step = extra.get("global_steps")
        oldest, newest = (extra.get(name) for name in ("min_global_steps", "max_global_steps"))
        oldest = int(next((value for value in (oldest, step) if value is not None), self.version))
        newest = int(next((value for value in (newest, step) if value is not None), oldest))
        self.newest = max(newest, self.newest or 0)
        return oldest


@dataclass(slots=True)
class _Group:
    """The sessions of one prompt: how many are expected, have ended, and are left to train on."""

    size: int
    task: Task
    started: float
    opening: Opening | None = None
    ended: int = 0
    kept: int = 0
    why: str = "no chain was started"
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def end(self, trajectory: Trajectory | None) -> None:
        self.ended += 1
        if trajectory is not None and trajectory.trainable:
            self.kept += 1
        elif trajectory is not None:
            self.why = trajectory.error or trajectory.outcome.value
        if self.ended >= self.size:
            self.done.set()


class SessionRunner:
    """The state of one worker process: the plan with its environments, the open groups, and the share of lost chains.

    `stop_file` is written once if the run must stop: verl turns every error of a session into a failed group and goes on, so
    the launcher watches for this file.
    """

    def __init__(
        self,
        plan: Plan,
        settings: LoopSettings,
        tokenizer: Any,
        stop_ids: frozenset[int],
        *,
        stop_file: Path | None = None,
        stack: AsyncExitStack | None = None,
    ) -> None:
        self.plan, self.settings = plan, settings
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._stop_file, self._stack = stop_file, stack
        self._groups: dict[str, _Group] = {}
        self._lost: deque[bool] = deque(maxlen=settings.window)

    async def close(self) -> None:
        """Close the environments."""
        if self._stack is not None:
            await self._stack.aclose()

    async def run(self, client: Any, parameters: Mapping[str, Any], row: Mapping[str, Any], session: str) -> list[Row]:
        """Play one session. Returns its rows, [] if its chain was lost. Raises if its whole group was lost, or for a bug."""
        try:
            return await self._run(client, parameters, row, session)
        except RolloutError:
            raise
        except AgentFlyError as error:
            self._stop_run(error)
            raise

    async def _run(self, client: object, parameters: Mapping[str, Any], row: Mapping[str, Any], session: str) -> list[Row]:
        validates = row.get(SPLIT) == "validation"
        uid = (
            str(row["uid"]) if "session_id" in row else session
        )  # without a session id, verl runs every chain as its own group
        group = self._join(uid, row, validates)
        trajectory = None
        step = int(row.get("global_steps", 0))
        engine = ServerEngine(client, self._tokenizer, self._stop_ids, parameters, self.settings, max(0, step - 1))
        try:
            trajectory = await self._play(group, engine, parameters, int(row.get("session_id", 0)), session, step, validates)
        finally:
            group.end(trajectory)
            if group.done.is_set():
                self._groups.pop(uid, None)
        self._count(trajectory)
        await self._siblings(uid, group)
        return self._rows(trajectory, engine, group, validates)

    def _join(self, uid: str, row: Mapping[str, Any], validates: bool) -> _Group:
        group = self._groups.get(uid)
        if group is None:
            task = decode(bytes(row[TASK]))
            size = self.settings.validate_chains if validates else self.settings.num_chains
            now = asyncio.get_running_loop().time()
            group = self._groups[uid] = _Group(size if "session_id" in row else 1, task, now)
        return group

    async def _play(
        self,
        group: _Group,
        engine: ServerEngine,
        parameters: Mapping[str, Any],
        chain: int,
        session: str,
        step: int,
        validates: bool,
    ) -> Trajectory:
        plan, settings = self.plan, self.settings
        assert plan.admission is not None
        async with plan.admission.slot(plan.admission.done, admission_timeout_s(plan.limits)):
            if group.opening is None:
                group.opening = open_task(plan, group.task)
            prompt = len(group.opening.prompt_ids)
            room = min(settings.max_context, prompt + settings.max_response)
            # As in local training: the seeds of a step differ from those of every other step.
            seed = settings.seed if validates else settings.seed * 1_000_003 + step
            plan = replace(
                plan,
                engine=engine,
                sampling=replace(plan.sampling, temperature=float(parameters.get("temperature", 1.0)), seed=seed),
                limits=replace(
                    plan.limits,
                    max_context=room,
                    turn_timeout_s=settings.turn_timeout_s,
                    group_timeout_s=settings.group_timeout_s,
                ),
            )
            until = None if settings.group_timeout_s is None else group.started + settings.group_timeout_s
            return await run_chain(plan, group.opening, chain, session, until=until)

    async def _siblings(self, uid: str, group: _Group) -> None:
        """Wait until all sessions of the group have ended. A session that verl never started does not hold up the others."""
        limits = self.plan.limits
        try:
            async with asyncio.timeout(admission_timeout_s(limits) + limits.chain_timeout_s + limits.score_timeout_s):
                await group.done.wait()
        except TimeoutError:
            log.warning("group %s: %d of %d sessions have ended; its rows are handed over", uid, group.ended, group.size)
            self._groups.pop(uid, None)

    def _rows(self, trajectory: Trajectory, engine: ServerEngine, group: _Group, validates: bool) -> list[Row]:
        name = f"task {trajectory.task.id!r}"
        if not group.kept:
            raise RolloutError(f"{name}: all {group.size} chains were lost, the last one by: {group.why}")
        if group.kept == 1 < group.size and self.settings.compares and not validates:
            raise RolloutError(f"{name}: one of {group.size} chains is left, and it has no sibling to be compared with")
        samples = to_samples(trajectory)
        if not samples:
            log.warning("%s, chain %d was lost: %s", name, trajectory.chain, trajectory.error or trajectory.outcome.value)
            return []
        if len(samples) > 1 and self.settings.one_row and not validates:
            raise ConfigError(
                f"{name}: the chat template rewrote history, so its chain has {len(samples)} training rows, and "
                f'{self.settings.one_row}. Use algorithm = "grpo" with loss.aggregation = "token_mean", or backend = "local"'
            )
        drawn = [version for sample in samples for version in sample.versions[sample.mask].tolist()]
        check_tokens(trajectory, samples, versions=range(min(drawn), max(drawn) + 1))
        newest = max(drawn) if engine.newest is None else engine.newest
        return self._as_rows(trajectory, samples, {"min_global_steps": min(drawn), "max_global_steps": newest})

    def _as_rows(self, trajectory: Trajectory, samples: list[Sample], versions: dict[str, int]) -> list[Row]:
        total, turns = trajectory.total_reward, trajectory.turns
        info = {
            "acc": float(is_success(trajectory, self.settings.success_at)),
            "sampled_tokens": float(trajectory.num_sampled),
            "tool_calls": float(trajectory.tool_counts.total()),
            "invalid_calls": float(trajectory.num_invalid_calls),
        }
        rows = []
        for number, sample in enumerate(samples):
            first = int(sample.mask.argmax())
            rewards = sample.rewards[first:].tolist()
            if len(samples) > 1:  # verl reads the reward of a chain from its last row
                rewards = [0.0] * (len(rewards) - 1) + [total if number == len(samples) - 1 else 0.0]
            row = Row(
                prompt_ids=sample.token_ids[:first].tolist(),
                response_ids=sample.token_ids[first:].tolist(),
                mask=[int(flag) for flag in sample.mask[first:]],
                logprobs=sample.logprobs[first:].tolist(),
                rewards=rewards,
                versions=sample.versions[first:].tolist(),
                reward=total,
                num_turns=len(trajectory.messages),
                sampled_s=sum(turn.sampled_s for turn in turns),
                tools_s=sum(turn.tools_s for turn in turns),
                extra={
                    **versions,
                    "reward_extra_info": info,  # the same keys in every row: verl takes them from the first
                    "turn_scores": [turn.reward for turn in turns],
                    "tool_rewards": [],
                    "agentfly_versions": sample.versions[first:].tolist(),
                    "agentfly_group": sample.group,
                    "agentfly_trajectory": trajectory.id,
                    "agentfly_outcome": trajectory.outcome.value,
                    "agentfly_components": dict(trajectory.components),
                },
            )
            self._check(row, trajectory)
            rows.append(row)
        return rows

    def _check(self, row: Row, trajectory: Trajectory) -> None:
        """verl checks no lengths of rows that an agent loop returns, and loses a reward that follows observed tokens."""
        settings = self.settings
        for what, ids, limit in (
            ("prompt", row.prompt_ids, settings.max_prompt),
            ("response", row.response_ids, settings.max_response),
        ):
            if len(ids) > limit:
                raise InvariantError(f"chain {trajectory.id!r}: its {what} has {len(ids)} tokens, and verl was told {limit}")
        if not row.mask or not row.mask[-1] or not row.prompt_ids:
            raise InvariantError(f"chain {trajectory.id!r}: a row must begin with a prompt and end with a sampled token")

    def _count(self, trajectory: Trajectory) -> None:
        """Raises ConfigError if more than `max_failed_share` of the last chains were lost."""
        self._lost.append(not trajectory.trainable)
        share = sum(self._lost) / len(self._lost)
        if len(self._lost) == self._lost.maxlen and share > self.settings.max_failed_share:
            raise ConfigError(
                f"{sum(self._lost)} of the last {len(self._lost)} chains of a worker were lost (train.max_failed_share = "
                f"{self.settings.max_failed_share:g}), the last one by: {trajectory.error or trajectory.outcome.value}"
            )

    def _stop_run(self, error: AgentFlyError) -> None:
        if self._stop_file is not None and not self._stop_file.exists():
            try:
                self._stop_file.write_text(f"{type(error).__name__}: {error}\n", encoding="utf-8")
            except OSError as failed:
                log.error("the run cannot be stopped by %s: %s", self._stop_file, failed)
