"""Environments in chains: asked for by annotation, lent once per chain, reset, bounded and always given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentfly import ReactAgent, Task, reward, tool
from agentfly.errors import ConfigError, WorldError
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Outcome

BUY = 'Action: buy\nInput: {"item": "pen"}'
ANSWER = "Answer: done"


class Shop:
    """Remembers what was bought, and how many shops are open."""

    live = 0
    most = 0
    resets = 0

    def __init__(self) -> None:
        self.basket: list[str] = []
        Shop.live += 1
        Shop.most = max(Shop.most, Shop.live)

    def reset(self, task: Task) -> None:
        Shop.resets += 1
        self.basket = []

    def close(self) -> None:
        Shop.live -= 1


@pytest.fixture(autouse=True)
def all_shops_are_closed_in_the_end() -> Any:
    Shop.live = Shop.most = Shop.resets = 0
    yield
    assert Shop.live == 0


@tool(name="buy", register=False)
async def buy(item: str, shop: Shop) -> str:
    """Buy something."""
    await asyncio.sleep(0)
    shop.basket.append(item)
    return ", ".join(shop.basket)


@reward(name="bought")
def bought(shop: Shop) -> float:
    return float(shop.basket == ["pen"])


def agent_for(replies: list[Any], **options: Any) -> ReactAgent:
    options = {"tools": [buy], "reward": bought, "renderer": ByteRenderer()} | options
    return ReactAgent(ScriptedEngine(replies), **options)


def test_a_tool_and_a_reward_ask_for_one_by_annotation_and_see_the_same() -> None:
    assert "shop" not in buy.schema["function"]["parameters"]["properties"]
    result = agent_for([BUY, ANSWER]).run_sync([{"question": "q"}], num_chains=6, max_concurrency=2)
    assert result.rewards == [1.0] * 6
    assert Shop.most == 2


def test_a_chain_that_never_asks_is_lent_none() -> None:
    result = agent_for([ANSWER], reward=None).run_sync([{"question": "q"}])
    assert result.outcomes == {"finished": 1}
    assert Shop.resets == 0  # one is available, and no chain requested it


def test_nothing_of_the_last_chain_is_visible() -> None:
    agent = agent_for([BUY, ANSWER], resources={"pools": {"Shop": {"max": 1}}})
    result = agent.run_sync([{"question": "q"}], num_chains=5)
    assert [trajectory.turns[0].results[0].observation for trajectory in result] == ["pen"] * 5
    assert Shop.most == 1


def test_env_cls_and_pool_size_are_another_spelling() -> None:
    @tool(name="buy", env_cls=Shop, pool_size=2, register=False)
    async def buy_here(item: str, env: Any) -> str:
        """Buy something."""
        env.basket.append(item)
        await asyncio.sleep(0.001)
        return str(len(env.basket))

    result = agent_for([BUY, ANSWER], tools=[buy_here]).run_sync([{"question": "q"}], num_chains=8)
    assert result.rewards == [1.0] * 8
    assert Shop.most <= 2
    small, plain, large = (
        tool(buy_here.__wrapped__, name=f"buy{size}", env_cls=Shop, pool_size=size, register=False) for size in (1, None, 3)
    )
    agent_for(['Action: buy1\nInput: {"item": "pen"}', ANSWER], tools=[small, plain]).run_sync(
        [{"question": "q"}], num_chains=3
    )
    with pytest.raises(ConfigError, match="pools of 1 and 3 Shop: all of them use one pool"):
        agent_for([ANSWER], tools=[small, plain, large]).run_sync([{"question": "q"}])
    with pytest.raises(ConfigError, match="give env_cls too"):
        tool(buy.__wrapped__, name="buy", pool_size=3, register=False)


@pytest.mark.parametrize("placement", ["loop", "thread", "process"])
def test_where_it_lives_is_config_and_not_code(placement: str) -> None:
    pools = {"Counting": {"placement": placement, "max": 2}}
    agent = agent_for([BUY, ANSWER], tools=[buy_sync], reward=None, resources={"pools": pools})
    result = agent.run_sync([{"question": "q"}], num_chains=4)
    assert [trajectory.turns[0].results[0].observation for trajectory in result] == ["1"] * 4


class Counting(Shop):
    """A shop with a method, which a worker process can be asked for."""

    def add(self, item: str) -> int:
        self.basket.append(item)
        return len(self.basket)


@tool(name="buy", register=False)
def buy_sync(item: str, shop: Counting) -> int:
    """Buy something."""
    return shop.add(item)


def test_a_world_that_breaks_is_closed_and_replaced_and_its_siblings_go_on() -> None:
    calls = 0

    @tool(name="buy", register=False)
    async def breaks(item: str, shop: Shop) -> str:
        """Buy something."""
        nonlocal calls
        calls += 1
        if calls == 2:
            raise WorldError("the shop burned down")
        shop.basket.append(item)
        return "ok"

    result = agent_for([BUY, ANSWER], tools=[breaks]).run_sync([{"question": "q"}], num_chains=4, max_concurrency=1)
    assert result.outcomes == {"finished": 3, "world_failure": 1}
    assert [r for r in result.rewards if r is not None] == [1.0] * 3


def test_an_agents_env_bounds_how_many_chains_are_in_flight() -> None:
    flying = most = 0

    @tool(name="buy", register=False)
    async def watch(item: str, env: Any) -> str:
        """Buy something."""
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.001)
        flying -= 1
        return item

    agent = agent_for([BUY, ANSWER], tools=[watch], reward=None, env=Shop, resources={"pools": {"Shop": {"max": 3}}})
    agent.run_sync([{"question": "q"}], num_chains=12)
    assert most == 3


def test_a_cancelled_run_gives_everything_back() -> None:
    @tool(name="buy", register=False)
    async def hang(item: str, shop: Shop) -> str:
        """Hang."""
        await asyncio.sleep(60)
        return ""

    async def scenario() -> None:
        run = asyncio.create_task(agent_for([BUY], tools=[hang]).run([{"question": "q"}], num_chains=3))
        async with asyncio.timeout(60):
            while Shop.live < 3:
                await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("resources", "sentence"),
    [
        ({"pools": {"Shp": {"max": 1}}}, "resources.pools names 'Shp'"),
        ({"pools": {"Shop": {"size": 1}}}, "no setting 'size'"),
        ({"pools": {"Shop": {"placement": "moon"}}}, "moon"),
        ({"memory_mb": 100, "pools": {"Shop": {"max": 50}}}, "budget"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_before_the_first_chain(resources: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        agent_for([BUY, ANSWER], resources=resources).run_sync([{"question": "q"}])


def test_a_reset_that_raises_is_the_worlds_failure() -> None:
    class Closed(Shop):
        def reset(self, task: Task) -> None:
            raise RuntimeError("closed on Sundays")

    (trajectory,) = agent_for([ANSWER], reward=None, env=Closed).run_sync([{"question": "q"}])
    assert trajectory.outcome is Outcome.WORLD_FAILURE
    assert "closed on Sundays" in (trajectory.error or "")
