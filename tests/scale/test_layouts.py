"""Where ranks and samplers of simulated GPUs go, what each takes of its GPU, and how weights reach it: the parts together."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.config import Config
from agentfly.errors import ConfigError
from agentfly.learn.ranks.environment import ThisRank
from agentfly.learn.ranks.group import choose_device
from agentfly.training.ranks.cluster_ranks import variables_of
from agentfly.training.workers import weights, worker
from agentfly.training.workers.engine import gpu_environments

ALONE = 0.4
"""The share of the free memory that one engine on a GPU of the learner takes for its cache."""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a function: this machine has so many GPUs, and the trainer sees these."""
    import torch

    def make(count: int, visible: str | None = None) -> None:
        names = [str(i) for i in range(count)] if visible is None else visible.split(",")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
        monkeypatch.setattr(worker, "_sees_gpu", lambda options: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


def gpus_of_ranks(config: Config, visible: list[str]) -> list[str]:
    size, device = config.learner.ranks, config.agent.engine if isinstance(config.agent.engine, dict) else {}
    ranks = [ThisRank(rank, size, rank, size, "127.0.0.1:1") for rank in range(size)]
    return [visible[choose_device(this, device.get("device"))[0].index or 0] for this in ranks]


def gpus_of_samplers(config: Config, visible: list[str]) -> list[str]:
    device = (config.agent.engine if isinstance(config.agent.engine, dict) else {}).get("device", "cuda")
    index = int(device.partition(":")[2] or 0)
    seen = [each.get("CUDA_VISIBLE_DEVICES") for each in gpu_environments(config, True)]
    return [(visible if names is None else names.split(","))[index] for names in seen]


def ways(config: Config, gpu_0: str, samplers: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How weights reach samplers on (machine, GPU) from rank 0 on its GPU of machine "a"."""
    monkeypatch.setattr(weights, "machine", lambda: "a")
    monkeypatch.setattr(weights, "gpu_identity", lambda device: f"a {gpu_0}")
    monkeypatch.setattr(weights, "has_expandable_segments", lambda: False)
    senders = weights.Senders(None, None)
    monkeypatch.setattr(senders, "_make", lambda kind, device: kind)
    about = [{"machine": where, "device": f"{where} {gpu}"} for where, gpu in samplers]
    return [senders.of([SimpleNamespace(about=each)], "cuda")[0][0] for each in about]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("gpus", "words", "on_gpu", "share"),
    [
        (1, ["sampler.place=process"], {"0": 1}, ALONE),
        (1, ["sampler.replicas=3"], {"0": 3}, ALONE / 3),
        (1, ["learner.ranks=2", "sampler.replicas=2", "agent.engine.device=cuda:0"], {"0": 2}, ALONE / 2),
        (2, ["sampler.replicas=2", "agent.engine.device=cuda:1"], {"1": 2}, ALONE / 2),
        (2, ["learner.ranks=2", "sampler.replicas=2"], {"0": 1, "1": 1}, ALONE),
        (2, ["learner.ranks=2", "sampler.replicas=3"], {"0": 2, "1": 1}, ALONE / 2),
        (8, ["learner.ranks=8", "sampler.replicas=8"], {str(i): 1 for i in range(8)}, ALONE),
        (8, ["learner.ranks=4", "sampler.replicas=8"], {str(i): 2 for i in range(4)}, ALONE / 2),
        (8, ["learner.ranks=8", "sampler.replicas=2"], {"0": 1, "1": 1}, ALONE),
        (8, ["learner.ranks=4", "sampler.replicas=4", "sampler.place=own"], {str(i): 1 for i in range(4, 8)}, 0.7),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_samplers_share_the_learners_gpus_evenly_and_each_takes_its_part(
    gpus: int, words: list[str], on_gpu: dict[str, int], share: float, machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(gpus)
    config = Config.load("quickstart", words)
    visible = [str(i) for i in range(gpus)]
    ranks, samplers = gpus_of_ranks(config, visible), gpus_of_samplers(config, visible)
    assert Counter(samplers) == on_gpu
    own = config.sampler.place == "own"
    assert not set(samplers) & set(ranks) if own else set(samplers) <= set(ranks)
    options = {"device": config.agent.engine["device"]} if "agent.engine.device" in " ".join(words) else {}
    taken = worker.gpu_options(config, options)["kv_fraction"]
    assert taken == pytest.approx(share)
    assert own or max(on_gpu.values()) * taken <= ALONE + 1e-9
    told = ways(config, ranks[0], [("a", gpu) for gpu in samplers], monkeypatch)
    assert told == ["ipc" if gpu == ranks[0] else "broadcast" for gpu in samplers]


def test_the_gpus_that_the_trainer_may_see_are_those_that_are_used(machine: Any) -> None:
    machine(8, visible="5,3,6")
    config = Config.load("quickstart", ["learner.ranks=2", "sampler.replicas=2"])
    assert [each["CUDA_VISIBLE_DEVICES"] for each in gpu_environments(config, True)] == ["5", "3"]
    own = Config.load("quickstart", ["learner.ranks=2", "sampler.replicas=1", "sampler.place=own"])
    assert [each["CUDA_VISIBLE_DEVICES"] for each in gpu_environments(own, True)] == ["6"]


def test_a_sampler_on_its_own_gpu_cannot_take_a_named_one(machine: Any) -> None:
    machine(2)
    config = Config.load("quickstart", ["sampler.place=own", "agent.engine.device=cuda:1"])
    with pytest.raises(ConfigError, match=r"agent\.engine\.device = 'cuda:1' and sampler\.place = \"own\""):
        gpu_environments(config, True)


def test_eight_nodes_of_eight_gpus_hold_a_rank_or_a_sampler_on_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives each reservation a GPU: 32 ranks on four nodes, 32 samplers on the others."""
    config = Config.load("quickstart", ["cluster.address=auto", "learner.ranks=32", "sampler.replicas=32"])
    nodes = [SimpleNamespace(id=f"n{i}", name=f"n{i}") for i in range(4)]
    reservations: list[Any] = [SimpleNamespace(node=nodes[i // 8], about={"gpus": [str(7 - i % 8)]}) for i in range(32)]
    ranks = variables_of(reservations)
    held = set()
    for reservation, of_rank in zip(reservations, ranks, strict=True):
        seen = of_rank["CUDA_VISIBLE_DEVICES"].split(",")
        assert sorted(seen) == [str(i) for i in range(8)]
        assert of_rank["LOCAL_WORLD_SIZE"] == "8"
        held.add((reservation.node.name, seen[int(of_rank["LOCAL_RANK"])]))
    assert len(held) == 32
    monkeypatch.setattr(worker, "_sees_gpu", lambda options: True)
    assert worker.gpu_options(config, {}) == {"kv_fraction": 0.7}
    samplers = [(f"n{4 + i // 8}", str(i % 8)) for i in range(32)]
    assert ways(config, "0", samplers, monkeypatch) == ["broadcast"] * 32
