"""A config is typed, whole and honest: nothing unknown, nothing ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentfly.api import full_key
from agentfly.config import Config, RunSettings, keys, parse_override, to_toml
from agentfly.errors import ConfigError


def load(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return Config.load(path, overrides)


def test_a_file_and_overrides_make_a_config(tmp_path: Path) -> None:
    config = load(
        tmp_path, '[agent]\ntools = ["add"]\n[train]\nlr = 1\n', "algorithm=ppo", "train.lr=1e-5", "agent.model=my/dir"
    )
    assert config.algorithm == "ppo"
    assert config.train.lr == 1e-5
    assert config.agent.tools == ["add"]
    assert config.agent.model == "my/dir"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("trian.lr=1", "unknown config key 'trian.lr'; did you mean 'train.lr'"),
        ("train.learning=1", "unknown config key 'train.learning'"),
        ("lr=1", "did you mean 'train.lr'"),
        ("train.lr=fast", "train.lr must be a number above 0, not 'fast'"),
        ("train.steps=1.5", "train.steps must be an integer"),
        ("seed=0,1,2", r"seed must be an integer, not '0,1,2'; a run has one value: `agentfly sweep` with the same words"),
        ("agent.on_tool_error=stop", "agent.on_tool_error must be 'continue', 'end' or 'raise'"),
        ("algorithm=grop", "did you mean 'grpo'"),
        ("rollout.num_chains=1", "num_chains"),
        ("rollout.num_chains=0", "rollout.num_chains must be an integer of at least 1"),
        ("train.critic_lr=1e-3", "has no critic"),
        ("loss.value_clip=0.1", "does not use loss.value_clip"),
        ("loss.clip_lo=0.1", "clip_low"),
        ("sampling.temperature=-1", "temperature must be 0 or more"),
        ("train=3", r"\[train\] is a table"),
        ("nonsense", "key=value"),
        ("algorithm.name=grpo", "unknown config key 'algorithm.name'"),
    ],
)
def test_a_bad_key_or_value_gets_one_sentence(tmp_path: Path, override: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        load(tmp_path, "", override)


def test_a_file_that_is_not_toml_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(tmp_path, "[agent")
    with pytest.raises(ConfigError, match="no such config file"):
        Config.load(tmp_path / "nowhere.toml")


def test_given_settings_override_the_defaults_of_the_algorithm(tmp_path: Path) -> None:
    assert load(tmp_path, 'algorithm = "dr_grpo"').loss.aggregation == "sequence_sum"
    assert load(tmp_path, 'algorithm = "dr_grpo"', "loss.aggregation=token_mean").loss.aggregation == "token_mean"


@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "rloo", "reinforce++", "dr_grpo"])
def test_a_written_config_reads_back_equal(tmp_path: Path, algorithm: str) -> None:
    config = load(
        tmp_path,
        '[agent]\nreward = {exact_match = 0.8, format = 0.2}\nsystem = "Say \\"hi\\"\\n"\n[sampling]\nstop = ["a"]\n',
        f"algorithm={algorithm}",
        "loss.clip_high=0.28",
    )
    path = tmp_path / "again.toml"
    path.write_text(config.to_toml())
    assert Config.load(path) == config


def test_every_key_has_a_help_text() -> None:
    for key, kind, _, text in keys():
        assert text, key
        assert kind != "anything", key


def test_overrides_are_toml_values_or_plain_strings() -> None:
    assert parse_override("a=1") == ("a", 1)
    assert parse_override("a=[1, 2]") == ("a", [1, 2])
    assert parse_override('a="x=y"') == ("a", "x=y")
    assert parse_override("a=runs/x y") == ("a", "runs/x y")
    assert to_toml({"a": None, "b": {"c d": 1}}) == '[b]\n"c d" = 1\n'


def test_the_refusal_of_an_old_key_names_the_new_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown config key 'train.minibatches'.*'train.num_minibatches'"):
        Config.from_dict({"train": {"minibatches": 4}})


def test_the_last_part_of_a_key_is_enough_for_an_argument_of_train() -> None:
    assert full_key("num_minibatches") == "train.num_minibatches"
    assert full_key("train.num_minibatches") == "train.num_minibatches"


@pytest.mark.parametrize("name", ["../two", "/tmp/two", "a/../../two", "."])
def test_a_run_stays_in_the_folder_of_runs(name: str) -> None:
    with pytest.raises(ConfigError, match="run.name is the name of a folder in run.dir"):
        RunSettings(name=name)
    assert RunSettings(name="two").name == "two"


def test_each_algorithm_of_a_recipe_has_its_own_clip_range() -> None:
    from agentfly.learn.algorithms import ALGORITHMS
    from agentfly.recipes import recipes

    own, seen = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}, set()
    for recipe in recipes():
        for name in ALGORITHMS:
            try:
                loss = Config.load(recipe, [f"algorithm={name}", "loss.reference=pocket"]).loss
            except ConfigError:  # a key of the recipe that this algorithm does not read is refused
                continue
            seen.add(name)
            assert (loss.clip_low, loss.clip_high) == own.get(name, (0.2, 0.28)), (recipe, name)
    assert seen == set(ALGORITHMS)
