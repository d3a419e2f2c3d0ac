"""Demonstrations of `gsm8k`: programs made of worked answers, which come to what is published, played as they are written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents.code import CodeAgent
from agentfly.envs.code.gsm8k import gsm8k_tasks
from agentfly.envs.code.gsm8k_demos import gsm8k_demos, program_of, run, written
from agentfly.errors import DataError
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Request, Trajectory
from tests.published import write_gsm8k

REAL = Path(__file__).parents[4] / "shared" / "data" / "math" / "gsm8k_train.jsonl.gz"


@pytest.fixture(autouse=True)
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSM8K_DATA", str(write_gsm8k(tmp_path)))


def program(question: str, worked: str, answer: str) -> str:
    return program_of(written({"question": question, "worked": worked, "answer": answer}))


def play(rows: Sequence[dict[str, Any]]) -> list[Trajectory]:
    """The dialogues again, with the real agent, tool and interpreter; only the replies are given."""
    replies = {row["messages"][0]["content"]: [m["content"] for m in row["messages"][1::2]] for row in rows}

    def reply(request: Request) -> str:
        question = next(message.content for message in request.messages if message.role == "user")
        return replies[question][sum(message.role == "assistant" for message in request.messages)]

    agent = CodeAgent(ScriptedEngine(reply), reward="code_answer", renderer=ByteRenderer(), max_turns=3)
    tasks = [{"id": row["id"], "question": row["messages"][0]["content"], "answer": row["answer"]} for row in rows]
    return agent.run_sync(tasks).trajectories


def assert_played_as_written(rows: Sequence[dict[str, Any]], trajectories: Sequence[Trajectory]) -> None:
    for row, trajectory in zip(rows, trajectories, strict=True):
        assert [{"role": m.role, "content": m.content} for m in trajectory.messages[1:]] == row["messages"]


def test_a_step_becomes_a_line_named_after_the_words_around_it() -> None:
    assert program(
        "Nat sold clips to 48 friends in April, and half as many in May. How many clips in all?",
        "Nat sold 48/2 = <<48/2=24>>24 clips in May.\nIn April and May it was 48+24 = <<48+24=72>>72.",
        "72",
    ) == "clips_may = 48 / 2\napril_may = 48 + clips_may\nprint(april_may)"  # fmt: skip


def test_names_are_never_taken_twice_and_never_words_of_python() -> None:
    assert program(
        "9 and 3?",
        "<<9+3=12>>12 while true\n<<12+3=15>>15 hats\n<<15+3=18>>18 hats\n<<18+3=21>>21 print",
        "21",
    ) == "step_1 = 9 + 3\nhats = step_1 + 3\nhats_2 = hats + 3\nstep_4 = hats_2 + 3\nprint(step_4)"  # fmt: skip


def test_a_number_that_the_question_has_too_is_an_earlier_result_once_at_most() -> None:
    assert program(
        "2 days of 3 hours a week, for 6 weeks: how many hours?",
        "2 * 3 = <<2*3=6>>6 hours a week\n6 * 6 = <<6*6=36>>36 hours in the end",
        "36",
    ) == "hours_week = 2 * 3\nhours = hours_week * 6\nprint(hours)"  # fmt: skip


def test_a_number_that_the_question_has_as_a_word_is_known_too() -> None:
    assert program(
        "Tom gets 12 dollars, spends a third, then a quarter of the rest. What is left of fifteen dollars more?",
        "<<12*1/3=4>>4 dollars spent\n<<12-4=8>>8 dollars\n8 * 1/4 = <<8*1/4=2>>2 more\n8 - 2 + 15 = <<8-2+15=21>>21",
        "21",
    ).splitlines()[2:4] == ["step_3 = dollars * 1 / 4", "step_4 = dollars - step_3 + 15"]  # fmt: skip


def test_of_two_equal_results_the_one_that_is_still_unused_is_meant() -> None:
    assert program(
        "A crate holds 15 bags of 20 kg. There are 60 kg of nails and 10 planks of 30 kg. How much is too much?",
        "<<15*20=300>>300 kg in the crate\n<<10*30=300>>300 kg of planks\n<<60+300=360>>360 kg in all\n<<360-300=60>>60 kg",
        "60",
    ).splitlines()[2:4] == ["kg = 60 + kg_planks", "kg_2 = kg - kg_crate"]  # fmt: skip


@pytest.mark.parametrize(
    ("worked", "answer"),
    [
        ("Two and two are four.", "4"),  # no step is marked
        ("<<2+2=4>>4 hats", "5"),  # something else is published
        ("<<4=4>>4 hats", "4"),  # nothing is computed
        ("<<2*37=74>>74 hats", "74"),  # where is the 37 from?
        ("<<2*11=22>>22 hats", "22"),  # and the 11?
        ("<<2**2=4>>4 hats", "4"),
        ("<<2(2)=4>>4 hats", "4"),
        ("<<3*+=4>>4 hats", "4"),
        ("<<True+3=4>>4 hats", "4"),
        ("<<exit()=4>>4 hats", "4"),
        ("<<4/0=4>>4 hats", "4"),
        ("<<0.1+0.2=0.3>>0.3", "0.3"),  # Python prints 0.30000000000000004
        ("\n".join(f"{n} <<{n}+1={n + 1}>>{n + 1} quite remarkable things" for n in range(1, 20)), "20"),  # too long
    ],
)
def test_a_worked_answer_without_a_program_that_comes_to_the_published_one_is_left_out(worked: str, answer: str) -> None:
    assert not written({"question": "2 and 2?", "worked": worked, "answer": answer})


def test_a_file_without_marked_steps_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "Two and two?", "answer": "Four.\\n#### 4"}\n')
    with pytest.raises(DataError, match="no worked answer of the train file marks its steps"):
        gsm8k_demos(3)


@pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")
def test_good_dialogues_earn_the_reward_and_are_played_as_they_are_written() -> None:
    rows = gsm8k_demos(12, 3)
    trajectories = play(rows)
    assert [trajectory.reward for trajectory in trajectories] == [1.0] * 12
    assert_played_as_written(rows, trajectories)
    assert {row["id"] for row in rows} <= {row["id"] for row in gsm8k_tasks("train")}


@pytest.mark.skipif(os.name != "posix", reason="sessions need a Unix")
def test_dialogues_with_slips_earn_nothing_and_are_played_as_they_are_written() -> None:
    rows = gsm8k_demos(16, 4, mistakes=1.0)
    trajectories = play(rows)
    assert [trajectory.reward for trajectory in trajectories] == [0.0] * 16
    assert_played_as_written(rows, trajectories)
    assert {len(row["messages"]) for row in rows} == {2, 4}, "some guess, and some compute the wrong thing"


def test_the_share_of_slips_is_as_asked_and_the_rest_stays_the_same() -> None:
    good, mixed = gsm8k_demos(45, 5), gsm8k_demos(45, 5, mistakes=0.5)
    assert mixed == gsm8k_demos(45, 5, mistakes=0.5)
    assert 10 < sum(one != other for one, other in zip(good, mixed, strict=True)) < 35
    assert [row["id"] for row in good] == [row["id"] for row in mixed]


def test_beyond_their_number_they_come_again() -> None:
    assert gsm8k_demos(100)[45:90] == gsm8k_demos(45)


@pytest.mark.skipif(not REAL.is_file(), reason=f"no file {REAL}")
def test_real_worked_answers_give_programs_that_python_agrees_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSM8K_DATA", str(REAL))
    tasks = gsm8k_tasks("train")
    programs = [steps for task in tasks if (steps := written(task))]
    assert 0.8 < len(programs) / len(tasks) < 0.9
    for steps in programs[::50]:
        names: dict[str, Any] = {}
        exec("\n".join(step.line for step in steps), {"__builtins__": {}}, names)  # arithmetic alone: `written` saw to it
        assert names[steps[-1].name] == run(steps)
    if os.name == "posix":
        rows = gsm8k_demos(12, 1)
        assert_played_as_written(rows, played := play(rows))
        assert [trajectory.reward for trajectory in played] == [1.0] * 12
