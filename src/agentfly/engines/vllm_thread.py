"""A vLLM engine in its own thread: requests come in, tokens go out step by step, and control calls run between two steps.

The thread alone touches vLLM, so vLLM is never entered twice. After a failure or `shut`, waiting and new requests fail with the
same sentence.

vLLM schedules ahead: a call of `step` launches a step and returns the tokens of the one before. So before the weights change,
`pause` receives the tokens that are still to come, under the version that sampled them.
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
class VllmRequest:
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
    """`make` creates the engine inside the thread. Every sampled token is recorded with the current `version`.

    `salt` goes with every new request: vLLM shares cached prefixes only between requests of equal salt.
    """

    def __init__(self, make: Callable[[], Any], start_s: float) -> None:
        self.version = 0
        self.salt = ""
        self.steps = self.prefilled_tokens = self.sampled_tokens = 0
        self.busy_s = 0.0
        self._inbox: deque[tuple[Literal["add", "remove", "call", "last"], Any]] = deque()
        self._requests: dict[str, VllmRequest] = {}
        self._last: list[Any] = []  # calls that wait until no request is in progress
        self._postponed: dict[str, VllmRequest] = {}  # requests that came after these calls
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

    def add(self, request: VllmRequest) -> None:
        self._post("add", request)

    def remove(self, request: VllmRequest) -> None:
        with self._wake:
            self._inbox.append(("remove", request))
            self._wake.notify()

    def call(self, work: Callable[[Any], T], timeout_s: float, what: str, *, last: bool = False) -> T:
        """Run `work(engine)` between two steps and return its result. Raises DeadlineError after `timeout_s`.

        With `last`, the requests in progress end first; requests that come later start after the call.
        """
        done: Future[T] = Future()
        self._post("last" if last else "call", (work, done))
        try:
            return done.result(timeout_s)
        except Late:
            done.cancel()
            raise DeadlineError(f"vLLM did not {what} within {timeout_s:g} s") from None

    def abort_all(self, engine: Any, sentence: str) -> None:
        """In the thread: abort every request in progress, and refuse new ones until `accept_requests`."""
        self._refusal = sentence
        for request in list(self._requests.values()):
            engine.abort_request([request.id])
            self._tell(request, EngineError(sentence))
        self._requests.clear()

    def accept_requests(self) -> None:
        """In the thread: accept requests again."""
        self._refusal = None

    def pause(self, engine: Any) -> None:
        """In the thread: stop scheduling, and receive the tokens of the step that was launched ahead. Requests stay."""
        engine.sleep(level=0, mode="keep")
        for _ in range(3):
            self._step(engine)

    @staticmethod
    def resume(engine: Any) -> None:
        """In the thread: schedule again after `pause`."""
        engine.wake_up(["scheduling"])

    def shut(self, timeout_s: float = 30.0) -> None:
        self._fail("the engine was closed")
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _post(self, kind: Literal["add", "call", "last"], what: object) -> None:
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
        except BaseException as error:  # noqa: BLE001  any failure must reach the requests that wait
            if not self._ready.done():
                self._ready.set_exception(error)
            self._fail(f"the vLLM engine stopped: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        self._fail("the engine was closed")
        self._end(self._failure or "")
        if engine is not None:
            engine.engine_core.shutdown()

    def _wait(self) -> bool:
        with self._wake:
            while not (self._inbox or self._requests or self._last) and self._failure is None:
                self._wake.wait()  # no timeout: every post, failure and shutdown notifies
            return self._failure is None

    def _work(self, engine: Any) -> None:
        while self._inbox:
            kind, what = self._inbox.popleft()
            if kind == "add":
                self._admit(engine, what)
            elif kind == "remove":
                self._postponed.pop(what.id, None)
                if self._requests.pop(what.id, None) is not None:
                    engine.abort_request([what.id])
            elif kind == "last":
                self._last.append(what)
            else:
                self._do(engine, *what)
        if self._last and not self._requests:
            calls, self._last = self._last, []
            postponed, self._postponed = self._postponed, {}
            for call in calls:
                self._do(engine, *call)
            for request in postponed.values():
                self._admit(engine, request)
        if self._requests:
            self._step(engine)

    def _step(self, engine: Any) -> None:
        began = time.perf_counter()
        version = self.version
        outputs = engine.step()
        self.steps += 1
        self.busy_s += time.perf_counter() - began
        for output in outputs:
            self._take(output, version)

    def _admit(self, engine: Any, request: VllmRequest) -> None:
        if self._last:
            self._postponed[request.id] = request
            return
        if self._refusal is not None:
            self._tell(request, EngineError(self._refusal))
            return
        try:
            prompt = {"prompt_token_ids": request.prompt, **({"cache_salt": self.salt} if self.salt else {})}
            engine.add_request(request.id, prompt, request.params)
        except (ValueError, TypeError) as error:
            self._tell(request, EngineError(f"vLLM refused the request: {' '.join(str(error).split())[:300]}"))
            return
        self._requests[request.id] = request

    @staticmethod
    def _do(engine: object, work: Callable[[Any], Any], done: Future[Any]) -> None:
        if not done.set_running_or_notify_cancel():  # its caller no longer waits
            return
        try:
            done.set_result(work(engine))
        except Exception as error:  # noqa: BLE001  the error belongs to the caller of `call`
            done.set_exception(error)

    def _take(self, output: Any, version: int) -> None:
        request = self._requests.get(output.request_id)
        if request is None:
            return
        if output.prompt_logprobs and not request.scores:
            pairs = zip(output.prompt_logprobs[1:], request.prompt[1:], strict=True)
            request.scores = [float(entry[token].logprob) for entry, token in pairs]
        part = output.outputs[0]
        new = list(part.token_ids)
        if not request.ids:
            self.prefilled_tokens += len(request.prompt) - (getattr(output, "num_cached_tokens", None) or 0)
        self.sampled_tokens += len(new)
        request.ids += new
        request.logprobs += [float(entry[token].logprob) for entry, token in zip(part.logprobs or (), new, strict=True)]
        request.versions += [version] * len(new)
        if new and request.on_token is not None:
            self._tell(request, None, new)
        if output.finished:
            del self._requests[request.id]
            if part.finish_reason not in ("stop", "length"):
                self._tell(request, EngineError(f"vLLM ended the request: {part.finish_reason}"))
                return
            request.finished = part.finish_reason
            self._tell(request, None)

    def _tell(self, request: VllmRequest, error: Exception | None, new: list[int] | None = None) -> None:
        try:
            request.loop.call_soon_threadsafe(_deliver, request, error, new)
        except RuntimeError:  # its event loop is closed
            self._requests.pop(request.id, None)

    def _end(self, sentence: str) -> None:
        """Fail everything that still waits for this thread."""
        with self._wake:
            left = list(self._inbox)
            self._inbox.clear()
        added = [what for kind, what in left if kind == "add"]
        for request in [*self._requests.values(), *self._postponed.values(), *added]:
            self._tell(request, EngineError(sentence))
        self._requests.clear()
        self._postponed.clear()
        for _, done in [*self._last, *(what for kind, what in left if kind in ("call", "last"))]:
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineError(sentence))
        self._last.clear()


def _deliver(request: VllmRequest, error: Exception | None, new: list[int] | None) -> None:
    """In the event loop of the request."""
    if request.future.done():
        return
    try:
        if error is not None:
            request.future.set_exception(error)
        elif new is not None and request.on_token is not None:
            request.on_token(new)
        elif new is None:
            request.future.set_result(None)
    except Exception as failure:  # noqa: BLE001  an exception of `on_token` belongs to the request
        request.future.set_exception(failure)


@atexit.register
def _close_all() -> None:
    for thread in list(_threads):
        thread.shut(timeout_s=5.0)
