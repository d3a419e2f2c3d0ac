"""The environment, its tools and rewards, as a chain uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from agentfly.agents.react import ReactAgent
from agentfly.envs.alfworld.engine import State
from agentfly.envs.alfworld.env import AlfWorld
from agentfly.envs.alfworld.oracle import plan
from agentfly.envs.alfworld.tasks import easy_alfworld_tasks, open_game
from agentfly.envs.check import check_env
from agentfly.errors import ConfigError, WorldError
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Outcome, Task, Trajectory
from tests.envs.alfworld.house import problem

TOOLS = ["alfworld_step", "alfworld_get_admissible_commands", "alfworld_get_task_objective", "alfworld_reset"]
ROW = next(row for row in easy_alfworld_tasks("test", 50) if row["kind"] == "pick_clean_then_place_in_recep")
WON = plan(State(open_game(ROW))) or []


def act(action: str) -> str:
    return f'Thought: go on\nAction: alfworld_step\nInput: {{"action": "{action}"}}'


def call(name: str) -> str:
    return f"Thought: ask\nAction: {name}\nInput: {{}}"


def chain(replies: Sequence[str], reward: Any = "alfworld_success", row: Any = ROW) -> Trajectory:
    """One chain that replies as it is told to."""
    agent = ReactAgent(
        ScriptedEngine(list(replies)),
        tools=TOOLS,
        reward=reward,
        renderer=ByteRenderer(),
        max_turns=20,
        sampling={"max_tokens": 200_000},
    )
    return agent.run_sync([row]).trajectories[0]


def observations(trajectory: Trajectory) -> list[str]:
    return [result.observation for turn in trajectory.turns for result in turn.results]


def test_the_world_passes_the_conformance_kit() -> None:
    report = check_env("alfworld", **AlfWorld.conformance())
    assert report.complete, str(report)


def test_a_chain_that_does_the_task_ends_by_itself_with_full_reward() -> None:
    trajectory = chain([act(command) for command in WON])
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 1.0)
    assert len(trajectory.turns) == len(WON)
    assert trajectory.components == {"alfworld_success": 1.0, "progress": 1.0, "idle": 0.0}


def test_the_share_of_actions_to_which_nothing_happened_is_told() -> None:
    trajectory = chain([act("dance"), act(WON[0]), act("go to narnia 1"), act("look"), "Thought: tired\nAnswer: no"])
    assert trajectory.components["idle"] == 0.5


def test_saying_that_it_is_done_earns_nothing() -> None:
    trajectory = chain(["Thought: easy\nAnswer: done"])
    assert (trajectory.outcome, trajectory.reward) == (Outcome.FINISHED, 0.0)


def test_progress_is_the_farthest_that_was_reached() -> None:
    """A thing in hand, clean, put down: three stages. Putting it back does not undo what was reached."""
    took = next(at for at, command in enumerate(WON) if command.startswith("take "))
    thing, place = WON[took].removeprefix("take ").split(" from ")
    there_and_back = [*WON[: took + 1], f"move {thing} to {place}"]
    trajectory = chain([*map(act, there_and_back), "Thought: tired\nAnswer: no"], reward={"alfworld_progress": 0.5})
    assert trajectory.components["alfworld_progress"] == pytest.approx(1 / 3)
    assert trajectory.reward == pytest.approx(1 / 6)
    trajectory = chain([*map(act, WON[:-1]), "Thought: tired\nAnswer: no"], reward="alfworld_progress")
    assert trajectory.reward == pytest.approx(2 / 3)


def test_what_lies_in_place_already_is_no_progress() -> None:
    row = next(row for row in easy_alfworld_tasks("test", 80) if row["kind"] == "pick_two_obj_and_place")
    assert State(open_game(row)).progress() == 0.5
    assert chain([act("inventory"), "Thought: tired\nAnswer: no"], reward="alfworld_progress", row=row).reward == 0.0


def test_what_was_reached_before_beginning_again_still_counts() -> None:
    async def main() -> None:
        world = AlfWorld()
        await world.reset(Task("t", (), ROW))
        for command in WON[:-1]:
            await world.step(command)
        reached = await world.progress()
        assert 0.0 < reached < 1.0
        await world.restart()
        await world.step("look")
        assert await world.progress() == reached
        await world.reset(Task("t", (), ROW))
        assert await world.progress() == 0.0

    asyncio.run(main())


def test_a_game_that_is_won_at_its_start_is_over_after_the_first_move() -> None:
    won = problem().replace("(inReceptacle Mug_bar_1 Desk_bar_1)", "(inReceptacle Mug_bar_1 Shelf_bar_1)")

    async def main() -> None:
        world = AlfWorld()
        await world.reset(Task("t", (), {"pddl_problem": won}))
        assert world.state.is_goal()
        assert not (await world.step("look")).done  # as in the original: looking around changes nothing
        assert (await world.step("go to desk 1")).done
        assert (await world.score(), await world.progress()) == (1.0, 1.0)

    asyncio.run(main())


def test_the_other_tools_tell_what_is_possible_and_begin_again() -> None:
    game = open_game(ROW)
    trajectory = chain([call(TOOLS[2]), call(TOOLS[1]), act(WON[0]), call(TOOLS[3]), call(TOOLS[1]), "Answer: no"])
    objective, first, arrived, again, second = observations(trajectory)
    assert objective == game.objective
    assert first.split("\n") == State(game).admissible() == second.split("\n")
    assert arrived.startswith("You arrive at ")
    assert again == ROW["question"]


def test_calls_after_the_end_in_the_same_turn_are_refused_and_do_not_undo_the_win() -> None:
    last = "\n".join([act(WON[-1]), act("look"), call("alfworld_reset"), call("alfworld_get_admissible_commands")])
    trajectory = chain([*map(act, WON[:-1]), last])
    assert trajectory.reward == 1.0
    assert [result.observation for result in trajectory.turns[-1].results[1:]] == [
        *["The game is over: the task is done, and no action counts any more."] * 2,
        "None: the game is over.",
    ]
    assert trajectory.turns[-1].results[1].invalid


@pytest.mark.parametrize("action", ["x" * 100_000, "\\u0000\\u001b[2J", "", "go to narnia", "\\ud83d\\ude00"])
def test_an_action_that_is_none_gives_nothing_and_the_chain_goes_on(action: str) -> None:
    trajectory = chain([act(action), *map(act, WON)])
    assert observations(trajectory)[0] == "Nothing happens."
    assert trajectory.reward == 1.0


def test_an_argument_that_is_no_text_is_told_to_the_model() -> None:
    trajectory = chain(['Thought: x\nAction: alfworld_step\nInput: {"action": {"go": "desk"}}', "Answer: no"])
    assert trajectory.turns[0].results[0].error == "bad_arguments"


def test_states_have_keys_and_steps_are_counted() -> None:
    async def main() -> None:
        one, other = AlfWorld(), AlfWorld()
        task = Task("t", (), ROW)
        await one.reset(task)
        await other.reset(task)
        assert await one.state_key() == await other.state_key()
        await one.step(WON[0])
        await one.step("dance")
        assert (one.num_steps, one.num_idle) == (2, 1)
        assert await one.state_key() != await other.state_key()
        await one.restart()
        assert (one.num_steps, one.num_idle, await one.state_key()) == (2, 1, await other.state_key())
        for detour in ([WON[0]], ["look", "go to nowhere", WON[0], "inventory", WON[0]]):
            await one.restart()
            for action in detour:
                await one.step(action)
            await other.step(WON[0])
            assert await one.state_key() == await other.state_key(), "two ways to one state"
        await one.close()
        with pytest.raises(WorldError, match="no game of ALFWorld is open"):
            await one.step("look")

    asyncio.run(main())


def test_an_unknown_game_stops_the_run_with_a_sentence() -> None:
    with pytest.raises(ConfigError, match="unknown game 'narnia'"):
        chain([act("look")], row={**ROW, "game": "narnia"})


def test_it_can_live_in_a_worker_process() -> None:
    agent = ReactAgent(
        ScriptedEngine([act(command) for command in WON]),
        tools=["alfworld_step"],
        reward="alfworld_success",
        renderer=ByteRenderer(),
        max_turns=20,
        resources={"pools": {"AlfWorld": {"placement": "process", "max": 1}}},
    )
    assert agent.run_sync([ROW]).rewards == [1.0]
