"""Training: the loop, checkpoints, evaluation, supervised warm start and the ledger of invariants."""

from .api import train
from .evaluation import Evaluation, evaluate
from .loop import TrainResult
from .supervised import sft

__all__ = ["Evaluation", "TrainResult", "evaluate", "sft", "train"]
