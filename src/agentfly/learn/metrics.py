"""The learner's metrics: their names with one line each, and `Totals`, which accumulates means.

A learner returns only names of this table (a test checks it). A metric that was not measured in a step is left out of that
step's result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the table is read where torch is not loaded
    from torch import Tensor

    from .group import LearnerGroup

METRICS = {
    "train/loss": "The minimised sum: policy loss, KL, entropy bonus, a shared critic's loss (mean over optimizer steps).",
    "train/policy_loss": "The algorithm's loss alone, without KL and entropy bonus.",
    "train/value_loss": "The critic's loss (PPO).",
    "train/kl": "KL from the old policy to the current one, k3, over sampled tokens; 0 with one on-policy optimizer step.",
    "train/reference_kl": "KL to the reference model by the chosen estimator, over sampled tokens (kl_coef > 0).",
    "train/kl_coef": "loss.kl_coef in this step, if loss.kl_target adapts it.",
    "train/entropy_coef": "loss.entropy_coef in this step, if loss.entropy_target adapts it; 0 after a step above the target.",
    "train/preference_accuracy": "Share of pairs whose chosen chain gained more on the reference than the rejected one (dpo).",
    "train/preference_margin": "Mean margin of the pairs: beta x (log p/q of the chosen chain - of the rejected one) (dpo).",
    "train/entropy": "Mean entropy of the policy at sampled tokens, in nats, over the chains that were run.",
    "train/clip_fraction": "Share of tokens whose ratio was clipped.",
    "train/grad_norm": "Norm of the policy's gradient before clipping (mean over optimizer steps).",
    "train/critic_grad_norm": "Norm of the critic's gradient before clipping (PPO with a separate critic).",
    "train/loss_scale": "Factor on the loss of a float16 model that keeps small gradients from underflowing.",
    "train/lr": "Learning rate of this step.",
    "train/samples": "Training rows made from this step's chains.",
    "train/tokens": "Sampled tokens in those rows.",
    "train/splits": "Rows beyond one per chain: how often a template rewrote history.",
    "train/untrainable_chains": "Chains left out: the world failed, they were cancelled, or they have no token to train.",
    "train/masked_tokens": "Sampled tokens that are not trained: of weights outside the window, or masked by loss.truncated.",
    "train/lag_mean": "Mean age of the trained tokens, in versions of the weights, when the update begins.",
    "train/lag_max": "Largest age of a trained token, in versions of the weights, when the update begins.",
    "train/zero_advantage_groups": "Groups without a learning signal: all rewards equal, or fewer than two trainable chains.",
    "train/skipped": "1 if the policy took no optimizer step: every advantage was 0, or the critic warms up.",
    "train/optimizer_steps": "Optimizer steps taken on the policy.",
    "train/logprob_gap": "Mean |sampled - recomputed log-prob| of chains drawn wholly by the current weights; 0 if both agree.",
    "train/logprob_gap_bias": "Mean of sampled - recomputed log-prob over these tokens; near 0 where rounding makes a gap.",
    "train/logprob_gap_error": "Standard error of train/logprob_gap_bias.",
    "train/slope": "Sum of |d loss / d log-prob| over tokens, as it entered the gradient of the first optimizer step.",
    "train/slope_mark": "Sum of d loss / d log-prob times the log-prob: a checksum for `agentfly replay`.",
    "train/entropy_slope": "Sum of d loss / d entropy of the tokens, as it entered the gradient of the first optimizer step.",
    "train/last_slope": "train/slope of the last optimizer step, if the policy took several.",
    "train/last_slope_mark": "train/slope_mark of the last optimizer step.",
    "train/last_entropy_slope": "train/entropy_slope of the last optimizer step.",
    "train/value_slope": "Sum of |d loss / d value| over tokens in the first optimizer step that trains the critic (PPO).",
    "train/weight_change": "Norm of the change of the weights, estimated from a sample (RMS over optimizer steps).",
    "train/step_error": "Distance of the steps of a named optimizer from those of the settings, over their length.",
    "train/adam_steps": "Optimizer steps of the run that the optimizer's averages hold.",
    "train/mismatch_kl": "KL from the sampler to the learner before the update, k3, over trained tokens, unless all are exact.",
    "train/ess": "Effective sample size, (sum w)^2 / (n sum w^2), of corrected tokens (loss.correction = sequence: chains).",
    "train/correction_mean": "Mean weight of loss.correction over corrected tokens (sequence: chains that have one).",
    "train/correction_clipped": "Share of corrected tokens (sequence: chains) whose weight was truncated or masked.",
    "train/critic_warmup": "1 in the first steps, in which the critic learns and the policy waits (PPO).",
    "train/explained_variance": "1 - var(return - value) / var(return), before the step (PPO).",
    "train/padding_waste": "Share of padding among the tokens that were run.",
}


class Totals:
    """Sums and counts by name. Values stay on the device until `means`, so that adding one does not synchronise a GPU."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, Tensor | float] = {}

    def add(self, name: str, total: Tensor | float, count: Tensor | float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + total
        self._counts[name] = self._counts.get(name, 0.0) + count

    def drop(self, *names: str) -> None:
        for name in names:
            self._sums.pop(name, None)
            self._counts.pop(name, None)

    def merge(self, other: Totals) -> None:
        """Add all sums and counts of `other`."""
        for name, total in other._sums.items():
            self.add(name, total, other._counts[name])

    def summed(self, group: LearnerGroup) -> Totals:
        """Returns the sums over all ranks."""
        if group.size == 1:
            return self
        import torch

        names = list(METRICS)
        numbers = [float(table.get(name, 0.0)) for table in (self._sums, self._counts) for name in names]
        sums: list[float] = group.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        whole = Totals()
        for place, name in enumerate(names):
            whole.add(name, sums[place], sums[len(names) + place])
        return whole

    def means(self) -> dict[str, float]:
        """Returns the mean of each name; names whose count is 0 are left out."""
        counts = {name: float(count) for name, count in self._counts.items()}
        means = {name: float(total) / counts[name] for name, total in self._sums.items() if counts[name]}
        if square := means.get("train/ess"):  # until here the mean square of the weights; 0 if every weight is 0
            means["train/ess"] = means["train/correction_mean"] ** 2 / square
        if (name := "train/logprob_gap_error") in means:  # until here the mean square
            means[name] = (means[name] / counts[name]) ** 0.5
        for name in means.keys() & {"train/weight_change", "train/step_error"}:  # until here squares
            means[name] **= 0.5
        return means
