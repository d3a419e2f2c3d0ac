"""`agentfly export-model`: the model of a run or checkpoint, as one folder that `from_pretrained` loads."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `export-model` to the command line."""
    model = commands.add_parser("export-model", help="write the model of a run's newest checkpoint to a new folder")
    model.add_argument("run_dir", metavar="RUN", help="the folder of the run, or of one of its checkpoints")
    model.add_argument("folder", help="the folder to write, which from_pretrained, vLLM and others load")
    model.set_defaults(run=run_export_model)


def run_export_model(arguments: argparse.Namespace) -> int:
    """Copy the model of a checkpoint."""
    from ...runs.checkpoints import export_model

    print(f"{arguments.folder}: the model of {export_model(arguments.run_dir, Path(arguments.folder))}")
    return 0
