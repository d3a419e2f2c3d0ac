"""A vLLM engine in a thread of its own: rows come in, their tokens go out step by step, and controls run in between.

In: a function that makes the engine; rows, from any event loop; work to be done between two steps. Out: news for the event loop
of each row, and results of the work. The thread alone touches vLLM, so nothing of it is ever entered twice. Refuses rows after
a failure or the end, with the sentence of it; whoever still waits then hears it, too.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ..errors import DeadlineError, EngineError

T = TypeVar("T")
_threads: weakref.WeakSet[VllmThread] = weakref.WeakSet()


@dataclass(slots=True, eq=False)
class Row:
    """One request. The thread fills it; its event loop reads it after `finished` or `error` is set."""

    id: str
    prompt: list[int]
    params: Any
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    on_token: Callable[[list[int]], None] | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    finished: Literal["stop", "length"] | None = None


class VllmThread:
    """`make` is called in the thread; `version` is written on every token that a step gives."""

    def __init__(self, make: Callable[[], Any], start_s: float) -> None:
        self.version = 0
        self.steps = 0
        self.busy_s = 0.0
        self._inbox: deque[tuple[Literal["add", "remove", "call"], Any]] = deque()
        self._rows: dict[str, Row] = {}
        self._wake = threading.Condition()
        self._failure: str | None = None
        self._refusal: str | None = None
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(make,), name="agentfly-vllm", daemon=True)
        self._thread.start()
        _threads.add(self)
        try:
            self._ready.result(start_s)
        except Late:
            self._fail("the vLLM engine did not start in time")
            raise DeadlineError(f"the vLLM engine did not start within {start_s:g} s: raise agent.engine.start_s") from None

    def add(self, row: Row) -> None:
        self._post("add", row)

    def remove(self, row: Row) -> None:
        with self._wake:
            self._inbox.append(("remove", row))
            self._wake.notify()

    def call(self, work: Callable[[Any], T], timeout_s: float, what: str) -> T:
        """Do something with the engine between two steps, and wait for it."""
        done: Future[T] = Future()
        self._post("call", (work, done))
        try:
            return done.result(timeout_s)
        except Late:
            raise DeadlineError(f"vLLM did not {what} within {timeout_s:g} s") from None

    def give_up(self, engine: Any, sentence: str) -> None:
        """In the thread: every reply that is under way, or asked for before `welcome`, ends with this sentence."""
        self._refusal = sentence
        for row in list(self._rows.values()):
            engine.abort_request([row.id])
            self._tell(row, EngineError(sentence))
        self._rows.clear()

    def welcome(self) -> None:
        """In the thread: replies may be asked for again."""
        self._refusal = None

    def shut(self, timeout_s: float = 30.0) -> None:
        self._fail("the engine was closed")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _post(self, kind: Literal["add", "call"], what: Any) -> None:
        with self._wake:
            if self._failure is not None:
                raise EngineError(self._failure)
            self._inbox.append((kind, what))
            self._wake.notify()

    def _fail(self, sentence: str) -> None:
        with self._wake:
            self._failure = self._failure or sentence
            self._wake.notify()

    def _run(self, make: Callable[[], Any]) -> None:
        engine = None
        try:
            engine = make()
            self._ready.set_result(None)
            while self._wait():
                self._work(engine)
        except BaseException as error:  # noqa: BLE001  whatever it was, those who wait must hear of it
            if not self._ready.done():
                self._ready.set_exception(error)
            self._fail(f"the vLLM engine stopped: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        self._fail("the engine was closed")
        self._end(self._failure or "")
        if engine is not None:
            engine.engine_core.shutdown()

    def _wait(self) -> bool:
        with self._wake:
            while not self._inbox and not self._rows and self._failure is None:
                self._wake.wait()  # no deadline: this is the idle thread, and every post, failure and end wakes it
            return self._failure is None

    def _work(self, engine: Any) -> None:
        while self._inbox:
            kind, what = self._inbox.popleft()
            if kind == "add":
                self._admit(engine, what)
            elif kind == "remove":
                if self._rows.pop(what.id, None) is not None:
                    engine.abort_request([what.id])
            else:
                self._do(engine, *what)
        if self._rows:
            began = time.perf_counter()
            version = self.version
            outputs = engine.step()
            self.steps += 1
            self.busy_s += time.perf_counter() - began
            for output in outputs:
                self._take(output, version)

    def _admit(self, engine: Any, row: Row) -> None:
        if self._refusal is not None:
            self._tell(row, EngineError(self._refusal))
            return
        try:
            engine.add_request(row.id, {"prompt_token_ids": row.prompt}, row.params)
        except (ValueError, TypeError) as error:
            self._tell(row, EngineError(f"vLLM refused the request: {' '.join(str(error).split())[:300]}"))
            return
        self._rows[row.id] = row

    @staticmethod
    def _do(engine: Any, work: Callable[[Any], Any], done: Future[Any]) -> None:
        try:
            done.set_result(work(engine))
        except Exception as error:  # noqa: BLE001  it belongs to whoever asked
            done.set_exception(error)

    def _take(self, output: Any, version: int) -> None:
        row = self._rows.get(output.request_id)
        if row is None:
            return
        if output.prompt_logprobs and not row.scores:
            pairs = zip(output.prompt_logprobs[1:], row.prompt[1:], strict=True)
            row.scores = [float(entry[token].logprob) for entry, token in pairs]
        part = output.outputs[0]
        new = list(part.token_ids)
        row.ids += new
        row.logprobs += [float(entry[token].logprob) for entry, token in zip(part.logprobs or (), new, strict=True)]
        row.versions += [version] * len(new)
        if new and row.on_token is not None:
            self._tell(row, None, new)
        if output.finished:
            del self._rows[row.id]
            if part.finish_reason not in ("stop", "length"):
                self._tell(row, EngineError(f"vLLM ended the request: {part.finish_reason}"))
                return
            row.finished = part.finish_reason
            self._tell(row, None)

    def _tell(self, row: Row, error: Exception | None, new: list[int] | None = None) -> None:
        try:
            row.loop.call_soon_threadsafe(_deliver, row, error, new)
        except RuntimeError:  # its loop is gone, and took everyone who waited along
            self._rows.pop(row.id, None)

    def _end(self, sentence: str) -> None:
        """Nobody waits for a thread that is gone."""
        with self._wake:
            left = list(self._inbox)
            self._inbox.clear()
        for row in [*self._rows.values(), *(what for kind, what in left if kind == "add")]:
            self._tell(row, EngineError(sentence))
        self._rows.clear()
        for kind, what in left:
            if kind == "call":
                what[1].set_exception(EngineError(sentence))


def _deliver(row: Row, error: Exception | None, new: list[int] | None) -> None:
    """In the event loop of the row."""
    if row.future.done():
        return
    try:
        if error is not None:
            row.future.set_exception(error)
        elif new is not None and row.on_token is not None:
            row.on_token(new)
        elif new is None:
            row.future.set_result(None)
    except Exception as failure:  # noqa: BLE001  what a listener raises belongs to whoever asked, not to the loop
        row.future.set_exception(failure)


@atexit.register
def _close_all() -> None:
    for thread in list(_threads):
        thread.shut(timeout_s=5.0)
