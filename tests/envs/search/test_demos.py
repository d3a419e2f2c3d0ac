"""Demonstrations: played again by a real agent they meet the same observations; slips are wrong; dialogues are short."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

import agentfly.pocket
from agentfly import ReactAgent
from agentfly.envs.search.demos import easy_search_demos, encyclopaedia_demos
from agentfly.envs.task_sets import split_of
from agentfly.errors import ConfigError
from agentfly.rewards.answers import qa_exact_match
from agentfly.testing import ScriptedEngine

TOOLS = {easy_search_demos: ["search"], encyclopaedia_demos: ["search", "retrieve"]}
BOTH = pytest.mark.parametrize("demos", list(TOOLS), ids=lambda demos: demos.__name__)


def played(row: dict, tools: list[str]):
    replies = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    fields = {key: value for key, value in row.items() if key != "messages"}
    agent = ReactAgent(ScriptedEngine(replies), tools=tools, reward="qa_exact_match")
    (trajectory,) = agent.run_sync([{"question": row["messages"][0]["content"], **fields}])
    return trajectory


@BOTH
def test_an_agent_that_replies_so_reads_the_same_and_is_right(demos):
    rows = demos(30, seed=1)
    for row in rows:
        trajectory = played(row, TOOLS[demos])
        assert [message.content for message in trajectory.messages[1:]] == [message["content"] for message in row["messages"]]
        assert trajectory.reward == 1.0
        assert trajectory.num_invalid_calls == 0
    assert {row["hops"] for row in rows} == {1, 2}


@BOTH
def test_slips_are_wrong_and_as_frequent_as_asked(demos):
    def right(row: dict) -> float:
        return qa_exact_match(prediction=row["messages"][-1]["content"].partition("Answer: ")[2], answer=row["answer"])

    assert sum(map(right, demos(200))) == 200
    assert sum(map(right, demos(200, mistakes=1.0))) == 0
    assert 80 <= sum(map(right, demos(200, mistakes=0.5))) <= 120
    slips = demos(60, mistakes=1.0)
    assert len({len(row["messages"]) for row in slips}) > 1, "not all slips are of one kind"
    assert all(row["messages"][-1]["content"].partition("Answer: ")[2] for row in slips)


@BOTH
def test_they_are_the_same_for_a_seed_and_of_the_train_split(demos):
    assert demos(5, seed=2) == demos(5, seed=2) != demos(5, seed=3)
    if demos is encyclopaedia_demos:
        assert {split_of(row["given"]["path"][0]) for row in demos(100)} == {"train"}
    with pytest.raises(ConfigError, match="a share from 0 to 1"):
        demos(5, mistakes=1.5)


def test_pages_are_opened_in_some_dialogues_over_the_encyclopaedia():
    texts = [message["content"] for row in encyclopaedia_demos(60) for message in row["messages"]]
    assert any("Action: retrieve" in text for text in texts)


def test_easy_dialogues_are_short_for_the_bundled_model():
    tokenizer = Tokenizer.from_file(str(Path(agentfly.pocket.__path__[0]) / "model" / "tokenizer.json"))
    agent = ReactAgent(ScriptedEngine([]), tools=["search"])
    prompt = len(tokenizer.encode(agent.prompt).ids)
    lengths = [
        prompt + sum(len(tokenizer.encode(message["content"]).ids) + 4 for message in row["messages"])
        for row in easy_search_demos(100)
    ]
    assert max(lengths) < 250
