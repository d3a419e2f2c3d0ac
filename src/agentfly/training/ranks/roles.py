"""A run whose learner is sharded over several processes: rank 0 trains, the others follow it.

Rank 0 samples with the local engine from its own copy of the weights. After each update the copy takes the gathered weights,
and the answer to a probe proves that it did (`engines.copies`).
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...agents.base import BaseAgent
from ...aio.threads import run_to_end
from ...build import build_learner
from ...config import Config
from ...config.sections import FaultSettings, LearnerSettings
from ...errors import ConfigError
from ...learn.ranks.environment import ThisRank, read_rank
from ...protocols import ReplicatedEngine, TrainableEngine
from ...types import Proof, Request, Sampling
from ..stopping import handled_by

if TYPE_CHECKING:
    from ...learn.ranks.group import RankGroup
    from ...learn.ranks.learner import RankLearner

PROOF_LIMIT, PROOF_LIMIT_HALF = 0.05, 0.15
"""Nats that the engine's log-probs may differ from the learner's, in float32 and in half precision."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable that torchrun sets, and the supervisor does not."""
GRACE_S = 25.0
"""Seconds after a signal in which rank 0 finishes its update and saves, before another rank ends by itself."""


def find_rank(config: Config) -> ThisRank | None:
    """Returns which rank of a run this process is; None for a run in one process. Raises ConfigError."""
    this, wanted = read_rank(), config.learner.ranks
    if this is None:
        if wanted > 1:
            raise ConfigError(
                f"learner.ranks = {wanted} needs as many processes: run `agentfly train`, which starts them, or start this "
                f"program with `torchrun --nproc-per-node {wanted}`"
            )
        changed = [key for key in ("reduce", "timeout_s") if getattr(config.learner, key) != getattr(LearnerSettings(), key)]
        if changed:
            raise ConfigError(f"learner.{changed[0]} has no effect on one rank: set learner.ranks, or remove it")
        if config.fault != FaultSettings():
            raise ConfigError("fault.restarts has no effect on one rank: set learner.ranks, or remove it")
        return None
    if wanted not in (1, this.size):
        raise ConfigError(
            f"learner.ranks = {wanted}, but {this.size} ranks were started: pass learner.ranks={this.size}, or start {wanted}"
        )
    config.check_ranks(this.size)
    uses = config.sampler.in_processes or config.cluster.env_hosts
    if config.cluster.address is not None and not uses and os.environ.get(TORCHRUN):
        raise ConfigError(
            "cluster.address has no effect on ranks that torchrun has started: run `agentfly train`, which places them on the "
            "nodes, or remove it"
        )
    return this


def join_ranks(config: Config, this: ThisRank, device: str | None) -> RankGroup:
    """Meet the other ranks. `device` is agent.engine.device."""
    from ...learn.ranks.group import RankGroup

    return RankGroup.join(this, device, config.learner.timeout_s)


def rank_model(agent: BaseAgent, ranks: RankGroup) -> Any:
    """Returns the agent's model on the device of this rank, without an engine; None if the agent has an open engine."""
    from ...engines.local.load import load_model, tune

    if not isinstance(agent.model, str | Path):
        return None
    options = agent.engine_options
    model, _ = load_model(agent.model, device=ranks.device, dtype=options.get("dtype"), max_context=options.get("max_context"))
    tune(next(model.parameters()))
    return model


def follow_ranks(config: Config, model: Any, ranks: RankGroup) -> None:
    """On ranks other than 0: take part in the run until rank 0 ends it."""
    from ...learn.model.lora import adapt
    from ...learn.model.storage import seed_torch

    seed_torch(config.seed, config.run.threads)
    if config.lora.rank:
        adapt(model, config.lora, config.seed)
    with handled_by(leave_to_rank_0):
        if ranks.receive()[0] == "start":  # rank 0 may load data or run a warm start for longer than a collective waits
            build_learner(config, model, exact=True, ranks=ranks).follow()


def lead_ranks(config: Config, engine: TrainableEngine, ranks: RankGroup) -> RankLearner:
    """On rank 0: make the sharded learner of the engine's model.

    The local engine keeps a copy without adapters. Worker processes have their own copies.
    """
    from ...engines.local import LocalEngine
    from ...learn.model.lora import merge_adapters

    learner: RankLearner
    if isinstance(engine, ReplicatedEngine):
        ranks.send("start")
        learner = build_learner(config, engine.model, exact=engine.exact, ranks=ranks, tokenizer=engine.tokenizer)
        engine.use_learner(learner.weights, learner.score)
        return learner
    if not isinstance(engine, LocalEngine):
        raise ConfigError(f"a learner over several ranks needs the local engine, not {type(engine).__name__}")
    ranks.send("start")
    learner = build_learner(config, copy.deepcopy(engine.model), exact=True, ranks=ranks, tokenizer=engine.tokenizer)
    merge_adapters(engine.model)
    proof = CopyProof(learner, engine)
    engine.copy_from(learner.weights, proof)
    return learner


class CopyProof:
    """Proves that the local engine samples from the learner's weights: called with the version, returns the proof."""

    def __init__(self, learner: RankLearner, engine: Any) -> None:
        from ...engines.copies import LearnerCopy
        from ...engines.local.load import context_of

        class Copy(LearnerCopy):
            """The learner's side of the proof is scored by the ranks."""

            def __init__(self) -> None:
                config = engine.model.config
                self.context, self.num_ids = context_of(config), int(config.get_text_config().vocab_size)
                self._last, self._noise = None, float("inf")
                self._before: list[float] | None = None
                self._own: list[float] = []

            def score(self, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
                return learner.score(ids, temperature)

        self._copy, self._engine = Copy(), engine

    def __call__(self, version: int) -> Proof:
        whole = next(self._engine.model.parameters()).dtype.itemsize >= 4
        return self._copy.prove(version, self._ask, PROOF_LIMIT if whole else PROOF_LIMIT_HALF)

    def _ask(self, ids: list[int], sampling: Sampling) -> Any:
        from ...engines.copies import score_ids
        from ...engines.prompt import ProbeAnswer

        return ProbeAnswer(score_ids(self._engine.model, ids), run_to_end(self._engine.generate(Request(ids, sampling))))


def leave_to_rank_0(number: int, frame: FrameType | None) -> None:
    """Handle a signal that all ranks receive: rank 0 ends the run. If it does not within GRACE_S, this process ends."""
    timer = threading.Timer(GRACE_S, os._exit, [128 + number])
    timer.daemon = True
    timer.start()
