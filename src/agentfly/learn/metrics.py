"""The metrics that a learner returns, by name, each with one line that says what it is.

A name that is not in this table is not returned (a test holds the learner to it); one that was not measured in a step, because
nothing of its kind was run, is left out of that step rather than filled with a made-up number.
"""

from __future__ import annotations

METRICS = {
    "train/loss": "All that was minimised: policy loss, KL, entropy bonus, value loss (mean over optimizer steps).",
    "train/policy_loss": "The clipped surrogate alone.",
    "train/value_loss": "The critic's loss (PPO).",
    "train/kl": "KL from the old policy to the present one, k3, over sampled tokens; 0 with one on-policy optimizer step.",
    "train/reference_kl": "KL to the reference model by the chosen estimator, over sampled tokens (kl_coef > 0).",
    "train/entropy": "Mean entropy of the policy where it sampled, in nats, over the chains that were run.",
    "train/clip_fraction": "Share of tokens whose ratio was cut.",
    "train/grad_norm": "Length of the policy's gradient before clipping (mean over optimizer steps).",
    "train/critic_grad_norm": "Length of the critic's gradient before clipping (PPO with a separate critic).",
    "train/loss_scale": "What the loss of a float16 model is multiplied with so that small gradients are not lost.",
    "train/lr": "Learning rate of this step.",
    "train/samples": "Training rows made from this step's chains.",
    "train/tokens": "Sampled tokens in those rows.",
    "train/splits": "Rows beyond one per chain: how often a template rewrote history.",
    "train/untrainable_chains": "Chains left out because the world failed, they were cancelled, or nothing was sampled.",
    "train/zero_advantage_groups": "Groups that taught nothing: siblings all equal, or fewer than two of them trainable.",
    "train/skipped": "1 where every advantage was 0: the policy was not stepped and the version did not change.",
    "train/optimizer_steps": "Optimizer steps taken on the policy.",
    "train/logprob_gap": "Mean |sampled - recomputed log-prob| of tokens that the present weights drew: 0 if both agree.",
    "train/explained_variance": "1 - var(return - value) / var(return), before the step (PPO).",
    "train/padding_waste": "Share of padding among the tokens that were run.",
}
