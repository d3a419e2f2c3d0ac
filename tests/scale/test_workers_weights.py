"""Weights on their way to workers: every tensor arrives as it was sent, and weights that do not come whole are not sampled."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from agentfly.engines.copies import Bucket, LearnerCopy, weight_buckets
from agentfly.engines.local import LocalEngine
from agentfly.errors import EngineError, InvariantError
from agentfly.training.workers.weight_receiver import Receiver
from agentfly.training.workers.weights import BroadcastSender, MemorySender, has_expandable_segments, layout_of, views
from agentfly.types import Request, Sampling
from tests.scale.rank_pool import LOOPBACK, listening
from tests.tiny import save_tiny_model

torch.set_num_threads(1)


class Worker:
    """A worker in a thread: takes weights as a process does. `fails` raises while it copies the first bucket."""

    def __init__(self, fails: bool = False) -> None:
        self.alive = True
        self.fails = fails
        self.held: dict[str, torch.Tensor] = {}
        self.receiver: Receiver | None = None

    def post(self, kind: str, value: Mapping[str, Any]) -> Future[Any]:
        if kind == "bucket":
            assert self.receiver is not None
            return self.receiver.put(value)
        done: Future[Any] = Future()
        self.receiver = Receiver(value)
        threading.Thread(target=self.take, args=(self.receiver, done)).start()
        return done

    def take(self, receiver: Receiver, done: Future[Any]) -> None:
        try:
            for bucket in receiver:
                if self.fails:
                    raise EngineError("no memory is left")
                self.held |= {name: tensor.clone() for name, tensor in bucket}
        except EngineError as error:
            receiver.close()
            done.set_exception(error)
        else:
            done.set_result(None)


def odd_tensors(seed: int) -> list[Bucket]:
    draw = torch.Generator().manual_seed(seed)
    first: Bucket = [
        ("matrix", torch.randn(7, 5, generator=draw)),
        ("half", torch.randn(3, 3, generator=draw).bfloat16()),
        ("number", torch.tensor(seed, dtype=torch.int64)),
        ("nothing", torch.empty(0, 4)),
    ]
    turned = torch.randn(4, 6, generator=draw).t()  # not contiguous
    return [first, [("turned", turned), ("flags", torch.tensor([True, False, True]))]]


def same(worker: Worker, buckets: Iterable[Bucket]) -> bool:
    sent = {name: tensor for bucket in buckets for name, tensor in bucket}
    return worker.held.keys() == sent.keys() and all(torch.equal(worker.held[name], sent[name]) for name in sent)


@pytest.mark.skipif(not MemorySender.works(), reason="needs memfd")
def test_tensors_of_every_shape_arrive_through_memory_version_after_version() -> None:
    sender, workers = MemorySender(), [Worker(), Worker()]
    for version in (1, 2):
        sender.write(odd_tensors(version))
        assert sender.send(version, workers) == {}
        assert all(same(worker, odd_tensors(version)) for worker in workers)
    late = Worker()  # started again: it reads the present version
    assert sender.send(2, [late]) == {}
    assert same(late, odd_tensors(2))
    larger = [[("large", torch.randn(100_000))]]
    sender.write(larger)
    assert sender.send(3, [late]) == {}
    assert torch.equal(late.held["large"], larger[0][0][1])
    sender.close()


@pytest.mark.skipif(not MemorySender.works(), reason="needs memfd")
def test_only_the_worker_that_fails_is_named() -> None:
    sender, good, bad, dead = MemorySender(), Worker(), Worker(fails=True), Worker()
    dead.alive = False
    sender.write(odd_tensors(1))
    failed = sender.send(1, [good, bad, dead])
    assert list(failed) == [bad]
    assert same(good, odd_tensors(1))
    assert not dead.held
    sender.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_tensors_arrive_by_broadcast_over_loopback_alone_and_the_group_is_used_again() -> None:
    sender, worker = BroadcastSender(torch.device("cpu")), Worker()
    for version in (1, 2):
        size, failed = sender.send(version, [worker], lambda version=version: odd_tensors(version))
        assert not failed
        assert size > 0
        assert same(worker, odd_tensors(version))
    assert listening(), "the store and gloo listen"
    assert set(listening()) <= LOOPBACK
    sender.close()


def test_a_layout_is_aligned_and_its_views_share_the_buffer() -> None:
    layout, end = layout_of(odd_tensors(1)[0], start=128)
    assert all(offset % 64 == 0 for *_, offset in layout)
    buffer = torch.zeros(end, dtype=torch.uint8)
    views(buffer, layout)[0][1].fill_(1.0)
    assert buffer.any()


def test_buckets_are_cut_by_their_size() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(5)))  # 256 bytes each
    assert [len(bucket) for bucket in weight_buckets(model, 600)] == [2, 2, 1]
    assert [len(bucket) for bucket in weight_buckets(model, 1)] == [1] * 5


@pytest.mark.parametrize("fault", ["missing", "shape", "unknown"])
def test_an_engine_whose_weights_do_not_come_whole_stops(tmp_path: Path, fault: str) -> None:
    copy = LearnerCopy(save_tiny_model(tmp_path), device="cpu")
    engine = LocalEngine(copy.model, copy.tokenizer)
    whole = [item for bucket in copy.weights() for item in bucket]
    engine.take_weights(1, [whole[:3], whole[3:]])
    request = Request([3, 4, 5], Sampling(max_tokens=2))
    assert asyncio.run(engine.generate(request)).versions == [1, 1]
    broken = {
        "missing": whole[:-2],
        "shape": [(whole[0][0], whole[0][1][:-1]), *whole[1:]],
        "unknown": [*whole, ("other", torch.zeros(1))],
    }
    with pytest.raises(
        InvariantError, match={"missing": "are missing, among them", "shape": "has the shape"}.get(fault, "other")
    ):
        engine.take_weights(2, [broken[fault]])
    with pytest.raises(EngineError, match="the weights of version 2 did not come whole"):
        asyncio.run(engine.generate(request))


def test_expandable_segments_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert not has_expandable_segments()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    assert has_expandable_segments()
