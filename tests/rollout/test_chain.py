"""One chain: every end has an outcome, ids are only appended, and failures of the world get no reward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from agentfly import ReactAgent, reward, tool
from agentfly.build import trainable_engine
from agentfly.data import load_tasks
from agentfly.errors import ConfigError, DataError, EngineError, RewardError, WorldError
from agentfly.learn.samples import to_samples
from agentfly.protocols import Engine, TrainableEngine
from agentfly.rollout import check_prompts, make_plan
from agentfly.testing import ByteRenderer, GuessEnv, ScriptedEngine
from agentfly.types import Message, Outcome, Sampling, Trajectory

CALL = 'Thought: multiply\nAction: multiply\nInput: {"a": 6, "b": 7}'
ANSWER = "Thought: done\nAnswer: 42"


@tool(name="multiply")
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@tool(name="look", register=False)
def look() -> str:
    """Look."""
    return "ok"


@reward(name="right")
def right(prediction: str, answer: str = "42") -> float:
    return float(prediction == answer)


def agent_for(replies: Any, **options: Any) -> ReactAgent:
    options = {"tools": [multiply], "reward": right, "renderer": ByteRenderer()} | options
    return ReactAgent(ScriptedEngine(replies, record=True), **options)


def play(agent: ReactAgent, row: dict[str, Any] | None = None, **options: Any) -> Trajectory:
    (trajectory,) = agent.run_sync([row or {"question": "6 x 7?"}], **options)
    return trajectory


def test_a_chain_acts_observes_and_answers() -> None:
    trajectory = play(agent_for([CALL, ANSWER]))
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.prediction == "42"
    assert trajectory.reward == 1.0
    assert [message.role for message in trajectory.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert trajectory.messages[3].content == "Observation: 42"
    assert trajectory.tool_counts == {"multiply": 1}


def drawn(trajectory: Trajectory) -> tuple[str, str]:
    """The only row's text, newlines as /, and under it carets where it is trained on."""
    (row,) = to_samples(trajectory)
    pieces = [ByteRenderer().decode([token]).replace("\n", "/") for token in row.token_ids]
    carets = [("^" if mask else " ") * len(piece) for piece, mask in zip(pieces, row.mask, strict=True)]
    return "".join(pieces), "".join(carets)


def test_the_ids_that_were_sampled_are_the_ids_that_are_trained() -> None:
    text, carets = drawn(play(agent_for(["Action: look", "Answer: 1"], tools=[look]), {"question": "?"}))
    tail, mask = zip(
        ("<|im_start|>assistant/", "                      "),
        ("Action: look<|im_end|>", "^^^^^^^^^^^^^^^^^^^^^^"),
        ("/<|im_start|>user/Observation: ok<|im_end|>/", "                                            "),
        ("<|im_start|>assistant/", "                      "),
        ("Answer: 1<|im_end|>", "^^^^^^^^^^^^^^^^^^^"),
        strict=True,
    )
    assert text.endswith("".join(tail))
    assert carets[-len("".join(tail)) :] == "".join(mask)
    assert set(carets[: -len("".join(tail))]) == {" "}


def test_the_prompt_of_a_turn_is_all_that_came_before_it() -> None:
    agent = agent_for([CALL, CALL, ANSWER])
    trajectory = play(agent)
    prompts = [request.prompt_ids for request in agent.engine.requests]  # type: ignore[attr-defined]
    seen: list[int] = []
    for turn, prompt in zip(trajectory.turns, prompts, strict=True):
        seen += turn.context_ids
        assert prompt == seen
        seen += turn.completion.token_ids


@pytest.mark.parametrize(
    ("replies", "options", "outcome"),
    [
        ([ANSWER], {}, Outcome.FINISHED),
        ([CALL] * 9, {"max_turns": 3}, Outcome.MAX_TURNS),
        (["I do not know."], {}, Outcome.NO_TOOL_CALL),
        ([CALL, ANSWER], {"sampling": {"max_tokens": 5}}, Outcome.MAX_TOKENS),
        (['Action: nothing\nInput: {"a": 1}'], {"on_invalid_call": "end"}, Outcome.NO_TOOL_CALL),
        ([CALL, EngineError("the engine died")], {}, Outcome.WORLD_FAILURE),
        ([ValueError("a bug in an engine")], {}, Outcome.WORLD_FAILURE),
    ],
)
def test_every_chain_ends_with_a_typed_outcome(replies: list[Any], options: dict[str, Any], outcome: Outcome) -> None:
    trajectory = play(agent_for(replies, **options))
    assert trajectory.outcome is outcome
    assert (trajectory.reward is None) == (not outcome.trainable)


def test_a_chain_stops_at_the_end_of_its_context() -> None:
    agent = agent_for([CALL] * 50, max_turns=50, max_context=900)
    trajectory = play(agent)
    assert trajectory.outcome is Outcome.MAX_TOKENS
    total = sum(len(turn.context_ids) + len(turn.completion.token_ids) for turn in trajectory.turns)
    assert total <= 900


def test_a_prompt_longer_than_the_context_is_refused_before_the_run_with_its_row() -> None:
    with pytest.raises(DataError, match="row 1 .* context holds 600"):
        agent_for([ANSWER], max_context=600).run_sync([{"question": "short"}, {"question": "x" * 700}])


def test_the_model_is_told_of_its_mistakes_and_goes_on() -> None:
    replies = [
        'Action: multipl\nInput: {"a": 1, "b": 2}',
        'Action: multiply\nInput: {"a": 1}',
        "Action: multiply\nInput: {oops",
        ANSWER,
    ]
    trajectory = play(agent_for(replies))
    assert trajectory.outcome is Outcome.FINISHED
    told = [message.content for message in trajectory.messages if message.content.startswith("Observation")]
    assert "multiply" in told[0]
    assert "'b'" in told[1] or "b" in told[1]
    assert "JSON" in told[2]
    assert trajectory.num_invalid_calls == 3


def test_no_tool_call_can_be_answered_with_a_nudge() -> None:
    trajectory = play(agent_for(["Hmm.", ANSWER], on_no_tool_call="continue"))
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.messages[3].content == "Reply with an Action and its Input, or with an Answer."


@pytest.mark.parametrize("reaction", ["on_no_tool_call", "on_invalid_call"])
def test_the_reaction_raise_stops_the_run(reaction: str) -> None:
    with pytest.raises(ConfigError, match='the agent is set to "raise"'):
        play(agent_for(["Hmm." if reaction == "on_no_tool_call" else "Action: nope\nInput: {}"], **{reaction: "raise"}))


def test_a_tool_that_raises_is_told_to_the_model_or_ends_the_chain() -> None:
    @tool(name="broken")
    def broken() -> str:
        """Fails."""
        raise ValueError("no luck")

    call = "Action: broken\nInput: {}"
    trajectory = play(agent_for([call, ANSWER], tools=[broken]))
    assert trajectory.outcome is Outcome.FINISHED
    assert "no luck" in trajectory.messages[3].content
    assert "Traceback" not in trajectory.messages[3].content
    trajectory = play(agent_for([call], tools=[broken], on_tool_error="end"))
    assert trajectory.outcome is Outcome.TOOL_ERROR
    assert not trajectory.trainable


def test_a_world_that_breaks_takes_its_own_chain_and_not_the_siblings() -> None:
    calls = 0

    @tool(name="world")
    async def world() -> str:
        """Act."""
        nonlocal calls
        calls += 1
        if calls == 2:
            raise WorldError("the world is gone")
        return "fine"

    result = agent_for(["Action: world\nInput: {}", ANSWER], tools=[world]).run_sync([{"question": "q"}], num_chains=4)
    assert result.outcomes == {"finished": 3, "world_failure": 1}
    (lost,) = [trajectory for trajectory in result if trajectory.outcome is Outcome.WORLD_FAILURE]
    assert lost.reward is None
    assert "the world is gone" in (lost.error or "")
    assert len(lost.turns) == 1


def test_a_hung_chain_ends_at_its_deadline() -> None:
    @tool(name="hang", timeout_s=60)
    async def hang() -> str:
        """Hang."""
        await asyncio.sleep(60)
        return ""

    trajectory = play(agent_for(["Action: hang\nInput: {}"], tools=[hang], chain_timeout_s=0.05))
    assert trajectory.outcome is Outcome.MAX_TIME
    assert "exceeded its time limit" in (trajectory.error or "")


def test_step_rewards_and_done_come_from_the_tool() -> None:
    from agentfly import ToolResult

    @tool(name="move")
    def move() -> ToolResult:
        """Move."""
        return ToolResult(observation="you won", reward=0.25, done=True)

    trajectory = play(agent_for(["Action: move\nInput: {}"], tools=[move]))
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.turns[0].reward == 0.25
    assert trajectory.total_reward == 0.25
    assert trajectory.messages[-1].content == "Observation: you won"


def test_tool_and_reward_see_the_same_environment() -> None:
    @tool(name="guess")
    def guess(n: int, env: GuessEnv) -> str:
        """Guess."""
        return env.guess(n)

    @reward(name="solved")
    def solved(env: GuessEnv) -> float:
        return float(env.solved)

    replies = ['Action: guess\nInput: {"n": 3}', 'Action: guess\nInput: {"n": 7}', ANSWER]
    trajectory = play(agent_for(replies, tools=[guess], reward=solved, env=GuessEnv), {"question": "Guess.", "secret": 7})
    assert trajectory.reward == 1.0
    assert "higher" in trajectory.messages[3].content


def test_an_environment_that_does_not_start_is_the_worlds_failure() -> None:
    class Broken:
        def reset(self, task: Any) -> None:
            raise RuntimeError("no display")

        def close(self) -> None:
            pass

    trajectory = play(agent_for([ANSWER], env=Broken))
    assert trajectory.outcome is Outcome.WORLD_FAILURE
    assert "no display" in (trajectory.error or "")
    assert trajectory.waited_s == trajectory.seconds > 0


def test_a_chain_says_when_it_waited_sampled_called_and_was_scored() -> None:
    class SlowEnv:
        async def reset(self, task: Any) -> None:
            await asyncio.sleep(0.02)

        def close(self) -> None:
            pass

    @tool(name="multiply", register=False)
    async def slow(a: int, b: int) -> int:
        """Multiply two numbers."""
        await asyncio.sleep(0.02)
        return a * b

    @reward(name="slow_right")
    async def scored(prediction: str) -> float:
        await asyncio.sleep(0.02)
        return 1.0

    before = time.time()
    trajectory = play(agent_for([CALL, ANSWER], tools=[slow], reward=scored, env=SlowEnv))
    assert before <= trajectory.started <= time.time()
    assert min(trajectory.waited_s, trajectory.scored_s) >= 0.015
    first, last = trajectory.turns
    assert (len(first.calls_s), last.calls_s) == (1, [])
    assert 0.015 <= first.calls_s[0] <= first.tools_s
    assert trajectory.waited_s <= first.began_s < first.began_s + first.sampled_s + first.tools_s <= last.began_s
    assert last.began_s + last.sampled_s + trajectory.scored_s <= trajectory.seconds


@pytest.mark.parametrize("value", [float("nan"), "good", None, float("inf")])
def test_a_reward_that_is_not_a_score_stops_the_run_with_a_sentence(value: Any) -> None:
    @reward(name="odd")
    def odd() -> Any:
        return value

    kept: list[Trajectory] = []
    with pytest.raises(RewardError, match="odd"):
        agent_for([ANSWER], reward=odd).run_sync([{"question": "q"}], on_trajectory=kept.append)


def test_cancelling_a_run_closes_the_chains_and_tells_their_outcome() -> None:
    closed = []
    told = []

    class World(GuessEnv):
        def close(self) -> None:
            closed.append(self)

    @tool(name="hang")
    async def hang() -> str:
        """Hang."""
        hanging.append(1)
        await asyncio.sleep(60)
        return ""

    hanging: list[int] = []
    agent = agent_for(["Action: hang\nInput: {}"], tools=[hang], env=World)

    async def scenario() -> None:
        run = asyncio.create_task(agent.run([{"question": "q", "secret": 3}], num_chains=3, on_event=told.append))
        async with asyncio.timeout(60):
            while len(hanging) < 3:
                await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(scenario())
    assert len(closed) == 3
    finished = [event for event in told if event.kind == "finished"]
    assert [event.data["trajectory"].outcome for event in finished] == [Outcome.CANCELLED] * 3
    assert len(agent.engine.released) == 3  # type: ignore[attr-defined]


def test_events_come_in_the_order_they_happen() -> None:
    kinds = []
    play(agent_for([CALL, ANSWER]), on_event=lambda event: kinds.append(event.kind))
    assert kinds == ["chain_started", "text", "tool_call", "observation", "text", "finished"]


def test_siblings_get_different_seeds_and_a_repeated_run_gets_the_same() -> None:
    def seeds() -> list[int | None]:
        agent = agent_for([CALL, ANSWER])
        agent.run_sync([{"question": "q"}], num_chains=2, sampling=Sampling(seed=3))
        return sorted(request.sampling.seed for request in agent.engine.requests)  # type: ignore[attr-defined]

    assert len(set(seeds())) == 4
    assert seeds() == seeds()


def test_results_come_in_the_order_of_tasks_with_siblings_together() -> None:
    rows = [{"question": f"q{i}"} for i in range(5)]
    result = agent_for([ANSWER]).run_sync(rows, num_chains=3, max_concurrency=2)
    assert [trajectory.task.id for trajectory in result] == [str(i) for i in range(5) for _ in range(3)]
    assert [len(group) for group in result.groups] == [3] * 5
    assert [trajectory.chain for trajectory in result.groups[4]] == [0, 1, 2]
    assert result.rewards == [1.0] * 15


def test_at_most_max_concurrency_chains_are_in_flight() -> None:
    flying = highest = 0

    @tool(name="work")
    async def work() -> str:
        """Work."""
        nonlocal flying, highest
        flying += 1
        highest = max(highest, flying)
        await asyncio.sleep(0.002)
        flying -= 1
        return ""

    agent_for(["Action: work\nInput: {}", ANSWER], tools=[work]).run_sync([{"question": "q"}], num_chains=20, max_concurrency=3)
    assert highest == 3


def test_a_run_leaves_the_garbage_collector_as_it_found_it() -> None:
    import gc

    seen = []

    @tool(name="peek", register=False)
    async def peek() -> str:
        """Peek."""
        seen.append(gc.get_threshold()[0])
        return ""

    before = gc.get_threshold()[0]
    agent_for(["Action: peek\nInput: {}", ANSWER], tools=[peek]).run_sync([{"question": "q"}], num_chains=2)
    assert seen[0] > before
    assert gc.get_threshold()[0] == before


def test_a_tool_whose_config_cannot_work_stops_the_run_instead_of_being_told_to_the_model() -> None:
    @tool(name="look", register=False)
    def needs_more() -> str:
        """Look."""
        raise ConfigError("the sandbox needs user namespaces")

    with pytest.raises(ConfigError, match="user namespaces"):
        play(agent_for(["Action: look", ANSWER], tools=[needs_more]))


def test_only_prompts_that_may_be_too_long_are_rendered_before_the_run_and_siblings_share_a_prompt() -> None:
    class Counting(ByteRenderer):
        rendered = 0

        def start(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
            self.rendered += 1
            return super().start(messages, tools)

    renderer = Counting()
    agent = ReactAgent(ScriptedEngine([ANSWER]), renderer=renderer, reward=lambda: 1.0)
    tasks = load_tasks([{"question": f"question {number}"} for number in range(50)])
    check_prompts(make_plan(agent), tasks)
    assert renderer.rendered == 1
    result = agent.run_sync(tasks, num_chains=4)
    assert len(result) == 200
    assert renderer.rendered == 1 + 1 + 50


def test_an_engine_without_weights_is_refused_for_training_with_the_protocol_it_lacks() -> None:
    engine = ScriptedEngine([ANSWER])
    assert isinstance(engine, Engine)
    assert not isinstance(engine, TrainableEngine)
    with pytest.raises(ConfigError, match="ScriptedEngine cannot be trained from: .*TrainableEngine"):
        trainable_engine(ReactAgent(engine, renderer=ByteRenderer()))
