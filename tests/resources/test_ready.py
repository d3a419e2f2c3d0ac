"""`make_ready`: what a kind makes once for all instances, before the first chain and outside every other deadline."""

from __future__ import annotations

import asyncio
import os
from typing import Any, ClassVar

import pytest

from agentfly.errors import ConfigError, WorldError
from agentfly.resources import Environment, ResourceManager, spec_of
from agentfly.resources.rpc.env_server import EnvServer
from agentfly.types import Task
from tests.virtual_time import virtual_time

from .worlds import TASK

__all__ = ["virtual_time"]


class Mill(Environment):
    """Needs a wheel, which takes longer to make than its reset may take."""

    seen: ClassVar[list[Any]] = []
    wheel: ClassVar[bool] = False

    def __init__(self, name: str = "") -> None:
        self.name = name

    @classmethod
    async def make_ready(cls, task: Task | None, name: str = "") -> None:
        cls.seen.append((task and task.id, name))
        if name == "none":
            raise ConfigError("no mill is called none")
        if name == "broken":
            raise KeyError("wheel")
        if not cls.wheel:
            await asyncio.sleep(1.2)
            cls.wheel = True

    def reset(self, task: Task) -> str:
        if not self.wheel:
            raise RuntimeError("no wheel")
        return "ready"

    def cache(self) -> str | None:
        return os.environ.get("AGENTFLY_CACHE")


class Other(Mill):
    """A second kind."""


class Tidy(Environment):
    """Has a plain method called `make_ready`."""

    def make_ready(self) -> None:
        raise AssertionError("the manager must not call it")

    def reset(self, task: Task) -> None:
        """Nothing to forget."""


@pytest.fixture(autouse=True)
def _no_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mill, "seen", [])
    monkeypatch.setattr(Mill, "wheel", False)


@pytest.mark.usefixtures("virtual_time")
def test_entering_the_manager_makes_kinds_ready_and_each_lease_does_for_its_task() -> None:
    async def main() -> None:
        async with ResourceManager(None, spec_of(Mill, options={"name": "north"}, reset_timeout_s=1.0)) as manager:
            assert Mill.wheel
            async with manager.lease([Mill], TASK, timeout_s=60) as lease:
                assert lease.observation(Mill) == "ready"
        assert Mill.seen == [(None, "north"), ("t", "north")]

    asyncio.run(main())


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize("known", [True, False])
def test_without_entering_a_lease_and_warm_wait_for_it_outside_their_own_timeouts(known: bool) -> None:
    async def main() -> None:
        manager = ResourceManager(None, *([spec_of(Mill, reset_timeout_s=1.0)] if known else []))
        lease = await manager.acquire([Mill], TASK, timeout_s=1.0)
        assert lease.observation(Mill) == "ready"
        await lease.release()
        Mill.wheel = False
        assert await manager.warm(Mill, 1) >= 1
        assert Mill.wheel
        Mill.wheel = False
        lease = await manager.acquire([], TASK, may=[Mill])
        assert Mill.wheel, "also for a chain that only may ask for it"
        await lease.need([Mill])
        await lease.release()
        await manager.close()

    asyncio.run(main())


def test_an_error_of_make_ready_is_raised_at_once_and_everything_is_closed() -> None:
    async def main() -> None:
        for name, error, says in (
            ("none", ConfigError, "no mill is called none"),
            ("broken", WorldError, "Mill could not be made"),
        ):
            manager = ResourceManager(None, spec_of(Mill, options={"name": name}, min_warm=1))
            with pytest.raises(error, match=says):
                async with manager:
                    pytest.fail("it is not entered")
            assert manager.closed

    asyncio.run(main())


def test_it_is_called_once_per_lease_however_often_tools_ask_for_the_environment() -> None:
    async def main() -> None:
        Mill.wheel = True
        async with ResourceManager(None) as manager:
            lease = await manager.acquire([], TASK, may=[Mill])
            for _ in range(3):
                await lease.need([Mill])
            await lease.release()
            assert Mill.seen == [("t", "")]
            lease = await manager.acquire([], TASK)
            await lease.need([Other])
            await lease.release()
            assert Mill.seen == [("t", ""), ("t", "")], "also for a class that was not registered"

    asyncio.run(main())


def test_a_server_listens_after_make_ready_and_not_at_all_if_it_fails() -> None:
    async def main() -> None:
        async with EnvServer(Mill, options={"name": "north"}, placement="loop") as server:
            assert Mill.wheel
            pool = {"placement": "http", "url": server.url}
            async with ResourceManager(None, spec_of(Mill, **pool)) as manager, manager.lease([Mill], TASK) as lease:
                assert lease.observation(Mill) == "ready"
        assert Mill.seen == [(None, "north")], "only the server calls it, not the trainer"
        server = EnvServer(Mill, options={"name": "broken"})
        with pytest.raises(WorldError, match="Mill could not be made"):
            await server.__aenter__()
        assert server.port == 0

    asyncio.run(main())


def test_a_plain_method_called_make_ready_is_not_called() -> None:
    async def main() -> None:
        async with ResourceManager(None, Tidy) as manager, manager.lease([Tidy], TASK) as lease:
            assert Tidy in lease

    asyncio.run(main())


@pytest.mark.skipif(os.name != "posix", reason="worker processes")
def test_a_worker_process_sees_the_cache_directory_of_the_trainer(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path))

    async def main() -> None:
        spec = spec_of(Cached, placement="process", max=1)
        async with ResourceManager(None, spec) as manager, manager.lease([Cached], TASK) as lease:
            assert await lease.call(Cached, "cache") == str(tmp_path)

    asyncio.run(main())


class Cached(Mill):
    make_ready = None  # type: ignore[assignment]

    def reset(self, task: Task) -> str:
        return "ready"
