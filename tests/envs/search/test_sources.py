"""Opening sources: before the chains, outside their deadlines, and off the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from agentfly import ReactAgent
from agentfly.data import load_tasks
from agentfly.envs.search import env as env_file
from agentfly.envs.search import sources
from agentfly.envs.search.env import SearchEnv
from agentfly.envs.search.sources import Source, open_local, opened
from agentfly.errors import ConfigError, DataError, WorldError
from agentfly.resources import ResourceManager, spec_of
from agentfly.testing import ScriptedEngine
from agentfly.types import Outcome, Task

ROWS = [{"id": 1, "title": "Cat", "text": "A cat."}]
STEPS = ['Thought: so\nAction: search\nInput: {"query": "cat"}', "Thought: so\nAnswer: x"]


class Gate:
    """Holds up the making of the sources whose name ends with `name`."""

    def __init__(self, name: str) -> None:
        self.name, self.open, self.reached, self.made = name, threading.Event(), threading.Event(), 0
        self.events: list[Any] = []
        self.before = -1
        """How many events of chains there were when it was made."""

    def __call__(self, source: Source) -> Any:
        if source.where.endswith(self.name):
            self.made += 1
            self.reached.set()
            assert self.open.wait(60)
            self.before = len(self.events)
        return _make(source)


_make = sources._make


@pytest.fixture
def gate(monkeypatch):
    found = Gate("slow.jsonl")
    monkeypatch.setattr(sources, "_make", found)
    yield found
    found.open.set()


async def until(event: threading.Event) -> None:
    async with asyncio.timeout(60):
        while not event.is_set():
            await asyncio.sleep(0.005)


def test_while_one_source_is_made_the_loop_runs_and_others_are_opened(gate, write_jsonl):
    slow, quick = str(write_jsonl(ROWS, "slow.jsonl")), str(write_jsonl(ROWS, "quick.jsonl"))

    async def main() -> None:
        making = asyncio.create_task(SearchEnv(slow).reset(Task("t", (), {})))
        await until(gate.reached)
        async with asyncio.timeout(60):  # a lock held by the maker would block the loop, and this timer with it
            for corpus in (quick, "easy_search", quick):
                await SearchEnv(corpus).reset(Task("t", (), {}))
        assert not making.done()
        gate.open.set()
        await making

    asyncio.run(main())


def test_a_cancelled_caller_does_not_stop_the_building_and_it_is_built_once(gate, write_jsonl):
    source = Source(str(write_jsonl(ROWS, "slow.jsonl")))

    async def main() -> None:
        waiting = [asyncio.create_task(opened(source)) for _ in range(5)]
        await until(gate.reached)
        for task in waiting[:4]:
            task.cancel()
        await asyncio.gather(*waiting[:4], return_exceptions=True)
        gate.open.set()
        assert await waiting[4] is open_local(source)

    asyncio.run(main())
    assert gate.made == 1


def test_a_source_that_could_not_be_opened_is_tried_again(write_jsonl, tmp_path):
    source = Source(str(write_jsonl(["{"])))
    for _ in range(2):
        with pytest.raises(DataError, match="line 1 is not valid JSON"):
            open_local(source)
    write_jsonl(ROWS)
    assert open_local(source).find(["cat"], 1)[0][0].passage.title == "Cat"


def agent(options: dict[str, Any], **settings: Any) -> ReactAgent:
    pools = {"SearchEnv": {"options": options, **settings}}
    return ReactAgent(
        ScriptedEngine(
            lambda request: STEPS[sum(message.role == "assistant" for message in request.messages)], reads="messages"
        ),
        tools=["search"],
        reward="qa_exact_match",
        resources={"pools": pools},
    )


@pytest.mark.parametrize("placement", ["loop", "process"])
def test_an_index_is_made_before_the_first_chain_so_that_no_chain_waits_for_it(gate, write_jsonl, placement):
    slow = str(write_jsonl(ROWS, "slow.jsonl"))
    threading.Timer(0.5, gate.open.set).start()
    rows = [{"question": "?", "answer": "x"}] * 2
    result = agent({"source": slow}, placement=placement, max=2).run_sync(rows, on_event=gate.events.append)
    assert [each.reward for each in result.trajectories] == [1.0, 1.0], [each.error for each in result.trajectories]
    assert (gate.made, gate.before) == (1, 0), "made once, before any chain was started"
    assert gate.events


def test_what_a_loaded_task_set_names_is_opened_before_the_first_chain(gate, write_jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr("agentfly.envs.search.tasks.CORPORA", ("slow",))
    write_jsonl(ROWS, "slow.jsonl")
    write_jsonl([{"question": f"{number}?", "answer": "x"} for number in range(40)], "questions.jsonl")
    monkeypatch.setenv("SEARCH_DATA", str(tmp_path))
    tasks = load_tasks("search_questions", split="test", count=1)
    threading.Timer(0.5, gate.open.set).start()
    result = agent({}).run_sync(tasks, on_event=gate.events.append)
    assert [each.reward for each in result.trajectories] == [1.0], result.trajectories[0].error
    assert (gate.made, gate.before) == (1, 0)


def test_a_corpus_that_cannot_be_opened_stops_only_the_chains_that_ask_for_it(write_jsonl, caplog, monkeypatch):
    large = str(write_jsonl(ROWS, "large.jsonl"))
    make = sources._make

    def too_large(source):
        if source.where == large:
            raise WorldError("too large")
        return make(source)

    monkeypatch.setattr(sources, "_make", too_large)
    rows = [{"question": "?", "answer": "x", "corpus": corpus} for corpus in (large, "easy_search")]
    one, other = agent({}).run_sync(rows)
    assert (one.outcome, one.reward, other.reward) == (Outcome.WORLD_FAILURE, None, 1.0)
    assert "too large" in caplog.text


def test_a_malformed_corpus_of_a_task_stops_the_run_and_names_its_line(write_jsonl):
    with pytest.raises(DataError, match="line 1 is not valid JSON"):
        agent({}).run_sync([{"question": "?", "answer": "x", "corpus": str(write_jsonl(["{"]))}])


def test_loading_rows_opens_nothing_for_a_pool_of_other_rows(gate, write_jsonl, tmp_path, monkeypatch):
    monkeypatch.setattr("agentfly.envs.search.tasks.CORPORA", ("slow",))
    write_jsonl(ROWS, "slow.jsonl")
    write_jsonl([{"question": f"{number}?", "answer": "x"} for number in range(40)], "questions.jsonl")
    monkeypatch.setenv("SEARCH_DATA", str(tmp_path))
    assert load_tasks("search_questions", split="test", count=1)[0].fields["corpus"] == str(tmp_path / "slow.jsonl")
    (one,) = agent({}).run_sync([{"question": "?", "answer": "x", "corpus": "easy_search"}])
    assert (one.reward, gate.made) == (1.0, 0)


def test_two_pools_with_different_corpora_in_one_process_do_not_see_each_others(write_jsonl):
    cats, dogs = (
        str(write_jsonl([{"id": 1, "title": name, "text": f"A {name}."}], f"{name}.jsonl")) for name in ("cat", "dog")
    )

    async def main() -> None:
        async with (
            ResourceManager(None, spec_of(SearchEnv, max=1)) as by_task,
            ResourceManager(None, spec_of(SearchEnv, max=1, options={"source": dogs})) as by_option,
        ):
            for corpus, manager, wanted in ((cats, by_task, "A cat."), (cats, by_option, "A dog."), (dogs, by_task, "A dog.")):
                async with manager.lease([SearchEnv], Task("t", (), {"corpus": corpus})) as lease:
                    found = [(await lease[SearchEnv].search(query)).observation for query in ("cat", "dog")]
                assert sum(wanted in each for each in found) == 1, found
                assert sum("Nothing was found" in each for each in found) == 1, found

    asyncio.run(main())


def test_a_source_that_was_opened_a_moment_ago_is_not_opened_again(write_jsonl):
    source = sources.Source(str(write_jsonl(ROWS)), "bm25", None, ())
    made = sources.open_local(source)
    assert sources._start(source).result(60) is made  # as one does who looked just before


def test_a_source_that_cannot_be_opened_is_said_before_the_first_chain(write_jsonl):
    broken = agent({"source": str(write_jsonl(["{"]))})
    with pytest.raises(DataError, match="line 1 is not valid JSON"):
        broken.run_sync([{"question": "?", "answer": "x"}])
    with pytest.raises(ConfigError, match="no corpus"):
        agent({"source": "nowhere.jsonl"}).run_sync([{"question": "?", "answer": "x"}])


def test_a_lease_waits_for_the_corpus_of_its_task_outside_its_own_deadlines(gate, write_jsonl):
    slow = str(write_jsonl(ROWS, "slow.jsonl"))

    async def main() -> None:
        manager = ResourceManager(None, spec_of(SearchEnv, reset_timeout_s=2.0, max=1), timeout_s=2.0)
        threading.Timer(2.5, gate.open.set).start()
        lease = await manager.acquire([SearchEnv], Task("t", (), {"corpus": slow}))
        assert "A cat." in (await lease[SearchEnv].search("cat")).observation
        await lease.release()
        await manager.close()

    asyncio.run(main())


def test_a_reset_that_waits_too_long_says_that_the_index_is_still_made(gate, write_jsonl, monkeypatch):
    monkeypatch.setattr(env_file, "INDEX_TIMEOUT_S", 0.2)
    slow = str(write_jsonl(ROWS, "slow.jsonl"))

    async def main() -> None:
        found = SearchEnv()
        with pytest.raises(WorldError, match="still being built, and will be kept"):
            await found.reset(Task("t", (), {"corpus": slow}))
        gate.open.set()
        monkeypatch.setattr(env_file, "INDEX_TIMEOUT_S", 60.0)
        await found.reset(Task("t", (), {"corpus": slow}))

    asyncio.run(main())
    assert gate.made == 1


def test_chains_of_a_broken_reset_have_no_reward(gate, write_jsonl, monkeypatch):
    monkeypatch.setattr(env_file, "INDEX_TIMEOUT_S", 0.2)
    monkeypatch.setattr(SearchEnv, "make_ready", None)
    (one,) = agent({"source": str(write_jsonl(ROWS, "slow.jsonl"))}).run_sync([{"question": "?", "answer": "x"}])
    assert (one.outcome, one.reward) == (Outcome.WORLD_FAILURE, None)
    assert json.dumps(one.error).count("still being built") == 1
