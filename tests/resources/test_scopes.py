"""Environments that hold a cancel scope open: it is entered and left in one task, and its failure ends one chain."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from agentfly import ReactAgent, tool
from agentfly.errors import WorldError
from agentfly.resources import ResourceManager, placements, spec_of
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Task

from .worlds import Scoped

PLACEMENTS = [name for name, (_, options) in placements.PLACEMENTS.items() if options is None]
"""Those that work without options."""


@pytest.fixture(autouse=True)
def _no_scope_is_left_in_another_task(caplog: pytest.LogCaptureFixture) -> Any:
    Scoped.closed.clear()
    with caplog.at_level(logging.WARNING):
        yield
    assert not [record.getMessage() for record in caplog.records if "closing" in record.getMessage()]
    assert "RuntimeError" not in Scoped.closed  # anyio: left in another task than it was entered in


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_task_group_is_left_in_the_task_that_entered_it(placement: str) -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Scoped, placement=placement, max=1)) as manager:
            for number in range(3):  # the second reset leaves the group of the first
                async with manager.lease([Scoped], Task(str(number), (), {})) as lease:
                    assert await lease.call(Scoped, "ask") == 7
                    assert await lease[Scoped].ask() == 7

    asyncio.run(main())
    assert Scoped.closed == ([] if placement == "process" else ["", "", ""])


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dead", ["idle", "call"])
def test_a_group_that_fails_ends_the_instance_and_nothing_else(placement: str, dead: str) -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Scoped, placement=placement, max=2)) as manager:
            async with manager.lease([Scoped], Task("lives", (), {})) as other:
                async with manager.lease([Scoped], Task("dies", (), {"dead": dead})) as lease:
                    if dead == "idle":
                        await lease.call(Scoped, "hang_up")
                        await asyncio.sleep(0.01)
                    with pytest.raises(WorldError, match=r"Scoped ended: .* OSError: the server ended"):
                        await asyncio.wait_for(lease.call(Scoped, "ask", wait=True), 30)
                assert await other.call(Scoped, "ask") == 7
            async with manager.lease([Scoped], Task("next", (), {})) as lease:
                assert await lease.call(Scoped, "ask") == 7

    asyncio.run(main())


def test_an_idle_instance_that_ends_is_replaced() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Scoped, max=1)) as manager:
            async with manager.lease([Scoped], Task("first", (), {"dead": "idle"})):
                instance = next(iter(manager._pools["Scoped"].slots)).instance
            instance.env.hang_up()
            async with asyncio.timeout(60):
                while instance.alive:
                    await asyncio.sleep(0)
            async with manager.lease([Scoped], Task("next", (), {})) as lease:
                assert await lease.call(Scoped, "ask") == 7
            assert manager.metrics()["resources/Scoped/failed"] == 1

    asyncio.run(main())


def test_calls_of_one_instance_may_overlap() -> None:
    async def main() -> None:
        async with (
            ResourceManager(None, spec_of(Scoped)) as manager,
            manager.lease([Scoped], Task("t", (), {"dead": "idle"})) as lease,
        ):
            meeting = asyncio.Barrier(2)
            slot = next(iter(manager._pools["Scoped"].slots))
            slot.instance.env.meet = meeting.wait
            assert sorted(await asyncio.wait_for(asyncio.gather(lease[Scoped].meet(), lease[Scoped].meet()), 30)) == [0, 1]

    asyncio.run(main())


def test_an_environment_that_dies_ends_its_own_chain_only() -> None:
    @tool
    async def ask(key: str, client: Scoped) -> str:
        """Ask the server."""
        return str(await client.ask())

    engine = ScriptedEngine(['Action: ask\nInput: {"key": "a"}', "Answer: a"] * 8)
    agent = ReactAgent(engine, tools=[ask], renderer=ByteRenderer())
    rows = [{"question": f"Ask {i}.", "dead": "reset" if i == 0 else None} for i in range(4)]
    assert dict(agent.run_sync(rows).outcomes) == {"world_failure": 1, "finished": 3}
