"""The interface of algorithms: rows of the table and objects of users, each loss and credit against a naive computation."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentfly import plugins
from agentfly.config import Config
from agentfly.errors import ConfigError
from agentfly.learn.algorithms import ALGORITHMS, GRPO, Algorithm, Chains, Credit, TokenLoss, find_algorithm
from agentfly.learn.algorithms import advantages as adv
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.settings import OptimSettings
from agentfly.types import ToolResult
from tests.close import assert_close_to_norm
from tests.learn.chains import chain, tiny_llama
from tests.learn.test_learner import VOCABULARY, gradient, make_groups, plain_gradient, score, weights_of


def everything_is_one(chains: Chains, settings: object) -> Credit:
    return Credit(chains.spread([1.0] * len(chains)))


MINE = Algorithm(name="grpo", credit=everything_is_one)


def sampled_logprobs(model, trajectory):
    """Log-probs of a chain's sampled tokens; a turn that restarts begins a new context."""
    ids, parts = [], []
    for turn in trajectory.turns:
        ids = list(turn.context_ids) if turn.restarts else ids + turn.context_ids
        start, ids = len(ids), ids + turn.completion.token_ids
        parts.append(score(model, ids)[start - 1 :])
    return torch.cat(parts)


def stale_groups(model, **options):
    """Chains whose recorded log-probs differ from the learner's, so that ratios are not 1."""
    groups = make_groups(model, rewards=((1, 0, 0.5), (2, -1, 0)), **options)
    for number, trajectory in enumerate(t for group in groups for t in group):
        for turn in trajectory.turns:
            turn.completion.logprobs[:] = [p + 0.2 * math.sin(number + p) for p in turn.completion.logprobs]
    return groups


def update(model, algorithm, groups, *, loss=None, **optim):
    row = find_algorithm(algorithm)
    settings = row.settings({"old_logprobs": "sampled", **(loss or {})})
    learner = PolicyLearner(model, row, loss=settings, optim=OptimSettings(**{"lr": 1e-2, "max_grad_norm": 1e9, **optim}))
    return learner, learner.update(groups)


def naive_loss(model, groups, per_chain):
    """The mean over all chains of per_chain(log-probs, old log-probs, advantage)."""
    total, count = 0.0, 0
    for group in groups:
        for trajectory, advantage in zip(group, adv.grpo([t.total_reward for t in group]), strict=True):
            old = torch.tensor([p for turn in trajectory.turns for p in turn.completion.logprobs])
            total, count = total + per_chain(sampled_logprobs(model, trajectory), old, float(advantage)), count + 1
    return total / count


def gspo_of_a_chain(logprobs, old, advantage):
    ratio = torch.exp((logprobs - old).mean())
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - 0.05, 1 + 0.08) * advantage)


def cispo_of_a_chain(logprobs, old, advantage):
    weight = torch.exp(logprobs - old).detach().clamp(1 - 0.1, 1 + 0.05)
    return -(weight * advantage * logprobs).mean()


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("budget", [10_000, 12])
@pytest.mark.parametrize(
    ("name", "formula", "clip"),
    [("gspo", gspo_of_a_chain, (0.05, 0.08)), ("cispo", cispo_of_a_chain, (0.1, 0.05))],
)
def test_the_gradient_is_that_of_the_formula_however_the_batch_is_divided(name, formula, clip, budget, splits):
    """With splits and a small budget, the rows of one chain lie in several micro batches."""
    model = tiny_llama(VOCABULARY)
    groups = stale_groups(model, splits=splits)
    expected = naive_loss(model, groups, formula)
    wanted = plain_gradient(model, expected)
    loss = {"clip_low": clip[0], "clip_high": clip[1], "aggregation": "sequence_mean"}
    learner, metrics = update(model, name, groups, loss=loss, max_tokens_per_batch=budget)
    assert_close_to_norm(gradient(learner), wanted)
    assert_close_to_norm(metrics["train/policy_loss"], expected, scale=1.0)
    assert 0 < metrics["train/clip_fraction"] < 1


def test_a_loss_over_the_minibatch_sees_all_of_it_in_one_call():
    calls = []

    def loss(tokens, settings):
        calls.append(len(tokens.logprobs))
        return -((tokens.logprobs - tokens.logprobs.mean()) ** 2) * tokens.advantages

    row = Algorithm(name="mine", credit=GRPO.credit, loss=loss, loss_scope="minibatch", reads=GRPO.reads)
    model = tiny_llama(VOCABULARY)
    groups = make_groups(model)
    found = [gradient(update(copy.deepcopy(model), row, groups, max_tokens_per_batch=b)[0]) for b in (10_000, 12)]
    assert calls == [sum(t.num_sampled for group in groups for t in group)] * 2
    assert_close_to_norm(found[1], found[0])


def test_a_loss_knows_chains_turns_and_groups():
    seen = []

    def loss(tokens, settings):
        seen.append((tokens.chains.tolist(), tokens.turns.tolist(), tokens.groups.tolist(), settings.options["alpha"]))
        return TokenLoss(-tokens.advantages * tokens.mean_over(tokens.turns, tokens.log_ratio).exp())

    row = replace(GRPO, loss=loss, loss_scope="minibatch", options={"alpha": 0.5})
    model = tiny_llama(VOCABULARY)
    groups = make_groups(model, rewards=((1, 0), (0, 1)))
    update(model, row, groups, loss={"options": {"alpha": 2}})
    chains, turns, owners, alpha = seen[0]
    lengths = [[len(turn.completion.token_ids) for turn in t.turns] for group in groups for t in group]
    order = np.argsort(chains, kind="stable")
    assert np.array(chains)[order].tolist() == [c for c, parts in enumerate(lengths) for _ in range(sum(parts))]
    assert sorted(turns) == [
        n for n, length in enumerate(length for parts in lengths for length in parts) for _ in range(length)
    ]
    assert set(zip(chains, owners, strict=True)) == {(0, 0), (1, 0), (2, 1), (3, 1)}
    assert alpha == 2


def test_zero_advantages_are_trained_on_only_if_the_loss_wants_them():
    model = tiny_llama(VOCABULARY)
    groups = make_groups(model, rewards=((1, 1), (0, 0)))
    own = Algorithm(name="mine", credit=GRPO.credit, loss=lambda tokens, _: -tokens.logprobs, reads=GRPO.reads)
    before = weights_of(model)
    assert update(model, replace(own, skips_zero_advantages=True), groups)[1]["train/skipped"] == 1
    assert torch.equal(weights_of(model), before)
    assert update(model, own, groups)[1]["train/skipped"] == 0
    assert not torch.equal(weights_of(model), before)


def test_gigpo_compares_the_turns_that_began_in_the_same_state():
    def played(number, reward, *observations):
        made = chain(*[("c", "ab")] * (len(observations) + 1), reward=reward, number=number)
        for turn, text in zip(made.turns, observations, strict=False):
            turn.results = (ToolResult(observation=text),)
        return made

    trajectories = [played(0, 1.0, "door", "key"), played(1, 0.0, "door"), played(2, 0.0, "wall")]
    rewards = [np.array([0.0] * 2 * (len(t.turns) - 1) + [0.0, t.reward]) for t in trajectories]
    row = ALGORITHMS["gigpo"]
    settings = row.settings({"normalize_std": False, "options": {"turn_weight": 2.0, "turn_gamma": 0.5}})
    found = row.credit(Chains([0, 0, 0], rewards, None, trajectories), settings).advantages
    # returns by turn: 0.25 0.5 1 | 0 0 | 0 0; the first turns share a state, two second turns saw the door
    first, door = 0.25 / 3, 0.25
    episode = [2 / 3, -1 / 3, -1 / 3]
    expected = [
        [episode[0] + 2 * (0.25 - first)] * 2 + [episode[0] + 2 * (0.5 - door)] * 2 + [episode[0]] * 2,
        [episode[1] - 2 * first] * 2 + [episode[1] - 2 * door] * 2,
        [episode[2] - 2 * first] * 2 + [episode[2]] * 2,
    ]
    for part, wanted in zip(found, expected, strict=True):
        assert part == pytest.approx(wanted)
    apart = row.credit(Chains([0, 1, 2], rewards, None, trajectories), settings).advantages
    assert not np.concatenate(apart).any(), "another group has other states"


def test_opo_weights_the_baseline_by_length():
    assert adv.opo([1, 0, 0], [10, 20, 10]) == pytest.approx([0.75, -0.25, -0.25])
    assert adv.opo([1.0], [3]).tolist() == [0]


# ---- the object that was given is used -----------------------------------------------------------------------------------


def test_an_object_with_the_name_of_a_row_is_used():
    model = tiny_llama(VOCABULARY)
    learner, _ = update(model, MINE, make_groups(model))
    assert {a for row in learner.last_samples for a, m in zip(row.advantages, row.mask, strict=True) if m} == {1.0}


def test_a_config_keeps_the_object_and_writes_where_it_is(tmp_path: Path):
    assert find_algorithm(Config.from_dict({"algorithm": MINE}).algorithm) is MINE
    written = Config.from_dict({"algorithm": MINE}).to_toml()
    assert f'algorithm = "{__name__}:MINE"' in written
    (tmp_path / "run.toml").write_text(written)
    assert find_algorithm(Config.load(tmp_path / "run.toml").algorithm) is MINE
    assert Config.from_dict({"algorithm": "GAE"}).algorithm == "ppo"
    assert Config.from_dict({"algorithm": GRPO}).algorithm == "grpo"


@pytest.mark.parametrize("name", ["grpo", "mine"])
def test_a_file_s_algorithm_is_used_whatever_its_name(name: str, tmp_path: Path):
    file = tmp_path / "my.py"
    file.write_text(
        "from agentfly.learn.algorithms import Algorithm, Credit\n"
        f"MINE = Algorithm(name={name!r}, credit=lambda chains, settings: Credit(chains.spread([7.0] * len(chains))))\n"
    )
    (tmp_path / "run.toml").write_text("")
    config = Config.load(tmp_path / "run.toml", [f"algorithm={file}:MINE"])
    again = Config.from_dict({"algorithm": config.to_dict()["algorithm"]})
    for found in (find_algorithm(config.algorithm), find_algorithm(again.algorithm)):
        assert found.credit(Chains([0], [np.zeros(2)]), found.settings()).advantages[0].tolist() == [7, 7]


def test_an_object_that_no_module_holds_is_never_mistaken_for_a_row():
    text = Config.from_dict({"algorithm": replace(MINE, description="made here")}).to_dict()["algorithm"]
    with pytest.raises(ConfigError, match="'grpo' was a Python object"):
        Config.from_dict({"algorithm": text})


@pytest.mark.parametrize("name", ["grpo", "gae"])
def test_a_registered_algorithm_wins_over_a_row_and_an_alias(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(plugins._registered, "algorithms", {name: MINE})
    assert find_algorithm(name) is MINE
    assert find_algorithm(Config.from_dict({"algorithm": name}).algorithm) is MINE
    assert Config.from_dict({"algorithm": name}).to_dict()["algorithm"] == f"{__name__}:MINE"


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: find_algorithm(everything_is_one), "not everything_is_one"),
        (lambda: find_algorithm(f"{__name__}:everything_is_one"), "is function, not an"),
        (lambda: Algorithm(name="", credit=everything_is_one), "needs a name"),
        (lambda: Algorithm(name="x", credit="grpo"), "credit must be a function"),
        (lambda: Algorithm(name="x", credit=everything_is_one, defaults={"clip": 1}), "defaults names 'clip'"),
        (lambda: Algorithm(name="x", credit=everything_is_one, loss_scope="chain"), "no effect without a loss"),
        (lambda: MINE.settings({"options": {"alpha": 1}}), "has no option 'alpha'"),
        (lambda: ALGORITHMS["gigpo"].settings({"options": {"turn_gamma": "x"}}), "must be like its default 0.95"),
        (lambda: ALGORITHMS["gspo"].settings({"dual_clip": 3.0}), "gspo does not use loss.dual_clip"),
    ],
)
def test_what_cannot_be_an_algorithm_is_refused(made, sentence):
    with pytest.raises(ConfigError) as caught:
        made()
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"credit": lambda chains, _: Credit([np.zeros(1)] * len(chains))}, "do not fit"),
        ({"credit": lambda chains, _: Credit(chains.spread([1.0] * len(chains))[::-1])}, "do not fit"),
        ({"credit": lambda chains, _: [0.0]}, "returned list, not a Credit"),
        ({"credit": lambda chains, _: chains.nothing}, "raised AttributeError"),
        ({"needs_critic": True}, "no returns"),
        ({"loss": lambda tokens, _: tokens.logprobs.sum()}, "a number for each of the"),
        ({"loss": lambda tokens, _: tokens.advantages}, "does not depend on tokens.logprobs"),
        ({"loss": lambda tokens, _: tokens.nothing}, "raised AttributeError"),
    ],
)
def test_functions_that_return_something_else_are_refused_before_the_update(changes, sentence):
    model = tiny_llama(VOCABULARY)
    before = weights_of(model)
    with pytest.raises(ConfigError) as caught:
        update(model, replace(MINE, **changes), make_groups(model, rewards=((1, 0, 0.5),)))
    assert sentence in str(caught.value)
    assert torch.equal(weights_of(model), before)
