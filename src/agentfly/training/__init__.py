"""Training: the loop, checkpoints, evaluation, supervised warm start and the ledger of invariants."""

from typing import TYPE_CHECKING

from .. import old_names
from ..watch.results import Evaluation, TrainResult
from .evaluation import evaluate, evaluate_run
from .supervised import dpo, sft

__all__ = ["Evaluation", "TrainResult", "dpo", "evaluate", "evaluate_run", "sft"]

if not TYPE_CHECKING:
    __getattr__ = old_names.of(__name__)
