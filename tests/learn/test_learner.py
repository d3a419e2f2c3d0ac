"""One update, checked against plain formulas, and what it refuses."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentfly.errors import ConfigError, InvariantError
from agentfly.learn.algorithms import ALGORITHMS
from agentfly.learn.experience import gather
from agentfly.learn.learner import PolicyLearner
from agentfly.learn.metrics import METRICS
from agentfly.learn.samples import rows_of_chains
from agentfly.learn.settings import OptimSettings
from agentfly.types import Completion, Outcome, Turn
from tests.close import ROUNDING, assert_close_to_norm
from tests.learn.chains import chain_of_ids, tiny_llama

VOCABULARY = 24


def score(model, ids, temperature=1.0):
    """Log-probs of ids[1:], all logits at once."""
    logits = model(torch.tensor([ids])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]


def make_chain(model, rng, reward, *, group="g", number=0, turns=1, temperature=1.0, splits=False):
    """A chain of random ids with the log-probs that the model gives them."""
    ids, made = [], []
    for turn in range(turns):
        restarts = turn == 0 or splits
        context = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 5))]
        reply = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
        ids = context if restarts else ids + context
        start, ids = len(ids), ids + reply
        with torch.no_grad():
            logprobs = score(model, ids, temperature)[start - 1 :].tolist()
        made.append(Turn(context, restarts, Completion(text="", token_ids=reply, logprobs=logprobs, versions=[0] * len(reply))))
    trajectory = chain_of_ids([0], [0], reward, group=group, number=number)
    trajectory.turns = made
    return trajectory


def make_groups(model, seed=0, *, rewards=((1, 0, 0.5), (0, 0, 0), (2, -1, 0)), **options):
    rng = random.Random(seed)
    return [
        [make_chain(model, rng, float(r), group=str(g), number=c, **{"turns": 1 + c, **options}) for c, r in enumerate(group)]
        for g, group in enumerate(rewards)
    ]


def learner_of(model, algorithm="grpo", *, loss=None, temperature=1.0, reference=None, **optim):
    settings = ALGORITHMS[algorithm].settings(loss)
    options = {"lr": 1e-2, "max_grad_norm": 1e9, **optim}
    return PolicyLearner(
        model, algorithm, loss=settings, optim=OptimSettings(**options), temperature=temperature, reference=reference
    )


def gradient(learner, name="optimizer"):
    """The gradient of a first step, read back from Adam: its average is 0.1 of it."""
    state = learner.state_dict()[name]["adam"]["state"]
    return torch.cat([state[i]["exp_avg"].flatten() / 0.1 for i in sorted(state)])


def weights_of(model):
    return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


def plain_gradient(model, loss):
    """The gradient of `loss` in the order that the optimizer keeps: matrices first."""
    grads = torch.autograd.grad(loss, list(model.parameters()))
    order = [g for g in grads if g.dim() >= 2] + [g for g in grads if g.dim() < 2]
    return torch.cat([g.flatten() for g in order])


def plain_loss(model, groups, advantage, weight):
    """-sum of weight x advantage x log-prob: on-policy, the ratio is 1 and this has the same gradient as the clipped loss."""
    total = 0.0
    for g, group in enumerate(groups):
        for c, trajectory in enumerate(group):
            ids, sampled = [], []
            for turn in trajectory.turns:
                ids += turn.context_ids
                sampled += range(len(ids), len(ids) + len(turn.completion.token_ids))
                ids += turn.completion.token_ids
            logprobs = score(model, ids)
            total = total - weight(g, c) * advantage[g][c] * sum(logprobs[i - 1] for i in sampled)
    return total


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
def test_the_gradient_is_that_of_the_formula(aggregation):
    """The middle group has no advantage: it is not run, but counts in every divisor."""
    model = tiny_llama(VOCABULARY)
    groups = make_groups(model)
    loss = {"aggregation": aggregation} | ({"sequence_divisor": 7.0} if aggregation == "sequence_sum" else {})
    lengths = [[t.num_sampled for t in group] for group in groups]
    weight = {
        "token_mean": lambda g, c: 1 / sum(map(sum, lengths)),
        "sequence_mean": lambda g, c: 1 / (9 * lengths[g][c]),
        "sequence_sum": lambda g, c: 1 / (9 * 7.0),
    }[aggregation]
    advantage = []
    for group in groups:
        rewards = torch.tensor([t.reward for t in group])
        advantage.append(((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist())
    expected = plain_gradient(model, plain_loss(model, groups, advantage, weight))
    learner = learner_of(model, loss=loss)
    metrics = learner.update(groups)
    assert_close_to_norm(gradient(learner), expected)
    assert_close_to_norm(metrics["train/grad_norm"], expected.norm())
    assert metrics["train/zero_advantage_groups"] == 1


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "sequence_sum"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_many_micro_batches_give_the_gradient_of_one(algorithm, aggregation):
    model = tiny_llama(VOCABULARY)
    groups = make_groups(model, splits=True)
    found = []
    for budget in (10_000, 12):
        loss = {"aggregation": aggregation, "entropy_coef": 0.01, "kl_coef": 0.1, "kl_in": "loss"}
        learner = learner_of(copy.deepcopy(model), algorithm, loss=loss, max_tokens_per_batch=budget)
        metrics = learner.update(groups)
        parts = [gradient(learner)] + ([gradient(learner, "critic_optimizer")] if algorithm == "ppo" else [])
        found.append((torch.cat(parts), metrics["train/loss"]))
    assert_close_to_norm(found[1][0], found[0][0])
    assert_close_to_norm(found[1][1], found[0][1], scale=1.0)


def test_a_chain_that_was_split_counts_as_one_sequence():
    model = tiny_llama(VOCABULARY)
    rng = random.Random(3)
    split = make_chain(model, rng, 1.0, turns=3, splits=True)
    other = make_chain(model, rng, 0.0, number=1)
    learner = learner_of(model, loss={"aggregation": "sequence_mean"})
    metrics = learner.update([[split, other]])
    assert metrics["train/samples"] == 4
    assert metrics["train/splits"] == 2
    # mean over chains of the mean over tokens of -A r, with r = 1 and A = +-0.7071: they cancel only if each chain counts once
    assert_close_to_norm(metrics["train/policy_loss"], 0.0, scale=1.0)


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        ("grpo", {}),
        ("dr_grpo", {"sequence_divisor": 4.0}),
        ("rloo", {}),
        ("reinforce++", {}),
        ("reinforce++_baseline", {}),
        ("ppo", {}),
        ("ppo", {"critic": "shared"}),
    ],
)
def test_a_few_updates_raise_the_probability_of_rewarded_tokens(algorithm, loss):
    model = tiny_llama(12)
    learner = learner_of(model, algorithm, loss=loss, lr=5e-3, max_grad_norm=1.0, epochs=2, num_minibatches=2)
    generator = torch.Generator().manual_seed(0)

    def probabilities(contexts):
        with torch.no_grad():
            return torch.softmax(model(torch.tensor(contexts)).logits[:, -1], -1)

    def sample(context):
        """Sixteen chains of two tokens; the reward is the share of 7s."""
        ids, logprobs = [list(context) for _ in range(16)], [[] for _ in range(16)]
        for _ in range(2):
            p = probabilities(ids)
            drawn = torch.multinomial(p, 1, generator=generator)[:, 0].tolist()
            for n, token in enumerate(drawn):
                logprobs[n].append(math.log(p[n, token]))
                ids[n].append(token)
        replies = [row[len(context) :] for row in ids]
        return [
            chain_of_ids(context, reply, reply.count(7) / 2, logprobs=logprobs[n], number=n, version=learner.version)
            for n, reply in enumerate(replies)
        ]

    prompts = [[2, 3], [4, 5, 6], [8]]
    before = sum(probabilities([prompt])[0, 7].item() for prompt in prompts) / 3
    for _ in range(15):
        metrics = learner.update([sample(prompt) for prompt in prompts])
        assert metrics["train/logprob_gap"] < ROUNDING if "train/logprob_gap" in metrics else metrics["train/skipped"]
        assert set(metrics) <= set(METRICS)
    after = sum(probabilities([prompt])[0, 7].item() for prompt in prompts) / 3
    assert before < 0.3
    assert after > 0.6, (before, after)


def test_a_step_without_advantage_leaves_weights_and_version_alone():
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, loss={"entropy_coef": 0.1})
    learner.update(make_groups(model))  # gives Adam momentum that would move the weights on its own
    before = weights_of(model)
    metrics = learner.update(make_groups(model, rewards=((1, 1), (0.3, 0.3, 0.3))))
    assert torch.equal(weights_of(model), before)
    assert (metrics["train/skipped"], metrics["train/optimizer_steps"]) == (1, 0)
    assert metrics["train/zero_advantage_groups"] == 2
    assert learner.version == 1
    assert learner.update(make_groups(model))["train/skipped"] == 0
    assert learner.version == 2


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_broken_lonely_and_empty_groups_are_counted_and_never_crash(algorithm):
    model = tiny_llama(VOCABULARY)
    groups = make_groups(model, rewards=((1, 0), (1, 0), (1,)))
    for trajectory in (*groups[1], groups[0][1]):
        trajectory.outcome, trajectory.reward = Outcome.WORLD_FAILURE, None
    learner = learner_of(model, algorithm)
    metrics = learner.update([*groups, []])
    assert metrics["train/untrainable_chains"] == 3
    assert metrics["train/samples"] == 2
    if ALGORITHMS[algorithm].needs_group:
        assert metrics["train/zero_advantage_groups"] == 4
        assert metrics["train/skipped"] == 1
    nothing = learner.update([groups[1]])
    assert (nothing["train/samples"], nothing["train/skipped"]) == (0, 1)


def spoil_log_probs(monkeypatch, chains=(0,)):
    """From now on the learner gets a NaN for the first token of these chains: one that came after the tokens were checked."""

    def spoiled(*args, **options):
        experience = gather(*args, **options)
        for number in chains:
            experience.sampled[experience.tokens_of(number).start] = float("nan")
        return experience

    monkeypatch.setattr("agentfly.learn.learner.gather", spoiled)


def test_a_loss_that_is_not_finite_stops_with_the_weights_untouched(monkeypatch):
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, loss={"old_logprobs": "sampled"})
    before = weights_of(model)
    with monkeypatch.context() as patch:
        spoil_log_probs(patch)
        with pytest.raises(InvariantError, match=r"the loss is nan.*not applied.*version 0"):
            learner.update(make_groups(model))
    assert torch.equal(weights_of(model), before)
    assert learner.version == 0
    assert all(p.grad is None for p in model.parameters())
    learner.update(make_groups(model))
    assert learner.version == 1


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 0.5])
def test_a_log_prob_that_no_model_gives_is_refused(value):
    model = tiny_llama(VOCABULARY)
    groups = make_groups(model)
    groups[2][1].turns[0].completion.logprobs[0] = value
    before = weights_of(model)
    with pytest.raises(InvariantError, match="'2/1' holds a log-prob that is not a finite number of at most 0"):
        learner_of(model).update(groups, pytest.fail, pytest.fail)
    assert torch.equal(weights_of(model), before)


def test_a_mask_that_is_shifted_by_one_is_refused(monkeypatch):
    model = tiny_llama(VOCABULARY)

    def shifted(trajectories):
        return [[replace(row, mask=np.roll(row.mask, -1)) for row in rows] for rows in rows_of_chains(trajectories)]

    monkeypatch.setattr("agentfly.learn.experience.rows_of_chains", shifted)
    with pytest.raises(InvariantError, match="the mask covers"):
        learner_of(model).update(make_groups(model), pytest.fail, pytest.fail)


def test_a_reward_that_is_not_finite_and_a_version_from_the_future_are_refused():
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model)
    groups = make_groups(model)
    groups[0][0].reward = float("inf")
    with pytest.raises(InvariantError, match="'0/0' has the reward inf"):
        learner.update(groups)
    groups = make_groups(model)
    groups[0][0].turns[0].completion.versions[0] = 3
    with pytest.raises(InvariantError, match="version 3 of the weights, but the learner is at version 0"):
        learner.update(groups)


def test_the_gap_between_sampled_and_recomputed_log_probs_is_measured_at_the_sampling_temperature():
    model = tiny_llama(VOCABULARY)
    groups = make_groups(model, temperature=0.6)
    assert learner_of(copy.deepcopy(model), temperature=0.6).update(groups)["train/logprob_gap"] < ROUNDING
    assert learner_of(copy.deepcopy(model), temperature=1.0).update(groups)["train/logprob_gap"] > 0.1
    many = learner_of(copy.deepcopy(model), temperature=0.6, epochs=2, num_minibatches=3).update(groups)
    assert many["train/logprob_gap"] < ROUNDING, "measured before the weights move"
    assert many["train/kl"] > 0


@pytest.mark.parametrize(("mode", "clipped"), [("sampled", True), ("recompute", False), ("auto", True)])
@pytest.mark.parametrize("epochs", [1, 2])
def test_tokens_of_older_weights_keep_their_own_denominator_unless_told_otherwise(mode, clipped, epochs):
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, loss={"old_logprobs": mode, "correction": "off"}, epochs=epochs, lr=1e-6)
    learner.update(make_groups(model))
    stale = make_groups(model, seed=1)  # marked with version 0, and the learner is at 1
    for trajectory in (t for group in stale for t in group):
        for turn in trajectory.turns:
            turn.completion.logprobs[:] = [p - 1.0 for p in turn.completion.logprobs]
    metrics = learner.update(stale)
    assert (metrics["train/clip_fraction"] > 0) == clipped
    assert "train/logprob_gap" not in metrics, "the gap is about tokens that the present weights drew"


def test_kl_in_the_reward_is_taken_off_each_token():
    model, reference = tiny_llama(VOCABULARY), tiny_llama(VOCABULARY, seed=5)
    groups = make_groups(model, rewards=((1, 0, 0.5),))
    learner = learner_of(model, "rloo", loss={"kl_coef": 0.1}, reference=reference)
    metrics = learner.update(groups)
    scores, every = [], []
    for trajectory in groups[0]:
        ids, gaps = [], []
        for turn in trajectory.turns:
            ids += turn.context_ids + turn.completion.token_ids
            start = len(ids) - len(turn.completion.token_ids)
            with torch.no_grad():
                theirs = score(reference, ids)[start - 1 :]
            gaps += (torch.tensor(turn.completion.logprobs) - theirs).tolist()
        scores.append(trajectory.reward - 0.1 * sum(gaps))
        every += gaps
    expected = [s - (sum(scores) - s) / 2 for s in scores]
    found = [next(a for a, m in zip(row.advantages, row.mask, strict=True) if m) for row in learner.last_samples]
    assert_close_to_norm(found, expected, scale=1.0)
    assert_close_to_norm(metrics["train/reference_kl"], sum(every) / len(every), scale=1.0)


def test_kl_in_the_loss_holds_the_policy_near_its_reference():
    far = {}
    for coefficient in (1e-6, 3.0):
        model = tiny_llama(VOCABULARY)
        learner = learner_of(model, loss={"kl_coef": coefficient}, lr=3e-3)
        groups = make_groups(model)
        first = learner.update(groups)
        assert_close_to_norm(first["train/reference_kl"], 0.0, scale=1.0, of="the reference is the policy as it was")
        for _ in range(8):
            far[coefficient] = learner.update(groups)["train/reference_kl"]
    assert 0 < far[3.0] < 0.5 * far[1e-6]


def test_the_critic_learns_while_the_policy_has_nothing_to_learn():
    """All returns and all values are equal: whitened advantages are 0, but the value of these states is not known yet."""
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, "ppo", loss={"value_clip": 0}, lr=3e-3, critic_epochs=1, critic_minibatches=1)
    before = weights_of(model)
    assert learner.update(make_groups(model, rewards=((1, 1), (1, 1))))["train/value_loss"] == pytest.approx(0.0, abs=1e-9)
    metrics = learner.update(make_groups(model, rewards=((2, 2), (2, 2))))
    assert metrics["train/value_loss"] == pytest.approx(0.5), "the head began at the mean of 1: half of the squared error of 1"
    assert metrics["train/skipped"] == 1
    assert torch.equal(weights_of(model), before)
    assert learner.version == 0
    assert learner.update(make_groups(model, rewards=((2, 2), (2, 2))))["train/value_loss"] < 0.49


def test_explained_variance_rises_as_the_critic_learns():
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, "ppo", loss={"value_clip": 0}, lr=1e-6, critic_lr=1e-2)
    groups = make_groups(model)
    found = [learner.update(groups)["train/explained_variance"] for _ in range(15)]
    assert_close_to_norm(found[0], 0.0, scale=1.0)
    assert found[-1] > 0.5


@pytest.mark.parametrize("steps", [{}, {"epochs": 2, "num_minibatches": 2}])
def test_a_check_that_fails_leaves_everything_as_it_was(steps):
    model = tiny_llama(VOCABULARY)
    groups = make_groups(model, temperature=0.6)
    learner = learner_of(model, "ppo", critic_warmup_steps=0, **steps)
    before, state = weights_of(model), copy.deepcopy(learner.state_dict())
    measured = []

    def refuse(metrics):
        measured.append(metrics["train/logprob_gap"])
        raise InvariantError("too far")

    with pytest.raises(InvariantError, match="too far"):
        learner.update(groups, refuse)
    assert measured[0] > 0.1
    assert torch.equal(weights_of(model), before)
    assert all(p.grad is None for p in model.parameters())
    assert (learner.version, learner.half_updated) == (0, False)
    after = learner.state_dict()
    assert after["updates"] == state["updates"]
    for name, value in state["modules"]["critic"].items():
        assert torch.equal(after["modules"]["critic"][name], value)
    learner.update(groups, measured.append)
    assert len(measured) == 2, "called once per update"


def test_an_update_that_fails_half_way_says_so(monkeypatch):
    model = tiny_llama(VOCABULARY)
    learner = learner_of(model, num_minibatches=3, loss={"old_logprobs": "sampled"})
    groups = make_groups(model, rewards=((1, 0, 0.5),))
    seeds = iter(range(50))
    while True:  # the order of the minibatches decides whether a good one comes first
        learner._seed = next(seeds)
        learner._version = 0
        with monkeypatch.context() as patch:
            spoil_log_probs(patch, chains=(1, 2))
            with pytest.raises(InvariantError, match="the loss is nan"):
                learner.update(groups)
        if learner.version:
            break
        assert not learner.half_updated
    assert learner.half_updated
    learner.update(make_groups(model))
    assert not learner.half_updated


def test_a_separate_critic_warms_up_alone_takes_more_steps_and_starts_at_the_mean():
    model = tiny_llama(VOCABULARY)
    options = {"critic_warmup_steps": 2, "critic_epochs": 3, "critic_minibatches": 4, "critic_lr": 1e-9}
    learner = learner_of(model, "ppo", **options)
    taken = []
    learner._critic_optimizer.step, real = lambda: (taken.append(1), real()), learner._critic_optimizer.step
    before = weights_of(model)
    for number in range(3):
        metrics = learner.update(make_groups(model))
        assert (metrics.get("train/critic_warmup", 0), metrics["train/skipped"]) == ((1, 1) if number < 2 else (0, 0))
        assert torch.equal(weights_of(model), before) == (number < 2)
    assert len(taken) == 3 * 3 * 4
    tokens = [(t.total_reward, t.num_sampled) for group in make_groups(model) for t in group]
    mean = sum(r * n for r, n in tokens) / sum(n for _, n in tokens)
    assert learner._modules.critic.head.linear.bias.item() == pytest.approx(mean, abs=1e-6)
    assert learner_of(tiny_llama(VOCABULARY), "ppo", total_steps=9).critic_warmup_steps == 3
    assert learner_of(tiny_llama(VOCABULARY), "ppo", total_steps=90).critic_warmup_steps == 7
    assert learner_of(tiny_llama(VOCABULARY), "ppo", total_steps=90, loss={"critic": "shared"}).critic_warmup_steps == 0


@pytest.mark.parametrize(
    ("algorithm", "loss"),
    [
        ("grpo", {"kl_coef": 0.1}),
        ("ppo", {"kl_coef": 0.1}),
        ("ppo", {"critic": "shared"}),
    ],
)
def test_a_resumed_learner_goes_on_exactly(tmp_path, algorithm, loss):
    model = tiny_llama(VOCABULARY)
    schedule = {"warmup_steps": 2, "schedule": "cosine", "total_steps": 9, "epochs": 2, "num_minibatches": 2}
    if algorithm == "ppo" and "critic" not in loss:
        schedule["critic_warmup_steps"] = 1
    learner = learner_of(model, algorithm, loss=loss, **schedule)
    start = copy.deepcopy(model.state_dict())
    for seed in range(2):
        learner.update(make_groups(model, seed))
    torch.save(learner.state_dict(), tmp_path / "state.pt")

    other = tiny_llama(VOCABULARY)
    other.load_state_dict(model.state_dict())
    resumed = learner_of(other, algorithm, loss=loss, **schedule)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.version == learner.version == 2 - schedule.get("critic_warmup_steps", 0)
    groups = make_groups(model, 7)
    one, other_one = learner.update(groups), resumed.update(groups)
    # The averages that the check of the optimizer's steps keeps in float64 begin with Adam's float32 ones after a resume.
    assert max(one.pop("train/step_error"), other_one.pop("train/step_error")) < 1e-6
    assert one == other_one
    assert torch.equal(weights_of(model), weights_of(other))
    assert any(not torch.equal(value, model.state_dict()[name]) for name, value in start.items())


def test_resuming_with_another_critic_is_refused():
    model = tiny_llama(VOCABULARY)
    state = learner_of(model, "ppo").state_dict()
    with pytest.raises(ConfigError, match=r"\(ppo\) has a critic, unlike this run \(grpo\)"):
        learner_of(model, "grpo").load_state_dict(state)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_small_updates_of_a_bfloat16_model_are_not_rounded_away():
    model = tiny_llama(VOCABULARY).to(torch.bfloat16)
    groups = make_groups(model)
    learner = learner_of(model, lr=1e-4, loss={"old_logprobs": "recompute"})
    master = learner.state_dict()["optimizer"]["masters"][0].clone()
    for _ in range(20):
        learner.update(groups)
    moved = (learner.state_dict()["optimizer"]["masters"][0] - master).abs()
    assert moved.max() > 1e-3, "twenty steps of 1e-4 add up"
    parameter = next(p for p in model.parameters() if p.dim() >= 2)
    torch.testing.assert_close(parameter.float(), learner.state_dict()["optimizer"]["masters"][0], rtol=1e-2, atol=1e-2)


def test_the_model_is_shared_and_never_copied_or_left_in_training_mode():
    model = tiny_llama(VOCABULARY).train()
    learner = learner_of(model)
    learner.update(make_groups(model))
    assert learner.model is model
    assert not model.training


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda m: learner_of(m, "grpo", critic_lr=1e-3), "grpo has no critic: remove train.critic_lr"),
        (lambda m: learner_of(m, "grpo", critic_epochs=2), "grpo has no critic: remove train.critic_epochs"),
        (
            lambda m: learner_of(m, "ppo", loss={"critic": "shared"}, critic_minibatches=2),
            "train.critic_minibatches is only used",
        ),
        (lambda m: learner_of(m, reference=m), "kl_coef is 0"),
        (lambda m: learner_of(m, schedule="linear"), "set train.total_steps"),
        (lambda m: learner_of(m, temperature=0.0), "greater than 0"),
        (lambda m: PolicyLearner(m, "grpo", loss=ALGORITHMS["ppo"].settings({"lam": 0.5})), "grpo does not use loss.lam"),
    ],
)
def test_what_would_be_ignored_is_refused(make, sentence):
    with pytest.raises(ConfigError) as caught:
        make(tiny_llama(VOCABULARY))
    assert sentence in str(caught.value)
