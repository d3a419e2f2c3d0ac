"""Training: the loop, checkpoints, evaluation, supervised warm start and the ledger of invariants."""

from .api import train
from .evaluation import Evaluation, evaluate, evaluate_run
from .loop import TrainResult
from .supervised import sft

__all__ = ["Evaluation", "TrainResult", "evaluate", "evaluate_run", "sft", "train"]
