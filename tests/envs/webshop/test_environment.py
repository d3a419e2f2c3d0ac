"""The environment, its tools and rewards, as a chain uses them."""

from __future__ import annotations

import asyncio
import json
from copy import copy
from pathlib import Path

import pytest

from agentfly import ReactAgent, check_env
from agentfly.config import Config
from agentfly.data import load_tasks
from agentfly.envs.webshop.catalogue.goals import ShopGoal
from agentfly.envs.webshop.env import WebShop
from agentfly.envs.webshop.shop.visit import Visit
from agentfly.envs.webshop.solver import play
from agentfly.envs.webshop.tasks import easy_webshop_tasks, webshop_tasks
from agentfly.envs.webshop.tools import webshop_browser, webshop_step
from agentfly.errors import ConfigError, WorldError
from agentfly.rewards import as_reward
from agentfly.testing import ScriptedEngine
from agentfly.tools import Context, call_tools
from agentfly.types import Task, ToolCall, Trajectory


def actions_for(row) -> list[str]:
    from agentfly.envs.webshop.catalogue.catalogue import open_catalogue

    visit = Visit(open_catalogue(row["catalogue"]), ShopGoal.from_dict(row["goal"]))
    return [action for action, _ in play(visit)]


def reply(action: str) -> str:
    return f"Thought: go on\nAction: webshop_step\nInput: {json.dumps({'action': action})}"


def test_the_shop_is_a_good_environment():
    report = check_env("webshop", **WebShop.conformance())
    assert report.complete, str(report)


@pytest.mark.parametrize("placement", ["loop", "thread", "process"])
def test_a_chain_buys_what_it_was_asked_for(placement):
    (row,) = easy_webshop_tasks("test", 1)
    engine = ScriptedEngine([reply(action) for action in actions_for(row)])
    pools = {"WebShop": {"placement": placement, "max": 1}}
    agent = ReactAgent(engine, tools=["webshop_step"], reward="webshop_score", resources={"pools": pools})
    (trajectory,) = agent.run_sync([row])
    assert trajectory.error is None
    assert (trajectory.reward, trajectory.total_reward) == (1.0, 1.0)
    assert trajectory.components["options"] == trajectory.components["bought"] == 1.0
    assert trajectory.turns[-1].results[0].done
    assert trajectory.num_invalid_calls == 0


def test_a_chain_that_buys_nothing_has_no_reward():
    (row,) = easy_webshop_tasks("test", 1)
    for reward in ("webshop_score", "webshop_success"):
        agent = ReactAgent(ScriptedEngine(["Thought: no\nAnswer: bought it, score 1.0"]), tools=["webshop_step"], reward=reward)
        (trajectory,) = agent.run_sync([row])
        assert trajectory.reward == 0.0


def test_the_share_of_actions_without_effect_is_told():
    (row,) = easy_webshop_tasks("test", 1)
    actions = ["click[nothing of the kind]", *actions_for(row)]
    engine = ScriptedEngine([reply(action) for action in actions])
    agent = ReactAgent(engine, tools=["webshop_step"], reward="webshop_score")
    (trajectory,) = agent.run_sync([row])
    assert trajectory.reward == 1.0
    assert trajectory.components["idle"] == pytest.approx(1 / len(actions))


def test_success_is_all_or_nothing():
    (row,) = easy_webshop_tasks("test", 1)
    right = actions_for(row)
    forgetful = [action for action in right if not any(f"[{value}]" in action for value in row["goal"]["options"].values())]
    for actions, score, success in ((right, 1.0, 1.0), (forgetful, None, 0.0)):
        engine = ScriptedEngine([reply(action) for action in actions])
        mix = {"webshop_score": 1.0, "webshop_success": 1.0}
        (trajectory,) = ReactAgent(engine, tools=["webshop_step"], reward=as_reward(mix)).run_sync([row])
        assert trajectory.components["webshop_success"] == success
        assert score is None or trajectory.components["webshop_score"] == score
        assert 0 < trajectory.components["webshop_score"] <= 1


def call(tool, *arguments, row=None):
    """The results of some calls of one chain."""
    task = load_tasks([row or webshop_tasks("test", 1)[0]])[0]

    async def main():
        shop = WebShop()

        async def lend(kind: type) -> WebShop:
            assert kind is WebShop
            return shop

        await shop.reset(task)
        context = Context(task, Trajectory("c0", task), lend=lend)
        calls = [ToolCall(tool.name, given) for given in arguments]
        return [(await call_tools({tool.name: tool}, [each], context))[0] for each in calls]

    return asyncio.run(main())


def test_both_tools_act_in_the_same_shop():
    (one,) = call(webshop_step, {"action": "search[wool blanket]"})
    (other,) = call(webshop_browser, {"action": "search", "value": "wool blanket"})
    assert one.observation == other.observation
    assert "Page 1 (Total results: " in one.observation
    assert one.reward is None


def test_what_has_no_effect_is_told_to_the_model():
    results = call(webshop_step, {"action": "click[nothing like it]"}, {"action": "buy it"}, {"action": "x" * 100_000})
    assert results[0].observation.startswith("There is nothing called 'nothing like it' to click on this page.\nWebShop [SEP]")
    assert [result.error for result in results] == [None, "bad_arguments", "bad_arguments"]
    assert len(results[2].observation) < 1_000
    (refused,) = call(webshop_browser, {"action": "steal", "value": "mug"})
    assert refused.invalid


def test_after_the_purchase_every_action_is_refused():
    (row,) = webshop_tasks("test", 1)
    arguments = [{"action": action} for action in [*actions_for(row), "search[mug]", "click[buy now]"]]
    results = call(webshop_step, *arguments, row=row)
    assert [result.done for result in results[-3:]] == [True, True, True]
    assert [result.error for result in results[-3:]] == [None, "bad_arguments", "bad_arguments"]
    assert "ended" in results[-1].observation


GOAL = {"asin": "B1", "instruction": "x", "attributes": [], "options": {}, "price_upper": 1}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "has a field 'goal'"),
        ({"goal": "mug"}, "has a field 'goal'"),
        ({"goal": {"asin": "B1"}}, "this is not a WebShop goal"),
        ({"goal": {**GOAL, "attributes": "soft"}}, "task t: .*its 'attributes' must be texts, not 'soft'"),
        ({"goal": {**GOAL, "options": "red"}}, "task t: .*its 'options' must be texts, not 'red'"),
        ({"goal": {**GOAL, "options": {"color": ["red"]}}}, "task t: .*its 'options' must be texts"),
        ({"goal": GOAL, "catalogue": "x\0/y"}, "no path that a file can have"),
        ({"goal": GOAL}, "has no product 'B1'"),
        ({"catalogue": "/nowhere", "goal": {**GOAL, "options": []}}, "no such file or folder"),
    ],
)
def test_a_row_that_cannot_be_opened_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        asyncio.run(WebShop().reset(Task("t", (), fields)))


def test_a_shop_before_its_reset_raises_a_clear_error():
    with pytest.raises(WorldError, match="call reset first"):
        asyncio.run(WebShop().step("search[mug]"))
    with pytest.raises(ConfigError, match="nouns is"):
        WebShop(nouns="verbs")


def test_a_thousand_visits_share_one_catalogue():
    tasks = load_tasks(webshop_tasks("test", 64))

    async def main():
        shops = [WebShop() for _ in range(1_024)]
        for number, shop in enumerate(shops):
            await shop.reset(tasks[number % len(tasks)])
        pages = [(await shop.step("search[mug]")).observation for shop in shops]
        shared = {id(shop._visit.shelves) for shop in shops if shop._visit is not None}
        for shop in shops:
            await shop.close()
        return shared, pages

    shared, pages = asyncio.run(main())
    assert len(shared) == 1
    assert len(set(pages)) == len({task.fields["goal"]["instruction"] for task in tasks})


def test_what_can_be_done_is_listed():
    (row,) = easy_webshop_tasks("test", 1)

    async def main():
        shop = WebShop()
        await shop.reset(load_tasks([row])[0])
        first = shop.admissible()
        for action in actions_for(row):
            assert action.startswith("search[") or action in shop.admissible()
            await shop.step(action)
        return first, shop.admissible()

    assert asyncio.run(main()) == (["search[...]"], [])


def test_the_recipe_reads_and_its_names_are_known():
    recipe = Path(__file__).parents[3] / "recipes" / "webshop.toml"
    from agentfly.build import build_agent, build_tasks

    config = Config.load(recipe, ["data.train_count=20", "data.validation_count=5"])
    agent = build_agent(config)
    train, validation = build_tasks(config)
    agent.check(train)
    assert list(agent.tools) == ["webshop_step"]
    assert (len(train), len(validation)) == (20, 5)


@pytest.mark.parametrize(
    ("catalogue", "brief", "notes", "told"),
    [
        ("files", False, None, False),  # the original's pages, to the letter
        ("files", True, None, True),
        ("generated", False, None, True),
        ("files", False, True, True),
        ("generated", False, False, False),
    ],
)
def test_a_line_about_an_action_without_effect_is_an_option(corner, goal, catalogue, brief, notes, told):
    shop, shelves = WebShop(notes=notes), copy(corner)
    shelves.name = catalogue
    shop._visit = visit = Visit(shelves, goal, brief=brief)
    result = asyncio.run(shop.step("click[nothing of the kind]"))
    assert result.observation == (f"{visit.note}\n{visit.observation}" if told else visit.observation)
    assert "nothing of the kind" in visit.note
    assert shop.num_idle == 1
    with pytest.raises(ConfigError, match="notes is true or false"):
        WebShop(notes="no")


def test_one_page_with_its_options_is_one_state_however_it_was_reached():
    async def key(*actions: str) -> str:
        env = WebShop()
        (row,) = load_tasks(easy_webshop_tasks("test", 1))
        await env.reset(row)
        for action in actions:
            await env.step(action)
        return env.state_key()

    async def main() -> None:
        (row,) = easy_webshop_tasks("test", 1)
        search, product, *options, buy = actions_for(row)
        assert options, "the goal has options to choose"
        start = await key()
        assert await key(search, "click[back to search]") == await key("hm") == start
        item = await key(search, product)
        assert item == await key(search, "click[next >]", "click[< prev]", product, "click[description]", "click[< prev]")
        chosen = await key(search, product, options[0])
        assert chosen == await key(search, product, options[0], options[0])
        seen = [start, item, chosen, await key(search), await key(search, "click[next >]"), await key(search, product, buy)]
        assert len(set(seen)) == len(seen)

    asyncio.run(main())
