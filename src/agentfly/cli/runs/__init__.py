"""Looking at runs: list them, compare two, plot and export what was stored, print chains, and talk with a checkpoint.

agentfly runs [DIR] [--where COND] [--sort KEY] [--json]
agentfly compare A B [--measure M] [--step WHEN] [--metric NAME] [--json]
agentfly plot RUN... [--metric NAME] [-o FILE] [--x step|time] [--smooth W] [--band B] [--log]
agentfly export RUN [FILE] [--format F] [filters]      formats: jsonl, csv, parquet, sft, dpo
agentfly export-model RUN FOLDER                       the model of a checkpoint, as a folder that from_pretrained loads
agentfly show RUN [filters] [--limit N] [--json]
agentfly query RUN "SELECT ..." [--json]
agentfly chat CHECKPOINT [--recipe R]
agentfly doctor RUN|MODEL [--json]                     exit status 1 if something is wrong with the run, or the model is refused
agentfly replay RUN [--json]                           the checks of doctor that compute every step again
"""

from __future__ import annotations

import argparse

from . import chat, compare, doctor, export, export_model, listing, plot, query, show


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to the command line."""
    for module in (listing, show, compare, plot, export, export_model, query, chat, doctor):
        module.add_parser(commands)
