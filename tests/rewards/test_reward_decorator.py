"""`@reward`: what a function may ask for, what it may return, and who is to blame when it does not."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from typing import Any

import numpy
import pytest

from agentfly import plugins, reward
from agentfly.aio import stalls
from agentfly.errors import ConfigError, DeadlineError, EngineError, RewardError, UnknownName, WorldError
from agentfly.rewards import FunctionReward, Reward, Score, as_reward, factory, function


def score(thing: Any, trajectory: Any, env: Any = None) -> Score:
    return asyncio.run(as_reward(thing).score(trajectory, env))


def test_bare_and_with_options_both_make_a_reward() -> None:
    @reward
    def bare(prediction: str) -> float:
        """Says something.

        And more.
        """
        return 1.0

    @reward(name="other", weight=0.5)
    def called(prediction: str) -> float:
        return 1.0

    assert isinstance(bare, Reward)
    assert isinstance(called, Reward)
    assert (bare.name, called.name, called.weight) == ("bare", "other", 0.5)
    assert bare.description == "Says something."
    assert bare("anything") == 1.0


def test_a_function_gets_what_it_names_and_nothing_else(chain: Any) -> None:
    seen: dict[str, Any] = {}

    @reward
    def greedy(prediction, trajectory, task, env, answer, hint="none", *, level=3):  # type: ignore[no-untyped-def]
        seen.update(locals())
        return 1

    trajectory = chain("84", answer="84", unused=1, level=9)
    score(greedy, trajectory, env="the env")
    seen.pop("seen", None)
    assert seen == {
        "prediction": "84", "trajectory": trajectory, "task": trajectory.task, "env": "the env", "answer": "84",
        "hint": "none", "level": 9,
    }  # fmt: skip


def test_double_star_takes_the_fields_that_are_left(chain: Any) -> None:
    @reward
    def rest(prediction: str, answer: str, **fields: Any) -> float:
        return float(fields == {"hint": "x", "level": 2})

    assert score(rest, chain("84", answer="84", hint="x", level=2)).reward == 1.0
    assert rest.needs == {"answer"}


def test_needs_are_the_fields_without_a_default() -> None:
    @reward
    def asks(prediction: str, answer: str, unit: str, hint: str = "") -> float:
        return 0.0

    assert asks.needs == {"answer", "unit"}
    asks.check({"answer", "unit", "question"})
    with pytest.raises(ConfigError, match=r"'asks' asks for 'answer', .* did you mean 'answers'\?"):
        asks.check({"answers", "unit"})


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda *parts: 0.0, r"takes \*parts"),
        (lambda predicton: 0.0, "did you mean 'prediction'"),
        (lambda trajectorys: 0.0, "did you mean 'trajectory'"),
        (lambda envs: 0.0, "did you mean 'env'"),
        (lambda x, /: 0.0, "positional-only"),
        (lambda self, prediction: 0.0, "inside a class"),
    ],
)
def test_what_can_never_be_filled_is_refused_at_decoration(function: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        reward(name="odd")(function)


def test_a_near_miss_with_a_default_is_a_field_like_any_other(chain: Any) -> None:
    assert score(lambda predictions=0.25: predictions, chain(predictions=0.75)).reward == 0.75


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (0.5, 0.5), (True, 1.0), (2, 2.0), (numpy.float32(0.5), 0.5), (numpy.bool_(True), 1.0), (numpy.array(0.25), 0.25),
        (Score(0.75), 0.75), ({"reward": -1}, -1.0),
    ],
)  # fmt: skip
def test_numbers_of_every_kind_are_scores(chain: Any, returned: Any, expected: float) -> None:
    assert score(lambda: returned, chain()).reward == expected


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (math.nan, "returned nan; a reward is a finite number"),
        (-math.inf, "returned -inf"),
        (10**400, "returned inf"),
        ("1.0", r"returned '1.0' \(str\)"),
        (None, "returned None"),
        (1j, "complex"),
        ([1.0], "list"),
        (numpy.array([1.0]), "ndarray"),
        ({}, "without the key 'reward'"),
        ({"score": 1.0}, "it has 'score'"),
        ({"reward": None}, "'reward' = None"),
        ({"reward": 1.0, "exact": math.nan}, "component 'exact' = nan"),
        ({"reward": 1.0, 3: 1.0}, "component named 3"),
        ({"reward": 1.0, "turn_rewards": [1.0]}, "1 turn_rewards, but the chain has 2 turns"),
        ({"reward": 1.0, "turn_rewards": 1.0}, "turn_rewards of type float"),
        ({"reward": 1.0, "turn_rewards": [1.0, "x"]}, r"turn_rewards\[1\] = 'x'"),
    ],
)
def test_anything_else_is_one_sentence_with_the_reward_the_task_and_what_came(chain: Any, returned: Any, sentence: str) -> None:
    with pytest.raises(RewardError, match=sentence) as caught:
        score(reward(name="odd")(lambda: returned), chain(replies=("a", "b")))
    assert str(caught.value).startswith("reward 'odd' on task 't7' ")
    assert "\n" not in str(caught.value)


def test_components_and_turn_rewards_come_through(chain: Any) -> None:
    @reward(name="exact")
    def exact() -> dict[str, Any]:
        return {"reward": 0.5, "format": True, "turn_rewards": [0, 0.25]}

    assert score(exact, chain(replies=("a", "b"))) == Score(0.5, {"exact": 0.5, "format": 1.0}, (0.0, 0.25))


def test_a_weight_scales_the_reward_but_not_the_component(chain: Any) -> None:
    @reward(name="exact", weight=0.2)
    def exact() -> dict[str, Any]:
        return {"reward": 1.0, "turn_rewards": [5.0]}

    assert score(exact, chain()) == Score(0.2, {"exact": 1.0}, (1.0,))


def test_async_functions_and_functions_that_return_awaitables_are_awaited(chain: Any) -> None:
    async def slow(prediction: str) -> float:
        await asyncio.sleep(0)
        return float(prediction == "84")

    assert score(slow, chain("84")).reward == 1.0
    assert score(lambda prediction: slow(prediction), chain("84")).reward == 1.0


def test_a_sync_reward_runs_inline_and_a_threaded_one_does_not(chain: Any) -> None:
    def where() -> float:
        return float(threading.current_thread() is threading.main_thread())

    assert score(where, chain()).reward == 1.0
    assert score(reward(name="where", thread=True)(where), chain()).reward == 0.0


def test_a_sync_reward_with_a_deadline_runs_in_a_thread_and_is_stopped(chain: Any) -> None:
    began = threading.Event()

    @reward(timeout_s=0.2)
    def hangs() -> float:
        began.set()
        while True:
            time.sleep(0.001)

    async def both() -> int:
        scoring = asyncio.ensure_future(hangs.score(chain()))
        turns = 0
        while not scoring.done():  # the loop goes on meanwhile
            await asyncio.sleep(0.001)
            turns += 1
        with pytest.raises(DeadlineError, match=r"'hangs' on task 't7' took longer than 0\.2 s"):
            await scoring
        return turns

    assert asyncio.run(both()) > 1
    assert began.is_set()
    assert reward(name="sixty", timeout_s=60.0)(lambda: 1.0).thread
    assert not reward(name="default")(lambda: 1.0).thread
    assert not reward(name="none", timeout_s=None)(lambda: 1.0).thread


def test_a_wait_for_a_thread_does_not_count_as_time_of_the_reward(chain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function, "MAX_THREADS", 1)
    release = threading.Event()

    @reward(timeout_s=60)
    def waits() -> float:
        return float(release.wait(60))

    @reward(timeout_s=0.05)
    def quick() -> float:
        return 1.0

    async def both() -> float:
        first = asyncio.ensure_future(waits.score(chain()))
        second = asyncio.ensure_future(quick.score(chain()))
        await asyncio.sleep(0.2)
        release.set()
        return (await first).reward + (await second).reward

    assert asyncio.run(both()) == 2.0


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_reward_that_holds_up_the_loop_is_named(chain: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any, kind: str) -> None:
    monkeypatch.setattr(stalls, "LOOK_S", 0.01)
    monkeypatch.setattr(function, "stalls", stalls.StallWatch())

    def sleeps() -> float:
        until = time.monotonic() + 60
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
        return 1.0

    async def waits_and_sleeps() -> float:
        await asyncio.sleep(0)
        return sleeps()

    held = reward(name="sleeps")(sleeps if kind == "sync" else waits_and_sleeps)
    assert score(held, chain()).reward == 1.0
    assert caplog.messages[0].startswith("reward 'sleeps' on task 't7' has held up the event loop for ")


def test_a_threaded_reward_leaves_the_loop_to_others(chain: Any) -> None:
    released = threading.Event()

    @reward(thread=True)
    def waits() -> float:
        return float(released.wait(timeout=20))

    async def both() -> float:
        scoring = asyncio.ensure_future(waits.score(chain()))
        await asyncio.sleep(0)
        released.set()
        return (await scoring).reward

    assert asyncio.run(both()) == 1.0


def test_a_reward_past_its_deadline_is_the_worlds_failure(chain: Any) -> None:
    @reward(timeout_s=0.01)
    async def forever() -> float:
        await asyncio.sleep(60)
        return 1.0

    @reward(thread=True, timeout_s=0.01)
    def blocked() -> float:
        time.sleep(1)
        return 1.0

    for late in (forever, blocked):
        with pytest.raises(DeadlineError, match=r"on task 't7' took longer than 0\.01 s"):
            score(late, chain())


def test_a_timeout_of_the_functions_own_is_not_ours(chain: Any) -> None:
    @reward
    async def own() -> float:
        raise TimeoutError("my server")

    with pytest.raises(RewardError, match="raised TimeoutError: my server"):
        score(own, chain())


def test_an_exception_stops_the_run_but_the_worlds_failures_pass(chain: Any) -> None:
    def fail(error: Exception) -> Any:
        def raises() -> float:
            raise error

        return raises

    with pytest.raises(RewardError, match="reward 'raises' on task 't7' raised KeyError: 'x'") as caught:
        score(fail(KeyError("x")), chain())
    assert isinstance(caught.value.__cause__, KeyError)
    for passed in (WorldError("down"), EngineError("gone"), ConfigError("wrong")):
        with pytest.raises(type(passed)) as caught_same:
            score(fail(passed), chain())
        assert caught_same.value is passed


def test_an_exception_in_a_thread_is_the_rewards_too(chain: Any) -> None:
    @reward(thread=True)
    def exits() -> float:
        raise SystemExit(3)

    with pytest.raises(RewardError, match="SystemExit: 3"):
        score(exits, chain())


def test_a_row_without_the_field_is_named(chain: Any) -> None:
    with pytest.raises(RewardError, match="on task 't7' needs the field 'answer'"):
        score(lambda answer: 1.0, chain())


@pytest.mark.parametrize("weight", [math.nan, math.inf, "0.5", None, True])
def test_a_weight_must_be_a_finite_number(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight must be a finite number"):
        reward(name="odd", weight=weight)(lambda: 1.0)


def test_thread_is_not_for_async_functions() -> None:
    async def slow() -> float:
        return 1.0

    with pytest.raises(ConfigError, match="thread=True is for functions that block"):
        reward(thread=True)(slow)


def test_a_decorated_reward_is_known_by_name_and_the_newest_wins() -> None:
    first = reward(name="mine")(lambda: 1.0)
    assert as_reward("mine") is first
    second = reward(name="mine")(lambda: 0.0)
    assert as_reward("mine") is second


def test_as_reward_takes_every_way_to_say_one(chain: Any, tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def half(prediction):\n    return 0.5\n")
    assert score(f"{file}:half", chain()).reward == 0.5
    assert score("agentfly.rewards.answers:exact_match", chain("84", answer="84")).reward == 1.0
    assert score([lambda: 0.5, "exact_match"], chain("84", answer="84")).reward == 1.5
    mixed = score({"exact_match": 0.8, "length": {"weight": 0.2, "max_tokens": 1, "buffer": 1}}, chain("84", answer="84"))
    assert mixed.reward == pytest.approx(0.6)
    assert mixed.components == {"exact_match": 1.0, "length": -1.0, "length/tokens": 3.0}


@pytest.mark.parametrize(
    ("thing", "sentence"),
    [
        ([], "empty list"),
        ({}, "empty list"),
        (3.0, "not a reward: float 3.0"),
        (None, "not a reward"),
        (Score, "not a reward: Score"),
        ({"exact_match": "high"}, "weight must be a number, not 'high'"),
        ({"exact_match": {"weigth": 1.0}}, "has no option 'weigth'"),
        ({"length": {"tokens": 5}}, "its options are max_tokens, buffer"),
        ("judge", "missing a required argument: 'engine'"),
    ],
)
def test_what_is_no_reward_is_refused_with_a_sentence(thing: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        as_reward(thing)


def test_an_unknown_name_says_what_was_meant() -> None:
    with pytest.raises(UnknownName, match="'exact_match'"):
        as_reward("exact_mach")


def test_every_built_in_reward_has_a_name_and_a_description() -> None:
    for name in plugins.BUILTIN["rewards"]:
        thing = plugins.resolve("rewards", name)
        assert thing.name == name
        assert thing.description.endswith(".")


def test_a_factory_of_ones_own_takes_options_from_a_table(chain: Any) -> None:
    @factory("constant")
    def constant(value: float = 0.5) -> Reward:
        """Always the same."""
        return FunctionReward(lambda: value, name="constant")

    plugins.register("rewards", "constant", constant)
    assert score("constant", chain()).reward == 0.5
    two = {"constant": {"value": 0.25, "name": "quarter"}, constant: {"value": 2.0, "weight": 0.5}}
    assert score(two, chain()) == Score(1.25, {"quarter": 0.25, "constant": 2.0})
