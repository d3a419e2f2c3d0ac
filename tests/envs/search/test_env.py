"""`SearchEnv`, its tools and its reward: examined, played by agents, and given what no model should write."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from agentfly import ReactAgent, plugins
from agentfly.agents.search import SearchAgent
from agentfly.envs.check import check_env
from agentfly.envs.search.env import SearchEnv
from agentfly.envs.search.tasks import easy_search, encyclopaedia
from agentfly.envs.search.tools import open_passage, retrieve, search
from agentfly.errors import ConfigError, RewardError, WorldError
from agentfly.testing import ScriptedEngine
from agentfly.tools import Context, call_tools
from agentfly.types import Outcome, Task, ToolCall, ToolResult, Trajectory

TOOLS = {"search": search, "retrieve": retrieve, "open": open_passage}


def call(*calls: tuple[str, dict[str, Any]], task: Task | None = None, **options: Any) -> list[ToolResult]:
    """Calls of one chain, one after the other."""
    task = task or Task("t0", (), {})

    async def main() -> list[ToolResult]:
        env = SearchEnv(**options)
        await env.reset(task)

        async def lend(kind: type) -> SearchEnv:
            return env

        context = Context(task, Trajectory("c0", task), lend=lend)
        try:
            return [(await call_tools(TOOLS, [ToolCall(name, given)], context))[0] for name, given in calls]
        finally:
            await env.close()

    return asyncio.run(main())


def test_the_conformance_kit_passes():
    report = check_env("search", **SearchEnv.conformance())
    assert report.ok, str(report)
    assert {check.name for check in report.checks if check.status != "passed"} <= {"calls after the end are refused"}


def test_hits_are_shown_with_ids_that_retrieve_and_open_understand(write_jsonl):
    rows = [{"id": "a/1", "title": "Harbour", "text": "The harbour\tis old.\nShips sleep there. " + "Rope. " * 200}]
    found, page, other, bracketed = call(
        ("search", {"query": "old harbour"}),
        ("retrieve", {"id": "a/1"}),
        ("open", {"id": "a/1"}),
        ("retrieve", {"id": " [a/1] "}),
        source=str(write_jsonl(rows)),
        cut=60,
        page=100,
    )
    assert found.observation == "[a/1] Harbour: The harbour is old. Ships sleep there. Rope. Rope. Rope. ..."
    assert page.observation.startswith("Harbour\nThe harbour is old.\nShips sleep there. Rope.")
    assert page.observation.endswith("...") and len(page.observation) < 120
    assert other == bracketed == page


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"query": "x " * 50_000}, "The query has 100,000 characters; at most 1,000"),
        ({"query": ""}, "The query is empty"),
        ({"query": " \x00\x1b\n "}, "The query is empty"),
        ({"query": 7}, "Bad arguments for search"),
        ({}, "Bad arguments for search"),
    ],
)
def test_a_query_that_cannot_be_searched_is_the_models_mistake(given, says):
    (result,) = call(("search", given))
    assert result.observation.startswith(says)
    assert result.invalid


@pytest.mark.parametrize("query", ["capital\x00of\x1b[31m", "\ud800 river", "river \u202e\u2028 x", "qqqq zzzz"])
def test_strange_queries_are_searched_and_shown_without_strange_characters(query):
    (result,) = call(("search", {"query": query}))
    assert result.error is None
    assert result.observation.replace("\n", "").isprintable()
    result.observation.encode()


def test_an_id_is_shown_and_read_in_the_same_form(write_jsonl):
    names = ["a\x1b[31mb", "[x]", "c  d", "http://e.com/a]b"]
    corpus = str(write_jsonl([{"id": name, "title": f"T{place}", "text": "zebra"} for place, name in enumerate(names)]))
    (found,) = call(("search", {"query": "zebra"}), source=corpus, top=4)
    shown = [line[1 : line.index("] T")] for line in found.observation.split("\n")]
    assert all(each.isprintable() for each in shown)
    for forms in (shown, [f"[{each}]" for each in shown], names):
        pages = call(*(("retrieve", {"id": each}) for each in forms), source=corpus)
        assert [page.observation.split("\n")[0] for page in pages] == ["T0", "T1", "T2", "T3"]


def test_ids_that_are_none_are_told_so():
    unknown, empty, long = call(("retrieve", {"id": "99999"}), ("retrieve", {"id": "  "}), ("open", {"id": "9" * 100_000}))
    assert unknown.observation == "There is no passage with the id '99999'. Search shows ids in brackets."
    assert unknown.error is None
    assert empty.invalid and long.invalid
    assert len(long.observation) < 200


def test_calls_after_the_end_and_before_the_beginning_are_the_worlds_failure():
    async def main() -> None:
        env = SearchEnv()
        with pytest.raises(WorldError, match="reset it"):
            await env.search("x")
        await env.reset(Task("t", (), {}))
        await env.close()
        await env.close()
        for ask in (env.search, env.retrieve):
            with pytest.raises(WorldError, match="reset it"):
                await ask("1")
        assert not env.healthy()

    asyncio.run(main())


def test_wrong_options_are_refused_before_the_first_chain(tmp_path):
    for options, says in (
        ({"top": 0}, "top must be from 1 to 100"),
        ({"cut": 5}, "at least 20 characters"),
        ({"source": ""}, "nothing to search"),
        ({"source": "encyclopaedia", "retriever": "colbert"}, "no retriever"),
        ({"source": "http://h", "options": {"token": ["x"]}}, "a text or a number"),
        ({"source": "encyclopaedia", "options": {"pooling": "cls"}}, "bm25 has no option 'pooling'"),
    ):
        with pytest.raises(ConfigError, match=says):
            call(**options) if options.get("source") == "" else SearchEnv(**options)


def test_a_row_of_data_cannot_send_a_run_to_a_server():
    with pytest.raises(ConfigError, match="named by the option `source`"):
        call(task=Task("t", (), {"corpus": "http://127.0.0.1:9"}))


def react(*steps: tuple[str, dict[str, str]] | str) -> list[str]:
    return [
        f"Thought: so\nAnswer: {step}"
        if isinstance(step, str)
        else f"Thought: so\nAction: {step[0]}\nInput: {json.dumps(step[1])}"
        for step in steps
    ]


def test_a_react_agent_earns_every_reward_by_two_searches():
    row = next(row for row in encyclopaedia("test", 100) if row["hops"] == 2)
    replies = react(*(("search", {"query": title}) for title in row["gold_titles"]), row["answer"])
    agent = ReactAgent(
        ScriptedEngine(replies),
        tools=["search", "retrieve", "open"],
        reward={"qa_exact_match": 1, "qa_f1": 1, "retrieval_recall": 1, "format": 1},
    )
    (trajectory,) = agent.run_sync([row])
    assert trajectory.outcome is Outcome.FINISHED
    assert trajectory.reward == 4.0
    assert trajectory.components["retrieval_recall"] == 1.0


def test_recall_counts_the_pages_that_were_shown_and_doing_nothing_earns_none():
    row = next(row for row in encyclopaedia("test", 100) if row["hops"] == 2)
    for replies, wanted in ((react(("search", {"query": row["gold_titles"][0]}), "x"), 0.5), (react("x"), 0.0)):
        agent = ReactAgent(ScriptedEngine(replies), tools=["search"], reward="retrieval_recall")
        (trajectory,) = agent.run_sync([row])
        assert trajectory.reward == wanted, replies


def test_recall_reads_ids_and_joined_titles_and_wants_one_of_them(write_jsonl):
    corpus = str(write_jsonl([{"id": 1, "title": "Cat", "text": "A cat."}, {"id": 2, "title": "Dog", "text": "A dog."}]))
    for fields, wanted in (({"gold_titles": "cat | Dog"}, 0.5), ({"gold_ids": ["1"]}, 1.0)):
        agent = ReactAgent(
            ScriptedEngine(react(("search", {"query": "cat"}), "x")), tools=["search"], reward="retrieval_recall"
        )
        (trajectory,) = agent.run_sync([{"question": "?", "corpus": corpus, **fields}])
        assert trajectory.reward == wanted
    agent = ReactAgent(ScriptedEngine(react("x")), tools=["search"], reward="retrieval_recall")
    with pytest.raises(RewardError, match="names no passages"):
        agent.run_sync([{"question": "?", "corpus": corpus}])


def test_a_search_agent_reads_the_same_world_in_tags():
    row = next(row for row in easy_search("test", 50) if row["hops"] == 2)
    replies = [f"<search>{title}</search>" for title in row["gold_titles"]] + [f"<answer>{row['answer']}</answer>"]
    agent = SearchAgent(ScriptedEngine(replies), tools=["search"], reward="qa_exact_match")
    (trajectory,) = agent.run_sync([row])
    assert trajectory.reward == 1.0
    assert (
        trajectory.messages[3].content.startswith("<information>The ")
        and row["gold_titles"][0] in trajectory.messages[3].content
    )


def test_many_chains_share_one_index_and_none_sees_what_another_saw():
    rows = easy_search("test", 24)

    def reply(request: Any) -> str:
        question = next(message.content for message in request.messages if message.role == "user")
        row = next(row for row in rows if row["question"] == question)
        turns = sum(message.role == "assistant" for message in request.messages)
        steps = react(*(("search", {"query": title}) for title in row["gold_titles"]), row["answer"])
        return steps[turns]

    agent = ReactAgent(ScriptedEngine(reply, reads="messages"), tools=["search"], reward={"qa_f1": 1, "retrieval_recall": 1})
    result = agent.run_sync(rows, num_chains=3)
    assert result.rewards == [2.0] * 72


def test_in_a_worker_process_it_answers_the_same():
    row = next(row for row in easy_search("test", 50) if row["hops"] == 1)
    agent = ReactAgent(
        ScriptedEngine(react(("search", {"query": row["gold_titles"][0]}), row["answer"])),
        tools=["search"],
        reward={"qa_f1": 1, "retrieval_recall": 1},
        resources={"pools": {"SearchEnv": {"placement": "process", "max": 1}}},
    )
    (trajectory,) = agent.run_sync([row])
    assert trajectory.reward == 2.0, trajectory.error


def test_everything_of_the_world_is_known_by_name():
    for kind, names in {
        "envs": ["search"],
        "tools": ["search", "retrieve", "open"],
        "rewards": ["retrieval_recall"],
        "tasks": ["encyclopaedia", "easy_search", "search_questions"],
        "demos": ["encyclopaedia", "easy_search"],
        "encoders": ["transformers"],
        "caches": ["disk"],
    }.items():
        for name in names:
            assert plugins.resolve(kind, name) is not None
    assert plugins.resolve("tools", "open").name == "open"


def test_the_same_passages_are_one_state_in_whatever_order_they_were_shown(write_jsonl):
    words = ("harbour", "bridge", "castle")
    rows = [{"id": name, "title": name.title(), "text": f"The {name} is old."} for name in words]
    source = str(write_jsonl(rows))

    async def key(*queries: str) -> str:
        env = SearchEnv(source=source, top=1)
        await env.reset(Task("t0", (), {}))
        for query in queries:
            await env.search(query)
        made = env.state_key()
        await env.close()
        return made

    async def main() -> None:
        assert await key("harbour", "bridge") == await key("bridge", "bridge", "", "harbour")
        seen = [await key(), await key("harbour"), await key("harbour", "bridge"), await key("harbour", "castle")]
        assert len(set(seen)) == len(seen)

    asyncio.run(main())
