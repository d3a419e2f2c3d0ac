"""Layouts of a run: how many GPUs learn, how many sample, and whether they are the same ones.

shared  every GPU learns and samples; the own trainer, one GPU a sampler
own     some GPUs learn, the others sample; the own trainer, one GPU a sampler
verl    every GPU learns, and a sampler is spread over `sampler_gpus` of them; it sleeps while the learner works
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..config import Config
from ..errors import ConfigError

SPREADS = (1, 2, 4, 8)
"""GPUs of one sampler that are tried with verl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """GPUs that learn and samplers, on one machine or several. `again`: layers are computed again in the backward pass;
    `processes`: a single sampler runs in a process of its own, too.
    """

    learners: int
    samplers: int
    sampler_gpus: int = 1
    own: bool = False
    verl: bool = False
    offload: bool = False
    again: bool = False
    processes: bool = False

    @property
    def gpus(self) -> int:
        return self.learners + (self.samplers * self.sampler_gpus if self.own else 0)

    @property
    def on_one_gpu(self) -> int:
        """Samplers that share a GPU."""
        return 1 if self.own else -(-self.samplers * self.sampler_gpus // self.learners)

    @property
    def in_one_process(self) -> bool:
        """One copy of the weights serves the learner and the sampler."""
        return not (self.verl or self.own or self.processes) and self.learners == self.samplers == 1

    def __str__(self) -> str:
        if self.verl:
            words = f"verl, {self.learners} learn, samplers over {self.sampler_gpus}" + (", offload" if self.offload else "")
        elif self.own:
            words = f"{self.learners} learn, {self.samplers} sample"
        else:
            words = f"{self.learners} learn and sample" + (", in two processes" if self.processes else "")
        return words + (", layers again" if self.again else "")


def layout_of(config: Config) -> Layout | None:
    """Returns the layout that the config names, or None if all its keys of processes are at their defaults."""
    again = config.train.gradient_checkpointing is True
    ranks, sampler, verl = config.learner.ranks, config.sampler, config.verl
    if config.backend == "verl":
        per_node = verl.gpus_per_node or max(1, ranks // verl.nodes)
        gpus = verl.nodes * per_node
        if gpus == 1 and ranks == 1:
            return None
        if gpus % verl.tensor_parallel:
            raise ConfigError(f"verl.tensor_parallel = {verl.tensor_parallel} does not divide {gpus} GPUs")
        return Layout(
            learners=gpus, samplers=gpus // verl.tensor_parallel, sampler_gpus=verl.tensor_parallel, verl=True,
            offload=verl.offload, again=again,
        )  # fmt: skip
    if ranks == 1 and not sampler.in_processes:
        return None
    own = sampler.place == "own" or (config.cluster.address is not None and sampler.in_processes)  # Ray gives each a GPU
    alone = ranks == sampler.replicas == 1 and not own
    return Layout(learners=ranks, samplers=sampler.replicas, own=own, again=again, processes=alone)


def layouts(config: Config, gpus: int, per_node: int) -> Iterator[Layout]:
    """The layouts of `gpus` GPUs that this trainer and verl can run, simple ones first. Over machines, Ray gives each rank
    and each sampler of this trainer its own GPU.
    """
    for again in [True] if config.train.gradient_checkpointing is True else [False, True]:
        if config.backend == "local":
            if gpus <= per_node and config.cluster.address is None:
                yield Layout(learners=gpus, samplers=gpus, again=again)
            for samplers in range(1, gpus):
                yield Layout(learners=gpus - samplers, samplers=samplers, own=True, again=again)
        if gpus > 1 and (gpus <= per_node or gpus % per_node == 0):
            for spread in SPREADS:
                if spread <= min(gpus, per_node) and gpus % spread == 0:
                    for offload in sorted({config.verl.offload, True}):
                        yield Layout(
                            learners=gpus, samplers=gpus // spread, sampler_gpus=spread, verl=True, offload=offload, again=again
                        )
