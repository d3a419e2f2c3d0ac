"""The head's own kernels give the log-probs, entropies and gradients that torch gives."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.needs import has_interpreter

CHECK = """
import torch
from agentfly.learn.model.head import head_scores
from agentfly.learn.algorithms.losses import entropy
from tests.close import assert_close_to_norm

torch.manual_seed(0)
for temperature, chunk, loud in ((1.0, 3, 1.0), (0.7, None, 20.0)):
    hidden = torch.randn(8, 6, requires_grad=True)
    weight = (loud * torch.randn(5000, 6)).requires_grad_()
    targets, push = torch.randint(0, 5000, (8,)), torch.randn(8)
    logits = hidden @ weight.T / temperature
    want = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    wanted = torch.autograd.grad((want * push).sum(), [hidden, weight])
    got, entropies = head_scores(hidden, weight, targets, temperature, chunk)
    assert list(got.grad_fn.kept) == [0]  # the logits of the first chunk are kept, those of the others computed again
    grads = torch.autograd.grad((got * push).sum(), [hidden, weight], retain_graph=True)
    assert not got.grad_fn.kept
    again = torch.autograd.grad((got * push).sum(), [hidden, weight])
    assert_close_to_norm(got, want)
    assert_close_to_norm(entropies, entropy(logits), scale=1.0)
    assert not entropies.requires_grad
    for ours, theirs in (*zip(grads, wanted), *zip(again, wanted)):
        assert_close_to_norm(ours, theirs)
with torch.no_grad():
    scores, _ = head_scores(hidden, weight, targets, 1.0, None)
    assert scores.grad_fn is None
print("equal")
"""


@has_interpreter
def test_the_heads_kernels_compute_what_torch_computes() -> None:
    """In Triton's interpreter, which needs no GPU; in a separate process, because it is chosen at the first import."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.stdout.strip() == "equal", done.stderr
