"""The reward `math_verify`: the verdict of the package math-verify (SymPy) on the prediction and the field `answer`.

math-verify limits its time by a signal, which only a main thread can use. Here it runs in worker processes without that
limit; a worker that does not reply in time is killed and replaced. `math_equal` needs no package and takes microseconds.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from typing import Any

from ...errors import ConfigError, WorldError
from ...plugins import missing_extra
from .. import Reward
from ..answers import alternatives
from ..function import FunctionReward
from ..lookup import factory
from .math_answer import MAX_PREDICTION

MAX_WORKERS = 4
START_S = 120.0  # importing SymPy on a busy machine
QUEUE_S = 600.0


class _Worker:
    """One worker process. `ask` returns None if the reply did not come in time; the worker is killed then."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agentfly.rewards.math.math_verify_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        try:
            started = self._read(START_S) == b"ready"
        except BaseException:
            self.kill()
            raise
        if not started:
            self.kill()
            raise WorldError("the worker of the reward 'math_verify' does not start: try python -c 'import math_verify'")

    def ask(self, request: dict[str, Any], timeout_s: float) -> bool | None:
        try:
            reply = self._send(json.dumps(request).encode() + b"\n") and self._read(timeout_s)
        except BaseException:  # a request whose reply was not read would answer the next one
            self.kill()
            raise
        if reply not in (b"true", b"false"):
            self.kill()
            return None
        return reply == b"true"

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a process stuck in the kernel dies later
            self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _send(self, line: bytes) -> bool:
        assert self._process.stdin is not None
        try:
            while line:  # an unbuffered pipe may take a part
                line = line[self._process.stdin.write(line) or 0 :]
        except BrokenPipeError:
            return False
        return True

    def _read(self, timeout_s: float) -> bytes:
        """One line, or what came of it before the deadline or the end of the process."""
        assert self._process.stdout is not None
        deadline, got = time.monotonic() + timeout_s, b""
        while not got.endswith(b"\n"):
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._process.stdout.fileno(), 4096) if ready else b""
            if not piece:
                return b""
            got += piece
        return got.strip()


class _Workers:
    """At most `MAX_WORKERS` workers, each started when it is first needed and used by one thread at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._slots = threading.Semaphore(min(MAX_WORKERS, os.cpu_count() or 1))

    def ask(self, request: dict[str, Any], timeout_s: float) -> bool | None:
        if not self._slots.acquire(timeout=QUEUE_S):
            raise WorldError(f"no worker of the reward 'math_verify' became free within {QUEUE_S:g} s")
        try:
            with self._lock:
                worker = self._idle.pop() if self._idle else None
            worker = worker or _Worker()
            verdict = worker.ask(request, timeout_s)
            if worker.alive:
                with self._lock:
                    self._idle.append(worker)
            return verdict
        finally:
            self._slots.release()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for worker in idle:
            worker.kill()


_workers = _Workers()
atexit.register(_workers.close)


@factory("math_verify")
def math_verify_reward(timeout_s: float = 10.0) -> Reward:
    """1 if the package math-verify finds the prediction equal to the field `answer`.

    A comparison that takes longer than `timeout_s` scores 0, and its component `undecided` is 1. Needs `agentfly[math-verify]`.
    """
    if not timeout_s > 0:
        raise ConfigError(f"reward 'math_verify': timeout_s must be above 0, not {timeout_s}")
    if importlib.util.find_spec("math_verify") is None:
        raise missing_extra("the reward 'math_verify'", "math_verify")

    def math_verify(prediction: str, answer: object) -> dict[str, float]:
        references = [one.rpartition("####")[2].strip() for one in alternatives(answer)]
        verdict = _workers.ask({"prediction": prediction[-MAX_PREDICTION:], "answers": references}, timeout_s)
        return {"reward": float(verdict is True), "undecided": float(verdict is None)}

    math_verify.__doc__ = math_verify_reward.__doc__
    return FunctionReward(math_verify, name="math_verify", thread=True, timeout_s=QUEUE_S + START_S + timeout_s)
