"""The agent loop that verl calls (verl 0.9): one instance per session, all of them on one `SessionRunner` per process.

verl makes the instance from the YAML file that the launcher writes: `folder` is the run's folder, `build` names the function
that opens the runner there ("module:function"), so that this room needs to know nothing of configs and training.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any
from uuid import uuid4

import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from .. import plugins
from .verl_chains import Row, SessionRunner

_runners: dict[tuple[str, int], asyncio.Task[SessionRunner]] = {}
"""Per run folder and event loop. verl makes a new loop instance per session, so what sessions share is kept here."""


class TrainingRow(AgentLoopOutput):  # type: ignore[misc]
    """An output whose rewards stand on the tokens that earned them. verl itself puts the sum on the last token."""

    token_rewards: list[float]

    def as_dict(self) -> dict[str, Any]:
        fields: dict[str, Any] = super().as_dict()
        rewards = fields.pop("token_rewards")
        fields["rm_scores"] = fields["rm_scores"].new_tensor(rewards)
        return fields


class AgentFlyLoop(AgentLoopBase):  # type: ignore[misc]
    """Plays one chain of the recipe in `folder` over verl's servers."""

    def __init__(self, *args: Any, folder: str, build: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder, self._build = folder, build

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Returns one output, or a list: several rows if history was rewritten, none if the chain was lost."""
        runner = await open_runner(self._build, self._folder)
        session = f"{row['uid']}-{row['session_id']}" if "session_id" in row else uuid4().hex
        outputs = [_output(chain) for chain in await runner.run(self.server_manager, sampling_params, row, session)]
        return outputs[0] if len(outputs) == 1 else outputs


async def open_runner(build: str, folder: str) -> SessionRunner:
    """Returns the runner of this process; the first session opens it, and those that come meanwhile wait for it."""
    key = (folder, id(asyncio.get_running_loop()))
    opening = _runners.get(key)
    if opening is None:
        opening = _runners[key] = asyncio.create_task(_open(build, folder))
    return await asyncio.shield(opening)


async def _open(build: str, folder: str) -> SessionRunner:
    """Open the runner. If that fails in a worker of Ray, the worker ends: verl would draw new groups for ever."""
    try:
        runner: SessionRunner = await plugins.resolve("loops", build)(folder)
        return runner
    except Exception as error:
        if ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            print(f"agentfly: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        raise


def _output(row: Row) -> TrainingRow:
    return TrainingRow(
        prompt_ids=row.prompt_ids,
        response_ids=row.response_ids,
        response_mask=row.mask,
        response_logprobs=row.logprobs,
        reward_score=row.reward,
        num_turns=row.num_turns,
        metrics=AgentLoopMetrics(generate_sequences=row.sampled_s, tool_calls=row.tools_s),
        extra_fields=row.extra,
        token_rewards=row.rewards,
    )
