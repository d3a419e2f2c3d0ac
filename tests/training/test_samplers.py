"""What decides which task is drawn next: every order is seeded, complete as it promises, and can be taken up again anywhere."""

from __future__ import annotations

import json
import random
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentfly import plugins
from agentfly.build import build_tasks, held_out_tasks
from agentfly.config import Config
from agentfly.data import DataSettings, load_tasks
from agentfly.errors import ConfigError, DataError
from agentfly.protocols import GroupResult, LearningSampler, TaskSampler
from agentfly.training.draws import TaskDraws
from agentfly.training.idle import without_effect
from agentfly.training.samplers import CurriculumSampler, EpochSampler
from agentfly.types import Task

TASKS = load_tasks([{"question": f"q{i}"} for i in range(7)])
CURRICULUM = DataSettings(sampler="curriculum")


def ids(draws: TaskDraws, count: int) -> list[str]:
    return [draws.draw()[1].id for _ in range(count)]


def result(row: int, successes: Sequence[bool]) -> GroupResult:
    return GroupResult(row, tuple(map(float, successes)), tuple(successes))


def rows_of(sampler: TaskSampler, count: int) -> list[int]:
    return [sampler.draw() for _ in range(count)]


# ---- epochs --------------------------------------------------------------------------------------------------------------


def test_every_task_comes_once_before_any_comes_again() -> None:
    draws = TaskDraws(TASKS, DataSettings(), 3)
    first, second = ids(draws, 7), ids(draws, 7)
    assert sorted(first) == sorted(second) == [str(i) for i in range(7)]
    assert first != second


def test_without_shuffling_the_order_is_the_files() -> None:
    assert ids(TaskDraws(TASKS, DataSettings(shuffle=False), 0), 9) == [*map(str, range(7)), "0", "1"]


@pytest.mark.parametrize("sampler", ["epochs", "curriculum"])
@pytest.mark.parametrize("taken", [0, 3, 7, 12])
def test_restored_draws_go_on_exactly(taken: int, sampler: str) -> None:
    draws, again = (TaskDraws(TASKS, DataSettings(sampler=sampler), 1) for _ in range(2))
    chance = random.Random(0)
    for _ in range(taken):
        row, _ = draws.draw()
        if chance.random() < 0.7:  # else it is in flight when the state is taken
            draws.learn(result(row, [chance.random() < 0.5 for _ in range(4)]))
    assert again.restore(draws.state())
    assert ids(draws, 20) == ids(again, 20)


def test_a_state_of_before_there_were_samplers_is_read() -> None:
    draws, again = TaskDraws(TASKS, DataSettings(), 1), TaskDraws(TASKS, DataSettings(), 1)
    order = ids(draws, 9)
    assert again.restore({"epoch": 1, "position": 2, "rows": draws.state()["rows"]})
    assert ids(again, 20) == ids(draws, 20)
    assert again.task_at(1, 1)[1].id == order[8]
    assert again.task_at(4) == (4, TASKS[4])


@pytest.mark.parametrize("change", ["rows", "seed", "sampler"])
def test_a_state_of_other_rows_is_not_restored(change: str) -> None:
    state = TaskDraws(TASKS, DataSettings(), 1).state()
    rows = TASKS[:5] if change == "rows" else TASKS
    other = TaskDraws(rows, CURRICULUM if change == "sampler" else DataSettings(), 2 if change == "seed" else 1)
    expected = TaskDraws(rows, CURRICULUM if change == "sampler" else DataSettings(), 2 if change == "seed" else 1)
    assert not other.restore(state)
    assert ids(other, 9) == ids(expected, 9)


# ---- curriculum ----------------------------------------------------------------------------------------------------------


def test_rows_of_middling_success_are_drawn_more_and_none_is_forgotten() -> None:
    tasks = load_tasks([{"question": f"q{i}"} for i in range(30)])
    sampler, chance = CurriculumSampler(tasks, 0), random.Random(1)
    counted: Counter[str] = Counter()
    for number in range(3000):
        row = sampler.draw()
        kind = ("solved", "learnable", "impossible")[row % 3]
        sampler.learn(result(row, [chance.random() < {"solved": 1, "learnable": 0.5, "impossible": 0}[kind] for _ in range(4)]))
        counted.update([kind, f"row {row}"] if number >= 300 else [])
    assert counted["learnable"] > 3 * counted["solved"] > 0
    assert counted["learnable"] > 3 * counted["impossible"] > 0
    assert all(counted[f"row {row}"] for row in range(30))


def test_the_weights_of_the_curriculum_are_those_of_its_formula() -> None:
    sampler = CurriculumSampler(TASKS, 0, floor=0.2, prior=0.5, memory=0.5)
    assert sampler._weights[0] == 1.0  # not seen: p is the prior
    sampler.draw()
    sampler.learn(result(3, [True, True, True, False]))
    assert sampler._weights[3] == pytest.approx(0.2 + 0.8 * 4 * 0.7 * 0.3)  # p = 3.5 / 5
    sampler.learn(result(3, [False, False]))
    assert sampler._weights[3] == pytest.approx(0.2 + 0.8 * 4 * 0.4 * 0.6)  # p = (1.5 + 0.5) / (2 + 2 + 1)
    before = list(sampler._weights)
    sampler.learn(result(3, []))  # every chain failed
    assert sampler._weights == before


def test_a_row_in_flight_is_not_drawn_again_unless_all_are() -> None:
    sampler = CurriculumSampler(TASKS, 5)
    assert sorted(rows_of(sampler, 7)) == list(range(7))
    again = sampler.draw()
    sampler.learn(result(2, [True, False]))
    assert sampler.draw() == 2 or again == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"floor": 0.0}, "data.sampler 'curriculum': the option floor must be a number from 0.001 to 1, not 0.0"),
        ({"prior": 2}, "the option prior must be a number from 0 to 1, not 2"),
        ({"flor": 0.1}, "data.sampler does not fit the sampler 'curriculum': got an unexpected keyword argument 'flor'"),
    ],
)
def test_options_that_are_wrong_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TaskDraws(TASKS, DataSettings(sampler={"kind": "curriculum", **options}), 0)
    assert sentence in str(caught.value)


# ---- samplers of the user's ----------------------------------------------------------------------------------------------


class Backwards:
    """The rows from the last to the first, again and again."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        self.last, self.number = len(tasks) - 1, 0

    def draw(self) -> int:
        self.number += 1
        return self.last - (self.number - 1) % (self.last + 1)

    def state(self) -> dict[str, Any]:
        return {"number": self.number}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.number = state["number"]


class Broken(Backwards):
    def draw(self) -> int:
        raise ZeroDivisionError("no rows")


class Beyond(Backwards):
    def draw(self) -> int:
        return 7


class Unsaved(Backwards):
    def state(self) -> dict[str, Any]:
        return {"random": random.Random(0)}


class NoSampler:
    def __init__(self, tasks: Sequence[Task], seed: int) -> None: ...


def test_a_class_a_registered_name_and_a_path_are_the_same_sampler() -> None:
    plugins.register("samplers", "backwards", Backwards)
    state = TaskDraws(TASKS, DataSettings(sampler=Backwards), 0).state()
    for sampler in (Backwards, "backwards", f"{__name__}:Backwards", {"kind": Backwards}):
        draws = TaskDraws(TASKS, DataSettings(sampler=sampler), 0)
        assert ids(draws, 8) == [*map(str, reversed(range(7))), "6"]
        assert draws.restore(state)


def test_a_config_names_a_sampler_that_was_an_object_as_it_can_be_found() -> None:
    config = Config.from_dict({"data": {"train": "arithmetic", "sampler": {"kind": Backwards}}})
    assert config.to_dict()["data"]["sampler"] == {"kind": f"{__name__}:Backwards"}
    again = Config.from_dict(tomllib.loads(config.to_toml()))
    assert ids(TaskDraws(TASKS, again.data, 0), 1) == ["6"]

    class Local(Backwards):
        pass

    lost = Config.from_dict(tomllib.loads(Config.from_dict({"data": {"train": "arithmetic", "sampler": Local}}).to_toml()))
    with pytest.raises(ConfigError, match="was a Python object that no module holds: give it again from Python"):
        TaskDraws(TASKS, lost.data, 0)


@pytest.mark.parametrize(
    ("sampler", "sentence"),
    [
        (Broken, "the sampler 'Broken' failed in draw: ZeroDivisionError: no rows"),
        (Beyond, "the sampler 'Beyond' drew 7, but its rows are 0 to 6"),
        (Unsaved, "the sampler 'Unsaved' failed in encode: NotEncodable"),
        (NoSampler, "data.sampler 'NoSampler' makes no sampler: it needs draw, state and restore"),
        ("curiculum", "no sampler is called 'curiculum'; did you mean 'curriculum'?"),
    ],
)
def test_a_sampler_that_cannot_work_is_one_sentence(sampler: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TaskDraws(TASKS, DataSettings(sampler=sampler), 0).draw()
    assert sentence in str(caught.value)


@pytest.mark.parametrize("sampler", [5, {"floor": 0.1}])
def test_a_sampler_without_a_name_is_refused_by_the_config(sampler: Any) -> None:
    with pytest.raises(ConfigError, match="data.sampler"):
        Config.from_dict({"data": {"sampler": sampler}})


def test_only_the_curriculum_learns() -> None:
    assert isinstance(CurriculumSampler(TASKS, 0), LearningSampler)
    assert not isinstance(EpochSampler(TASKS, 0), LearningSampler)
    assert TaskDraws(TASKS, CURRICULUM, 0).learns
    assert not TaskDraws(TASKS, DataSettings(), 0).learns


# ---- sources -------------------------------------------------------------------------------------------------------------


def sources(**tables: dict[str, Any]) -> Config:
    return Config.from_dict({"data": {"sources": tables}})


ONE, TWO = {"train": "arithmetic", "train_count": 9}, {"train": "one_step_arithmetic", "train_count": 20}


def test_every_source_has_its_share_of_the_draws_and_its_own_order() -> None:
    config = sources(a={**ONE, "weight": 2}, b={**TWO, "sampler": "curriculum"}, c=ONE | {"train": "easy_code"})
    tasks, held = build_tasks(config)
    assert [task.source for task in tasks] == ["a"] * 9 + ["b"] * 20 + ["c"] * 9
    assert {task.fields["source"] for task in held} == {"a", "b", "c"}
    draws = TaskDraws(tasks, config.data, 0)
    drawn = [draws.draw() for _ in range(400)]
    for count in range(1, 401):
        share = Counter(task.source for _, task in drawn[:count])
        assert abs(share["a"] - count / 2) < 1.5
        assert abs(share["b"] - count / 4) < 1.5
    own = [task.id for _, task in drawn if task.source == "a"]
    assert all(len(set(own[i : i + 9])) == 9 for i in range(0, 198, 9))  # each epoch holds every row once
    assert all(tasks[row] is task for row, task in drawn)
    assert draws.describe()[0] == "source a: 50% of the draws, 9 training rows, sampler epochs"


def test_draws_of_sources_go_on_exactly() -> None:
    config = sources(a={**ONE, "weight": 2.5}, b={**TWO, "sampler": "curriculum"})
    tasks = build_tasks(config)[0]
    draws, again = TaskDraws(tasks, config.data, 0), TaskDraws(tasks, config.data, 0)
    for _ in range(13):
        draws.learn(result(draws.draw()[0], [True, False]))
    assert again.restore(draws.state())
    assert ids(again, 50) == ids(draws, 50)


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"sources": {"a": {**ONE, "wieght": 2}}}, "unknown config key 'data.sources.a.wieght'; did you mean 'weight'?"),
        ({"sources": {"a": {**ONE, "sources": {}}}}, "unknown config key 'data.sources.a.sources'; a source has train,"),
        ({"sources": {"a": {"weight": 2}}}, "data.sources.a.train is not set"),
        ({"sources": {"a": {**ONE, "weight": 0}}}, "data.sources.a.weight must be a number above 0, not 0"),
        ({"sources": {"a": {**ONE, "weight": -1}}}, "data.sources.a.weight must be a number above 0, not -1"),
        ({"sources": {"a": {**ONE, "holdout": 3}}}, "data.sources.a.holdout must be a number above 0 and below 1, not 3"),
        ({"sources": {"a/b": ONE}}, "the name of a source has letters, digits, _ and - only"),
        ({"sources": {"a": "arithmetic"}}, "data.sources.a must be a table"),
        ({"sources": {"a": ONE}, "train": "code"}, "data.train and data.sources cannot both be set"),
        ({"sources": {"a": ONE}, "validation": "x.json"}, "data.validation and data.sources cannot both be set"),
    ],
)
def test_a_source_that_is_wrong_is_one_sentence(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_dict({"data": tree})
    assert sentence in str(caught.value)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps(rows))
    return str(path)


def test_rows_without_an_id_get_one_from_their_source_and_a_row_keeps_its_field_source(tmp_path: Path) -> None:
    one = write(tmp_path / "one.json", [{"question": f"one {i}"} for i in range(6)])
    two = write(tmp_path / "two.json", [{"question": f"two {i}", "id": f"x{i}", "source": "web"} for i in range(6)])
    config = sources(one={"train": one}, two={"train": two})
    train, held = build_tasks(config)
    assert {task.id for task in [*train, *held]} == {f"{name}{i}" for name in ("one-", "x") for i in range(6)}
    assert {(task.source, task.fields["source"]) for task in train} == {("one", "one"), ("two", "web")}
    assert [task.source for task in held] == ["one", "two"]
    assert [task.source for task in held_out_tasks(config, "validation")] == ["one"] * 6 + ["two"] * 6  # not trained here


def test_rows_that_two_sources_share_are_refused(tmp_path: Path) -> None:
    rows = [{"question": f"q{i}", "id": f"x{i}"} for i in range(6)]
    one, two = write(tmp_path / "one.json", rows), write(tmp_path / "two.json", [{**row, "answer": "a"} for row in rows])
    with pytest.raises(DataError, match="the sources 'one' and 'two' both have a row with the id 'x"):
        build_tasks(sources(one={"train": one}, two={"train": two}))
    with pytest.raises(ConfigError, match="so its success would measure memory"):
        build_tasks(sources(one={"train": one}, two={"train": two, "validation": one}))
    with pytest.raises(DataError, match="the data set is empty"):
        build_tasks(sources(one={"train": write(tmp_path / "none.json", [])}))
    with pytest.raises(ConfigError, match="data.sources names the rows: give no other data"):
        build_tasks(sources(one={"train": one}), data=rows)


def test_a_config_with_sources_is_written_and_read_again(tmp_path: Any) -> None:
    config = sources(a={**ONE, "weight": 2.5, "sampler": {"kind": "curriculum", "floor": 0.2}}, b=TWO)
    (tmp_path / "config.toml").write_text(config.to_toml())
    assert Config.load(tmp_path / "config.toml") == config
    assert config.data.name == "a+b"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"shuffle": False, "sampler": "curriculum"}, "data.shuffle cannot act: data.sampler chooses the order"),
        ({"sources": {"a": {**ONE, "weight": 2}}}, "the weight of the only source cannot act"),
        (
            {"sampler": "curriculum", "sources": {"a": {**ONE, "sampler": "epochs"}}},
            "data.sampler cannot act: every source has its own sampler",
        ),
        ({"holdout": 0.3, "sources": {"a": {**ONE, "validation": "x.json"}}}, "data.holdout cannot act"),
    ],
)
def test_keys_that_cannot_act_are_named(data: dict[str, Any], words: str) -> None:
    assert [sentence for sentence in without_effect(Config.from_dict({"data": data})) if words in sentence]
    assert not without_effect(Config.from_dict({"data": {"sampler": "curriculum", "sources": {"a": ONE, "b": TWO}}}))
