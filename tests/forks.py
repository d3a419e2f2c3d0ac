"""Calls in processes that have imported torch and transformers: Python's fork server imports them once and forks.

A program that starts by itself needs four seconds of a CPU for these imports.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def call_in_fork(
    function: Callable[..., None], *args: Any, log: Path, environ: Mapping[str, str], timeout_s: float
) -> int | None:
    """Exit status of a process that calls the function and writes to `log`; None if it did not end in time and was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    with contextlib.chdir(ROOT):  # the fork server imports from its working directory
        forkserver.ensure_running()
    child = context.Process(target=_call, args=(function, args, log, dict(environ)))
    child.start()
    child.join(timeout_s)
    status = child.exitcode
    child.kill()
    child.join()
    return status


def _call(function: Callable[..., None], args: tuple[Any, ...], log: Path, environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    with log.open("wb") as file, open(os.devnull, "rb") as null:
        for source, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(source.fileno(), target)
    function(*args)
