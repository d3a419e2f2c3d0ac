"""`backend = "verl"`: the same recipe on verl's distributed trainer.

    table      every config key: what it becomes in verl, or why it is refused
    translate  Config -> Job (what the data and the model say) -> hydra overrides
    launch     writes Parquet, agent-loop YAML and settings into the run's folder, starts verl and watches it
    worker     in verl's worker processes: opens the agent of the run's folder for `verl_loop`
    verl_loop, verl_chains    there: verl's agent loop, and a chain as the rows that verl trains

Only `verl_loop` imports verl: translation and hand-over work without it.
"""

from __future__ import annotations

from .launch import show_verl, train_verl

__all__ = ["show_verl", "train_verl"]
