"""The parts of a step add up to its time, whatever overlaps, and a lost second is found."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentfly.rollout.activity import PHASES
from agentfly.training import breakdown as module
from agentfly.training.breakdown import SPANS, Breakdown, Span, Stalls
from agentfly.watch.metrics import unknown
from agentfly.watch.profile import PARTS


class World:
    """A clock that is turned by hand, and the counters of the engine, of the chains and of the store's writer."""

    def __init__(self, **stats: float) -> None:
        self.now = 100.0
        self.stats = stats
        self.waits, self.cpu = dict.fromkeys(PHASES, 0.0), dict.fromkeys(PHASES, 0.0)
        self.writer = SimpleNamespace(busy_s=0.0, waited_s=0.0)

    def read(self) -> tuple[dict[str, float], dict[str, float]]:
        return dict(self.waits), dict(self.cpu)

    def breakdown(self) -> Breakdown:
        made = Breakdown(lambda: dict(self.stats), self.writer)
        made.activities = self  # type: ignore[assignment]
        made.begin()
        return made

    def pass_time(self, seconds: float, *, cpu: float = 0.0, store: float = 0.0, **moved: float) -> None:
        """`moved` are counters of the engine or phases of the chains."""
        self.now += seconds
        self.cpu["host"] += cpu
        self.writer.waited_s += store
        for name, value in moved.items():
            counters = self.waits if name in self.waits else self.stats
            counters[name] += value


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(prefill_s=5.0, decode_s=7.0, host_s=1.0, prepared_s=2.0)
    monkeypatch.setattr(module, "perf_counter", lambda: made.now)
    return made


def parts_of(metrics: dict[str, float]) -> dict[str, float]:
    """The parts that are not 0."""
    return {name: metrics[metric] for name, metric in PARTS.items() if round(metrics.get(metric, 0.0), 9)}


def test_a_step_in_turn_is_divided_by_what_was_waited_for(world: World) -> None:
    breakdown = world.breakdown()
    with breakdown.span("rollout"):
        world.pass_time(
            2.0, prefill_s=0.2, decode_s=0.6, host_s=0.1, cpu=0.2, sampling=1.2, tools=0.4, environment=0.1, scoring=0.05
        )
        with breakdown.span("store"):
            world.pass_time(0.125)
    with breakdown.span("learn"):
        world.pass_time(1.0, cpu=0.5)
    with breakdown.span("publish"):
        world.pass_time(0.25)
    world.pass_time(0.5, cpu=0.5)
    metrics = breakdown.end_step()
    assert parts_of(metrics) == pytest.approx(
        {
            "prefill": 0.2, "decode": 0.6, "tools": 0.4, "environments": 0.1, "scoring": 0.05, "host": 0.3 + 0.5,
            "store": 0.125, "learn": 1.0, "publish": 0.25, "idle": 0.35,
        }
    )  # fmt: skip
    assert metrics["time/step_s"] == pytest.approx(3.875)
    assert metrics["time/rollout_s"] == pytest.approx(2.125)
    assert metrics["device/busy_share"] == pytest.approx((0.8 + 1.0) / 3.875)
    assert metrics["time/overlap_s"] == 0.0
    assert not unknown(metrics)


def test_sampling_beside_learning_is_not_counted_twice(world: World) -> None:
    breakdown = world.breakdown()
    with breakdown.span("learn"):
        world.pass_time(1.0, decode_s=0.7, prefill_s=0.1, tools=0.1, sampling=0.9)
    with breakdown.span("rollout"):
        world.pass_time(0.5, decode_s=0.3, sampling=0.3, tools=0.2)
    metrics = breakdown.end_step()
    assert parts_of(metrics) == pytest.approx({"learn": 1.0, "decode": 0.3, "tools": 0.2})
    assert metrics["time/overlap_s"] == pytest.approx(0.8)
    assert metrics["device/busy_share"] == pytest.approx(1.3 / 1.5)


def test_validation_is_one_part_and_its_tokens_are_not_those_of_the_rollout(world: World) -> None:
    breakdown = world.breakdown()
    with breakdown.span("validate"):
        world.pass_time(2.0, decode_s=1.5, tools=0.5)
    metrics = breakdown.end_step()
    assert parts_of(metrics) == {"validate": 2.0}
    assert metrics["device/busy_share"] == pytest.approx(0.75)


def test_what_comes_before_the_first_step_is_dropped_and_what_comes_after_a_step_is_of_the_next(world: World) -> None:
    breakdown = world.breakdown()
    with breakdown.span("validate"):
        world.pass_time(9.0)
    breakdown.begin()
    with breakdown.span("learn"):
        world.pass_time(1.0)
    assert parts_of(breakdown.end_step()) == {"learn": 1.0}
    with breakdown.span("save"):
        world.pass_time(3.0)
    with breakdown.span("learn"):
        world.pass_time(1.0)
        assert breakdown.seconds("learn") == 1.0
    second = breakdown.end_step()
    assert parts_of(second) == {"learn": 1.0, "save": 3.0}
    assert second["time/step_s"] == 4.0
    assert "time/validate_s" not in second


def test_an_engine_that_does_not_say_what_it_computes_has_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(busy_s=1.0)
    monkeypatch.setattr(module, "perf_counter", lambda: world.now)
    breakdown = world.breakdown()
    with breakdown.span("rollout"):
        world.pass_time(1.0, sampling=0.6, tools=0.3, cpu=0.05)
    metrics = breakdown.end_step()
    assert parts_of(metrics) == pytest.approx({"sampling": 0.6, "tools": 0.3, "host": 0.05, "idle": 0.05})
    assert "device/busy_share" not in metrics
    assert "time/decode_s" not in metrics


def test_prefill_and_decode_that_ran_at_once_share_the_time(world: World) -> None:
    breakdown = world.breakdown()
    with breakdown.span("rollout"):
        world.pass_time(1.0, prefill_s=0.5, decode_s=1.5)
    metrics = breakdown.end_step()
    assert parts_of(metrics) == pytest.approx({"prefill": 0.25, "decode": 0.75})
    assert metrics["device/busy_share"] == 1.0


def test_waiting_for_a_full_queue_of_the_store_counts_as_store(world: World) -> None:
    breakdown = world.breakdown()
    with breakdown.span("rollout"):
        world.pass_time(1.0, store=0.4, decode_s=0.5)
        world.writer.busy_s += 3.0
    metrics = breakdown.end_step()
    assert parts_of(metrics) == pytest.approx({"decode": 0.5, "store": 0.4, "idle": 0.1})
    assert metrics["time/store_thread_s"] == 3.0


def test_of_spans_that_overlap_the_first_in_order_gets_the_time(world: World) -> None:
    breakdown = world.breakdown()
    entered, leave = threading.Event(), threading.Event()

    def learn() -> None:
        with breakdown.span("learn"):
            entered.set()
            leave.wait(30)

    thread = threading.Thread(target=learn)
    with breakdown.span("validate"):
        world.pass_time(1.0)
        thread.start()
        assert entered.wait(30)
        world.pass_time(2.0)
    world.pass_time(3.0)
    leave.set()
    thread.join()
    assert parts_of(breakdown.end_step()) == {"validate": 1.0, "learn": 5.0}


Moves = st.tuples(
    st.sampled_from([*SPANS, None, "end"]),
    st.floats(0, 5),
    st.fixed_dictionaries(
        {name: st.floats(0, 8) for name in ("prefill_s", "decode_s", "host_s", "prepared_s", "sampling", "tools", "scoring")}
    ),
    st.floats(0, 5),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(Moves, max_size=12), st.lists(st.sampled_from(SPANS), max_size=3))
def test_the_parts_always_add_up_to_the_step(moves: list[Any], outer: list[Span]) -> None:
    world = World(prefill_s=0.0, decode_s=0.0, host_s=0.0, prepared_s=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "perf_counter", lambda: world.now)
        breakdown = world.breakdown()
        spans = [breakdown.span(name) for name in outer]  # open over several steps
        for span in spans:
            span.__enter__()
        for name, seconds, moved, cpu in [*moves, ("end", 0.0, {}, 0.0)]:
            if name == "end":
                metrics = breakdown.end_step(tokens=cpu)
                shares = [metrics[metric] for metric in PARTS.values() if metric in metrics]
                assert min(shares) >= 0
                assert sum(shares) == pytest.approx(metrics["time/step_s"], abs=1e-9)
                assert 0 <= metrics["device/busy_share"] <= 1
                assert 0 <= metrics["time/stalls_s"] <= metrics["time/step_s"] + 1e-9
            elif name is None:
                world.pass_time(seconds, cpu=cpu, **moved)
            else:
                with breakdown.span(name):
                    world.pass_time(seconds, cpu=cpu, **moved)
        for span in reversed(spans):
            span.__exit__(None, None, None)


# ---- stalls --------------------------------------------------------------------------------------------------------------


def lost(*steps: tuple[float, float, float]) -> list[float]:
    """What each step lost, after two steps of any length and six of one second and 100 tokens."""
    stalls = Stalls()
    assert [stalls.add(60.0, 50.0, 1.0), stalls.add(9.0, 0.0, 1.0)] == [0.0, 0.0]
    assert [stalls.add(1.0, 0.0, 100.0) for _ in range(6)] == [0.0] * 6
    return [round(stalls.add(*step), 9) for step in steps]


def test_seconds_of_compiling_are_lost_as_far_as_the_step_is_longer_for_them() -> None:
    assert lost((1.8, 0.8, 100.0)) == [0.8]
    assert lost((1.0, 0.9, 100.0)) == [0.0]  # compiled in the background
    assert lost((1.3, 0.9, 100.0)) == [0.3]


def test_seconds_beyond_twice_the_median_are_lost() -> None:
    assert lost((1.9, 0.0, 100.0), (2.5, 0.0, 100.0), (4.0, 0.5, 100.0)) == [0.0, 0.5, 0.5 + 1.5]


def test_a_step_with_longer_replies_may_take_longer() -> None:
    assert lost((2.9, 0.0, 300.0), (2.9, 0.0, 50.0)) == [0.0, 0.9]


def test_compiling_in_the_third_step_is_lost() -> None:
    stalls = Stalls()
    assert [stalls.add(*step) for step in ((9.0, 8.0, 1.0), (1.0, 0.0, 1.0), (3.0, 2.0, 1.0), (1.0, 0.0, 1.0))] == [
        0,
        0,
        2.0,
        0,
    ]


def test_time_that_tools_and_validation_took_is_not_lost(world: World) -> None:
    breakdown = world.breakdown()
    for _ in range(6):
        with breakdown.span("learn"):
            world.pass_time(1.0)
        breakdown.end_step(100)
    with breakdown.span("learn"):
        world.pass_time(1.0)
    with breakdown.span("rollout"):
        world.pass_time(8.0, tools=8.0)
    with breakdown.span("validate"):
        world.pass_time(8.0)
    assert breakdown.end_step(100)["time/stalls_s"] == 0.0
    with breakdown.span("learn"):
        world.pass_time(5.0)
    assert breakdown.end_step(100)["time/stalls_s"] == pytest.approx(3.0)
