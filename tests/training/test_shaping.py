"""Examples that leave the prompts, a bonus for a call that falls to 0, and demonstrations that the model makes itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly import Action, Completion, Config, Message, ReactAgent, Task, ToolCall, ToolError, tool
from agentfly.errors import ConfigError, DataError
from agentfly.health import diagnose
from agentfly.rollout import opening_messages
from agentfly.rollout.shaping import CALL_BONUS, call_bonus, left_at, shows_examples
from agentfly.runs import RunStore
from agentfly.training.demonstrations import best_chains, demo_samples
from agentfly.types import ToolResult, Trajectory, Turn
from tests.tiny import ROWS, TwoTurns, even, look, sample_in_float64, save_tiny_model

SHOWN = [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello."}]
SMALL: dict[str, Any] = {
    "num_tasks": 3, "num_chains": 2, "threads": 1, "lr": 1e-2, "validation_count": 2, "validate_every": 2, "save_every": 1,
    "call_bonus": 0.3, "call_bonus_steps": 3,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


class SometimesCalls(TwoTurns):
    """A reply with an even first id calls `look`, any other one calls a tool that does not exist."""

    def parse(self, completion: Completion) -> Action:
        return Action(calls=(ToolCall("look" if completion.token_ids[0] % 2 else "lock"),))


def train(model: Path, folder: Path, name: str = "run", resume: Path | None = None, **options: Any) -> Any:
    agent = SometimesCalls(
        str(model), tools=[look], reward=even, max_turns=2, sampling={"max_tokens": 12}, examples=SHOWN, examples_steps=4
    )
    options = SMALL | options
    return agentfly.train(agent, ROWS, resume=resume, run={"dir": str(folder), "name": name}, **options)


def stored(run: Path, split: str = "train") -> list[Trajectory]:
    with RunStore(run / "run.db", readonly=True) as store:
        return store.trajectories(split=split, limit=9999)


def has_examples(chain: Trajectory) -> bool:
    return any(message.content == "Say hello." for message in chain.messages)


def played(chains: list[Trajectory]) -> dict[str, Any]:
    return {
        chain.id: (chain.messages, [turn.completion.token_ids for turn in chain.turns], chain.components) for chain in chains
    }


def test_the_share_and_the_bonus_fall_in_a_line_from_1_in_the_first_step_to_0() -> None:
    assert [left_at(step, 4) for step in range(1, 7)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    assert left_at(1, 0) == 0.0
    counts = [sum(shows_examples(4, 0, step, place) for place in range(400)) for step in (1, 3, 5)]
    assert counts[0] == 400 and counts[2] == 0 and 160 < counts[1] < 240


def test_prompts_lose_their_examples_a_bonus_falls_and_validation_has_neither(model: Path, tmp_path: Path) -> None:
    result = train(model, tmp_path, steps=5)
    chains = stored(result.directory)
    for chain in chains:
        step, position = (int(number) for number in chain.id[1:].split("-")[:2])
        assert has_examples(chain) == shows_examples(4, 0, step, position)
        bonus = 0.3 * left_at(step, 3)
        calls = any(result.error is None for turn in chain.turns for result in turn.results)
        assert chain.components.get(CALL_BONUS) == (pytest.approx(bonus if calls else 0.0) if bonus else None)
        assert chain.total_reward == pytest.approx(chain.reward + chain.components.get(CALL_BONUS, 0.0))
    assert {has_examples(chain) for chain in chains if chain.id.startswith("t3-")} == {True, False}
    held = stored(result.directory, "validation")
    assert held and not any(has_examples(chain) or CALL_BONUS in chain.components for chain in held)
    assert 0 < result.history[0][f"reward/component/{CALL_BONUS}"] <= 0.3
    examined = diagnose(result.directory).checks
    assert {check.name: check.problems for check in examined if check.problems} == {}
    assert next(check for check in examined if check.name == "rescored").skipped is None


@pytest.mark.parametrize("options", [{}, {"refill": 2}])
def test_a_run_that_was_stopped_and_resumed_plays_the_chains_of_one_that_was_not(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    sample_in_float64(monkeypatch)
    whole = train(model, tmp_path, "whole", steps=4, **options)
    train(model, tmp_path, "parts", steps=2, **options)
    parts = train(model, tmp_path, "parts", resume=tmp_path / "parts", steps=4, **options)
    assert played(stored(whole.directory)) == played(stored(parts.directory))
    weights = [next((run.checkpoint).glob("*.safetensors")).read_bytes() for run in (whole, parts)]
    assert weights[0] == weights[1]


def test_chains_that_run_ahead_have_the_examples_and_the_bonus_of_the_step_they_were_drawn_for(
    model: Path, tmp_path: Path
) -> None:
    result = train(model, tmp_path, steps=4, max_lag=2, depth=2)
    for chain in stored(result.directory):
        step, position = (int(number) for number in chain.id[1:].split("-")[:2])
        assert has_examples(chain) == shows_examples(4, 0, step, position)
        assert (CALL_BONUS in chain.components) == (step <= 3)
    assert all(check.ok for check in diagnose(result.directory).checks)


def test_a_changed_bonus_is_found_by_replay(model: Path, tmp_path: Path) -> None:
    import sqlite3
    from contextlib import closing

    run = train(model, tmp_path, steps=2).directory
    with closing(sqlite3.connect(run / "run.db")) as db, db:
        db.execute("UPDATE meta SET value = replace(value, '[0.3, 3]', '[0.4, 3]')")
    found = {check.name: check.problems for check in diagnose(run).checks}
    assert "has the reward 0.3, but is worth 0.4" in str(found["rescored"])


def chain(*results: tuple[ToolResult, ...]) -> Trajectory:
    turns = [Turn([], not number, Completion(text="reply"), results=each) for number, each in enumerate(results)]
    return Trajectory("t1-0-0", Task("a", ()), turns=turns, reward=0.0)


def test_the_bonus_is_paid_once_to_the_first_call_that_worked() -> None:
    fine, failed = ToolResult(observation="7"), ToolResult(observation="no such tool", error="unknown_tool")
    raised = ToolResult(observation="it failed", error="raised")
    score = call_bonus(chain((failed,), (raised, fine), (fine, fine)), 0.5)
    assert (score.reward, score.turn_rewards, score.components) == (0.0, (0.0, 0.5, 0.0), {CALL_BONUS: 0.5})
    assert call_bonus(chain((failed,), (raised,), ()), 0.5).components == {CALL_BONUS: 0.0}
    own = chain((fine,))
    own.components = {CALL_BONUS: 1.0}
    with pytest.raises(ConfigError, match="give it another name"):
        call_bonus(own, 0.5)


@tool(name="price_of", register=False)
def price_of(item: str, count: int = 1) -> int:
    """The price of an item."""
    raise ToolError(f"no {item} among {count}")


def test_examples_are_written_from_the_tools_in_the_format_that_the_agent_reads() -> None:
    for kind, tools in ((agentfly.ReactAgent, [price_of]), (agentfly.CodeAgent, [])):
        agent = kind("pocket", tools=tools, examples="tools")
        asked, reply, _, answer = agent.examples
        (call,) = agent.parse(Completion(text=reply.content)).calls
        assert call.error is None and call.name in asked.content
        assert agent.parse(Completion(text=answer.content)).answer == f"result of {call.name}"
    native = agentfly.ToolAgent("pocket", tools=[price_of], examples="tools").examples
    assert [message.role for message in native] == ["user", "assistant", "tool", "assistant"]
    assert native[1].tool_calls[0].arguments == {"item": "some item"}


def test_examples_may_stand_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "shown.json"
    file.write_text(json.dumps(SHOWN))
    assert ReactAgent("pocket", examples=str(file)).examples[0] == Message("user", "Say hello.")
    file.write_text('{"role": "user"}')
    with pytest.raises(ConfigError, match="not a list of messages"):
        ReactAgent("pocket", examples=str(file))
    with pytest.raises(ConfigError, match="no JSON file"):
        ReactAgent("pocket", examples=str(tmp_path / "none.json"))


def test_chains_under_examples_are_trained_as_demonstrations_without_them(model: Path, tmp_path: Path) -> None:
    run = train(model, tmp_path, steps=1).directory
    agent = TwoTurns(str(model), tools=[look], reward=even, examples=SHOWN, examples_steps=4)
    chains = best_chains(str(run), min_reward=0.0)
    assert all(map(has_examples, chains))
    (sample,) = demo_samples([chains[0]], agent)
    renderer = agent.renderer
    plain = renderer.start(opening_messages(agent, chains[0].task), [])
    sampled = [token for turn in chains[0].turns for token in turn.completion.token_ids]
    assert sample.token_ids[: len(plain)].tolist() == plain, "the prompt has no examples"
    assert sample.token_ids[sample.mask].tolist() == sampled, "the sampled ids are kept, and they alone are trained"
    bonuses = [each.components[CALL_BONUS] for each in chains]
    assert max(bonuses) > 0
    low = max(each.reward for each in chains) + 1e-6
    with pytest.raises(DataError, match="no training chain|has no training chain"):
        best_chains(str(run), min_reward=low)


POCKET: dict[str, Any] = {
    "agent": {"model": "pocket", "tools": ["add", "subtract", "multiply"], "max_turns": 4, "examples_steps": 0},
    "data": {"train": "arithmetic", "train_count": 16, "validation_count": 2},
    "sampling": {"max_tokens": 48},
    "rollout": {"num_tasks": 2, "num_chains": 4},
    "train": {"steps": 1, "lr": 1e-6},
    "warm_start": {"demos": "self", "count": 32, "steps": 2},
}


def config(**sections: Any) -> Config:
    return Config.from_dict({name: {**POCKET.get(name, {}), **sections.get(name, {})} for name in {*POCKET, *sections}})


def test_self_made_demonstrations_are_the_chains_with_success_and_their_count_is_told(tmp_path: Path) -> None:
    from agentfly.watch.progress import Progress

    notes: list[str] = []

    class Notes(Progress):
        def note(self, text: str) -> None:
            notes.append(text)

    chosen = config(agent={"examples": SHOWN, "reward": "none", "success_at": 0.0}, run={"dir": str(tmp_path), "threads": 1})
    result = agentfly.train(chosen, progress=Notes(1))
    told = next(note for note in notes if "kept" in note)
    assert "of 32 chains, which solve 8 of 8 tasks" in told
    with RunStore(result.directory / "run.db", readonly=True) as store:
        first = {row.name: row.value for row in store.metrics() if row.step == 0}
    assert first["warm_start/loss_after"] < first["warm_start/loss_before"]
    never = config(agent={"examples": SHOWN, "success_at": 2.0}, run={"dir": str(tmp_path), "threads": 1, "name": "never"})
    with pytest.raises(DataError, match="32 chains solved 0: give other agent.examples"):
        agentfly.train(never, progress=Notes(1))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"rollout": {"call_bonus": 0.1}}, "set rollout.call_bonus_steps"),
        ({"rollout": {"call_bonus_steps": 5}}, "set rollout.call_bonus$"),
        ({"rollout": {"call_bonus": -0.1}}, "at least 0"),
        ({"warm_start": {"mistakes": 0.5}}, "warm_start.mistakes has no effect"),
        (
            {"algorithm": "distill", "loss": {"reference": "pocket"}, "rollout": {"call_bonus": 0.1, "call_bonus_steps": 5}},
            "learns from none",
        ),
        ({"backend": "verl"}, 'needs backend = "local"'),
    ],
)
def test_keys_that_cannot_act_are_refused(sections: dict[str, Any], sentence: str) -> None:
    tree = {name: {**POCKET.get(name, {}), **value} if isinstance(value, dict) else value for name, value in sections.items()}
    with pytest.raises(ConfigError, match=sentence):
        Config.from_dict({**POCKET, **tree})


def test_a_training_refuses_what_its_agent_cannot_use(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no effect without examples"):
        ReactAgent("pocket", examples_steps=5)
    settings = {"steps": 1, "run": {"dir": str(tmp_path), "name": "run"}, "threads": 1}
    bare = agentfly.ThinkAgent(str(model), reward=even)
    with pytest.raises(ConfigError, match="the agent has no tools"):
        agentfly.train(bare, ROWS, call_bonus=0.1, call_bonus_steps=2, **settings)
    with pytest.raises(ConfigError, match="shows the examples to warm_start.demos"):
        agentfly.train(TwoTurns(str(model), tools=[look], reward=even, examples=SHOWN, examples_steps=0), ROWS, **settings)
    long = [{"role": "user", "content": "word " * 600}, SHOWN[1]]
    with pytest.raises(DataError, match="shorten agent.examples or raise max_context"):
        agentfly.train(TwoTurns(str(model), tools=[look], reward=even, examples=long, examples_steps=4), ROWS, **settings)
    with pytest.raises(ConfigError, match="the agent has none"):
        _ = ReactAgent("pocket", examples="tools").examples
    with pytest.raises(ConfigError, match="has no method write"):
        _ = TwoTurns(str(model), tools=[look], examples="tools").examples
