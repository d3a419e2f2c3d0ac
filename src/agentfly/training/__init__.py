"""Training: the loop, checkpoints, evaluation, supervised warm start and the ledger of invariants."""

from typing import TYPE_CHECKING

from .. import old_names
from .evaluation import Evaluation, evaluate, evaluate_run
from .loop import TrainResult
from .supervised import dpo, sft

__all__ = ["Evaluation", "TrainResult", "dpo", "evaluate", "evaluate_run", "sft"]

if not TYPE_CHECKING:
    __getattr__ = old_names.of(__name__)
