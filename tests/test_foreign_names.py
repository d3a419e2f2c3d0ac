"""Names of other libraries are refused with the right name, in configs, in `train` and in agents."""

from __future__ import annotations

from typing import Any

import pytest

import agentfly
from agentfly import CodeAgent, Config, ReactAgent, ToolAgent, tool
from agentfly.config import SECTIONS, keys
from agentfly.errors import ConfigError
from agentfly.foreign_names import config_hint, find_foreign, foreign_names
from agentfly.testing import ByteRenderer, ScriptedEngine


@tool
def shout(text: str) -> str:
    """Shout."""
    return text.upper()


def agent(**options: Any) -> ReactAgent:
    return ReactAgent(ScriptedEngine(["Answer: x"]), renderer=ByteRenderer(), **options)


@pytest.mark.parametrize("row", foreign_names(), ids=lambda row: f"{row.library}:{row.name}")
def test_every_row_leads_to_a_key_that_exists(row: Any) -> None:
    known = {key for key, *_ in keys()} | set(SECTIONS) | {"tasks", "agent.engine.chat_template", "agent.options.parser"}
    assert row.ours in known
    # The original package's `backend` is an argument of agents; here it is a config key and no argument of agents.
    assert row.name not in known or row.name == "backend"
    assert row.ours in (config_hint(row.name) or "")
    assert find_foreign(row.name) is not None


@pytest.mark.parametrize(
    ("dotted", "ours"),
    [
        ("num_generations", "rollout.num_chains"),
        ("loss.beta", "loss.kl_coef"),
        ("train.learning_rate", "train.lr"),
        ("max_completion_length", "sampling.max_tokens"),
        ("epsilon", "loss.clip_low"),
        ("per_device_train_batch_size", "rollout.num_tasks"),
        ("actor_rollout_ref.rollout.n", "rollout.num_chains"),
        ("actor_rollout_ref.actor.optim.lr", "train.lr"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", "train.num_minibatches"),
        ("algorithm.adv_estimator", "'algorithm'"),
        ("data.train_batch_size", "rollout.num_tasks"),
        ("trainer.total_epochs", "train.steps"),
    ],
)
def test_a_key_of_another_library_is_refused_with_our_key(dotted: str, ours: str) -> None:
    tree: Any = 1
    for part in reversed(dotted.split(".")):
        tree = {part: tree}
    with pytest.raises(ConfigError, match=ours):
        Config.from_dict(tree)


def test_train_refuses_an_argument_of_another_library_with_our_key() -> None:
    rows = [{"question": f"{n}?", "answer": "x"} for n in range(20)]
    with pytest.raises(ConfigError, match=r"'num_generations' of TRL is 'rollout.num_chains' here"):
        agentfly.train(agent(reward="exact_match"), rows, num_generations=4)
    with pytest.raises(ConfigError, match=r"'train_dataset' of transformers is 'data.train' here \(the argument data of train"):
        agentfly.train(agent(reward="exact_match"), train_dataset=rows)
    with pytest.raises(ConfigError, match="train takes an agent or a Config, not str"):
        agentfly.train("pocket", rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("reward_fn", "reward="),
        ("reward_funcs", "reward="),
        ("template", "engine={'chat_template': ...}"),
        ("model_name_or_path", "model="),
        ("generation_config", "sampling="),
        ("backend", "engine="),
        ("max_new_tokens", "sampling={'max_tokens': ...}"),
        ("system_prompt", "system="),
        ("num_generations", "agentfly.train(agent, ..., num_chains=...)"),
        ("train_dataset", "agentfly.train(agent, data=...)"),
        ("max_turn", "did you mean 'max_turns'"),
    ],
)
def test_an_agent_refuses_a_foreign_argument_with_its_own(name: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        agent(**{name: "x"})
    assert f"ReactAgent has no argument {name!r}" in str(caught.value)
    assert ours in str(caught.value)


@pytest.mark.parametrize("kind", [ReactAgent, ToolAgent, CodeAgent])
def test_a_foreign_name_of_the_model_is_refused_with_our_name(kind: Any) -> None:
    with pytest.raises(ConfigError, match=r"'model_name_or_path' of AgentFly \(original\) is model=... here"):
        kind(model_name_or_path="Qwen/Qwen2.5-3B-Instruct")
    with pytest.raises(ConfigError, match="the model's name is empty"):
        kind()


def test_an_unknown_argument_gets_the_list_with_those_of_the_agents_kind() -> None:
    with pytest.raises(ConfigError, match="ToolAgent has no argument 'zzz'; it has model, parser, tools"):
        ToolAgent(ScriptedEngine([]), zzz=1)


def test_run_refuses_a_foreign_argument_with_its_own() -> None:
    with pytest.raises(ConfigError, match="ReactAgent.run has no argument 'generation_config'; .*sampling="):
        agent().run_sync([{"question": "q"}], generation_config={})
    with pytest.raises(ConfigError, match=r"'start_messages' of AgentFly \(original\) is tasks here"):
        agent().run_sync(start_messages=[])


def test_one_tool_needs_no_list() -> None:
    assert list(agent(tools=shout).tools) == ["shout"]
    assert list(agent(tools=None).tools) == []
    assert agent().tools == {}


@pytest.mark.parametrize(("tools", "sentence"), [(3, "not int"), ("shout", r"write tools=\['shout'\]")])
def test_tools_of_another_type_get_a_sentence(tools: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        agent(tools=tools)
    with pytest.raises(ConfigError, match=sentence):
        CodeAgent(ScriptedEngine([]), tools=tools)
