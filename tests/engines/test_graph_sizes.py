"""Sizes of graphs: coarse ones first, the fitting one when it has been missed often."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from agentfly.engines.local.cuda_graphs import GraphSizes
from agentfly.engines.local.decode_batch import DecodeBatch
from agentfly.engines.local.engine import QUIET_S
from agentfly.engines.local.prefill import Prefiller
from agentfly.errors import EngineError
from agentfly.protocols import PreparedEngine

from .tiny import ask, prompt_of, run, until


def test_the_first_size_is_a_coarse_one_and_a_larger_wish_gets_a_larger_one() -> None:
    sizes = GraphSizes((1, 8, 32), (2, 4, 16), largest=20)
    assert sizes.choose(3) == 8
    assert sizes.choose(8) == 8
    assert sizes.choose(9) == 20  # 32 is above the most there is
    assert sizes.choose(20) == 20


def test_a_size_that_fits_better_comes_when_it_has_been_missed_often() -> None:
    sizes = GraphSizes((8, 32), (4, 16), largest=32, patience=3)
    assert [sizes.choose(3) for _ in range(5)] == [8, 8, 8, 4, 4]
    assert sizes.choose(5) == 8
    assert sizes.choose(2) == 4


def test_a_larger_recorded_size_serves_until_then() -> None:
    sizes = GraphSizes((8, 32), (), largest=32, patience=2)
    assert sizes.choose(30) == 32
    assert [sizes.choose(1) for _ in range(3)] == [32, 8, 8]


def test_sizes_are_prepared_from_the_one_that_fits_downwards() -> None:
    sizes = GraphSizes((1, 8, 32, 64), (16, 48), largest=100)
    assert sizes.to_prepare(40) == [48, 32, 8, 1]
    assert sizes.to_prepare(10_000) == [100, 64, 32, 8, 1]
    assert sizes.to_prepare(1) == [1]


def test_after_the_preparation_a_finer_size_is_noted_and_not_captured() -> None:
    sizes = GraphSizes((8, 32), (4, 16), largest=32, patience=3)
    for size in (32, 8):
        sizes.add(size)
    sizes.freeze()
    assert [sizes.choose(3) for _ in range(5)] == [8] * 5
    assert [sizes.choose(9) for _ in range(5)] == [32] * 5
    assert sizes.missing == [4, 16]
    sizes.add(4)
    assert sizes.missing == [16]
    assert sizes.choose(3) == 4


def test_a_batch_larger_than_everything_prepared_is_captured_at_once() -> None:
    sizes = GraphSizes((8, 32), (), largest=32)
    sizes.add(8)
    sizes.freeze()
    assert sizes.choose(20) == 32


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str]]:
    """Records what would be captured on a GPU, and in which thread."""
    seen: list[tuple[str, int, str]] = []

    def recording(name: str) -> Any:
        def prepare(self: Any, size: int) -> None:
            seen.append((name, size, threading.current_thread().name))
            self.sizes.add(size)

        return prepare

    monkeypatch.setattr(DecodeBatch, "prepare", recording("decode"))
    monkeypatch.setattr(Prefiller, "prepare", recording("prefill"))
    return seen


def test_an_engine_prepares_in_its_thread_and_refines_while_it_is_idle(captured: list[tuple[str, int, str]]) -> None:
    async def work(engine: Any) -> None:
        assert isinstance(engine, PreparedEngine)
        engine._prepare_s = 60.0  # as on a GPU
        assert engine.prepare(20) > 0
        assert [(kind, size) for kind, size, _ in captured] == [
            ("decode", 24), ("prefill", 700), ("decode", 8), ("prefill", 512), ("decode", 1), ("prefill", 256), ("prefill", 64),
        ]  # fmt: skip
        assert {name for *_, name in captured} == {"agentfly-engine"}
        captured.clear()
        engine._scheduler._decode.sizes.missing.append(4)
        await ask(engine, prompt_of(9), max_tokens=2)
        await until(lambda: captured)
        assert captured == [("decode", 4, "agentfly-engine")]
        assert not engine._scheduler.wants_capture

    run(work, cache="pages", kv_tokens=1024, max_batch=24, max_step_tokens=700)


def test_an_idle_engine_captures_one_graph_and_the_next_after_it_has_worked(captured: list[tuple[str, int, str]]) -> None:
    async def work(engine: Any) -> None:
        engine._scheduler._decode.sizes.missing += [4, 2]
        await ask(engine, prompt_of(9), max_tokens=2)
        await until(lambda: captured)
        await asyncio.sleep(5 * QUIET_S)
        assert [size for _, size, _ in captured] == [4]
        await ask(engine, prompt_of(9), max_tokens=2)
        await until(lambda: len(captured) == 2)
        assert [size for _, size, _ in captured] == [4, 2]

    run(work, cache="pages", kv_tokens=1024, max_batch=24)


def test_the_preparation_ends_at_its_limit(captured: list[tuple[str, int, str]]) -> None:
    async def work(engine: Any) -> None:
        engine._prepare_s = 1e-9
        engine.prepare()
        assert captured == []

    run(work, cache="pages", kv_tokens=1024)


def test_without_a_gpu_there_is_nothing_to_prepare(captured: list[tuple[str, int, str]]) -> None:
    async def work(engine: Any) -> None:
        assert engine.prepare() == 0.0
        assert engine._thread is None

    for cache in ("slots", "pages"):
        run(work, cache=cache, kv_tokens=1024)
    assert captured == []


def test_an_engine_that_fails_while_it_prepares_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, size: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(DecodeBatch, "prepare", fail)

    async def work(engine: Any) -> None:
        engine._prepare_s = 60.0
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.prepare()
        with pytest.raises(EngineError, match="out of memory"):
            await ask(engine, prompt_of(9), max_tokens=2)

    run(work, cache="pages", kv_tokens=1024)
