"""What an environment does to the process around it: settings that it changes, what it prints, files that it leaves.

Settings belong to the whole program, so an environment that changes them breaks its neighbours. `Stopwatch` measures for how
long a call holds up the thread in which it runs; on Linux the time in which the thread waits for a CPU does not count.
"""

from __future__ import annotations

import asyncio
import builtins
import gc
import io
import json
import locale
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO


def _umask() -> str:
    try:
        return next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))
    except (OSError, StopIteration):
        return ""


_SHARED = (asyncio, builtins, json, os, random, socket, subprocess, threading, time)


def _functions() -> dict[str, object]:
    """The public functions and classes of modules that all code of the process shares."""
    return {
        f"{module.__name__}.{name}": value
        for module in _SHARED
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_")
    }


SETTINGS: dict[str, Callable[[], Any]] = {
    "the working directory": os.getcwd,
    "environment variables": lambda: dict(os.environ),
    "sys.path": lambda: list(sys.path),
    "the umask": _umask,
    "signal handlers": lambda: [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    "the recursion limit": sys.getrecursionlimit,
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "the default timeout of sockets": socket.getdefaulttimeout,
    "the level of the root logger": lambda: logging.getLogger().level,
    "sys.excepthook": lambda: sys.excepthook,
    "garbage collection": gc.isenabled,
    "functions of the standard library": _functions,
}


def settings() -> dict[str, Any]:
    return {name: read() for name, read in SETTINGS.items()}


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The settings that differ, in words."""
    names = []
    for name, was in before.items():
        now = after[name]
        if was != now and isinstance(was, dict):
            keys = sorted(key for key in {*was, *now} if was.get(key) != now.get(key))
            names.append(f"{name} ({', '.join(keys[:3])})")
        elif was != now:
            names.append(f"{name} ({now})" if isinstance(now, str) else name)
    return names


def restore(before: dict[str, Any]) -> None:
    """Set the working directory, the environment variables and the functions of the standard library as they were."""
    os.chdir(before["the working directory"])
    wanted = before["environment variables"]
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    os.environ.update(wanted)
    (gc.enable if before["garbage collection"] else gc.disable)()
    functions = before["functions of the standard library"]
    for module in _SHARED:
        for name in vars(module).copy():
            value = functions.get(f"{module.__name__}.{name}")
            if value is not None and getattr(module, name) is not value:
                setattr(module, name, value)


@contextmanager
def forgotten() -> Iterator[list[str]]:
    """Collect the coroutines that are made and never awaited, as Python's warning names them. Other warnings are shown."""
    names: list[str] = []
    show = warnings.showwarning

    def listen(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if category is RuntimeWarning and "was never awaited" in str(message):
            names.append(str(message).split("'")[1])
        else:
            show(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", ".* was never awaited", RuntimeWarning)
        warnings.showwarning = listen
        yield names
        gc.collect()


class GlobalRandom:
    """The generators that all code of the process shares. An environment that seeds one leaves its state behind."""

    def __init__(self) -> None:
        self._state = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = numpy.random if numpy is not None else None
        self._kept_numpy = None if self._numpy is None else self._numpy.get_state()

    def seed(self, value: int) -> None:
        random.seed(value)
        if self._numpy is not None:
            self._numpy.seed(value)

    def states(self) -> dict[str, str]:
        states = {"random": repr(random.getstate())}
        return states if self._numpy is None else {**states, "numpy.random": repr(self._numpy.get_state()[1:3])}

    def restore(self) -> None:
        random.setstate(self._state)
        if self._numpy is not None:
            self._numpy.set_state(self._kept_numpy)


@contextmanager
def printed() -> Iterator[Callable[[], str]]:
    """Collect what is printed to stdout, by Python or by its descriptor. Yields a function that returns the text."""
    real, text = sys.stdout, io.StringIO()
    with tempfile.TemporaryFile() as file:
        try:
            stdout = os.dup(1)
        except OSError:
            stdout = -1  # the process has no stdout

        def said() -> str:
            if sys.stdout is not text:
                return "sys.stdout is replaced"
            file.seek(0)
            return text.getvalue() + file.read().decode(errors="replace")

        try:
            if stdout >= 0:
                if real is not None:
                    real.flush()
                os.dup2(file.fileno(), 1)
            sys.stdout = text
            yield said
        finally:
            sys.stdout = real
            if stdout >= 0:
                if real is not None:
                    real.flush()
                os.dup2(stdout, 1)
                os.close(stdout)


_PATH_OF = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.symlink": 1, "sqlite3.connect": 0}
_created: set[str] | None = None
"""The paths that were created while a `Created` is open."""
_roots: tuple[str, ...] = ()
_hooked = False


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _created is None or (event != "open" and event not in _PATH_OF):
        return
    if event == "open" and not (isinstance(args[2], int) and args[2] & os.O_CREAT):
        return
    path = args[_PATH_OF.get(event, 0)]
    if not isinstance(path, str | bytes | os.PathLike):
        return
    full = os.path.abspath(os.fsdecode(path))
    if full.startswith(_roots) and "__pycache__" not in full and not os.path.lexists(full):
        _created.add(full)


@contextmanager
def created() -> Iterator[Callable[[], list[str]]]:
    """Note the files and folders that Python makes in the temporary folder and the working directory.

    Yields a function that returns those that are still there. An audit hook cannot be removed: it stays and does nothing later.
    """
    global _created, _roots, _hooked
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked = True
    mine: set[str] = set()
    _roots = tuple(
        {os.path.join(os.path.abspath(root), "") for root in (tempfile.gettempdir(), os.getcwd(), os.path.expanduser("~"))}
    )
    _created = mine
    try:
        yield lambda: sorted(path for path in list(mine) if os.path.lexists(path))
    finally:
        _created = None


class Stopwatch:
    """Seconds of each piece of a call that ran without a break, by method."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}

    def timed(self, name: str, function: Callable[..., Any], *args: object) -> Any:
        waited, started = _waited(), time.perf_counter()
        try:
            return function(*args)
        finally:
            seconds = time.perf_counter() - started - (_waited() - waited)
            self.longest[name] = max(self.longest.get(name, 0.0), seconds)


class TimedCoroutine:
    """A coroutine whose steps are measured."""

    def __init__(self, watch: Stopwatch, name: str, coroutine: Any) -> None:
        self._watch, self._name, self._coroutine = watch, name, coroutine

    def __await__(self) -> TimedCoroutine:
        return self

    def __iter__(self) -> TimedCoroutine:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: object) -> Any:
        return self._watch.timed(self._name, self._coroutine.send, value)

    def throw(self, *error: object) -> Any:
        return self._watch.timed(self._name, self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()


def _waited() -> float:
    """Seconds in which this thread was ready to run and had no CPU."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
