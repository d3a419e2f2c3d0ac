"""What the fork server of `tests.forks` imports before it forks."""

import torch

from agentfly.engines import open_engine

torch.set_num_threads(1)
open_engine("pocket", device="cpu")  # imports what transformers imports late
