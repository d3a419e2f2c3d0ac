"""The local engine: a transformers model that samples for many chains at once, in a thread of its own.

In: requests with prompt ids, from any event loop. Out: completions with the sampled ids, their log-probs and versions. The
event loop never waits for a forward pass: requests go through an inbox, and results come back with `call_soon_threadsafe`,
one call per step. `model` is shared with the learner, who may change its weights in place; `publish` then makes sure that
nothing computed before is used again. Refuses prompts that do not fit the context, and after a failure every request, with
the sentence of that failure.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import os
import platform
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import torch

from ...errors import ConfigError, DeadlineError, EngineError
from ...types import Completion, Proof, Request
from ..options import Share, check_cache_size
from .batch import Batch, Row
from .cache import SlotCache
from .paged import Pools
from .paged_batch import PagedBatch
from .pages import PAGE, Pages
from .slots import Slots
from .twin import addresses, check_paged_twin, check_twin, make_twin, same_tensors

IDLE_S = 5.0  # a thread without work ends after this long, and starts again with the next request
_engines: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


class LocalEngine:
    """Continuous batching over one model.

    max_context       tokens of a prompt and its reply together; None: what the model was made for
    max_batch         how many requests run at once; more wait their turn. None: 256, on a GPU 512
    max_step_tokens   how many prompt tokens one step may read, so that long prompts do not hold up those who are sampling.
                      None: 1,024, on a GPU 4,096
    kv_tokens         how many tokens all caches may hold together
    kv_gib            the same in memory
    kv_fraction       the same as a share of the device's free memory. None of the three: 0.4 on a GPU; elsewhere 0.25,
                      and 2 GiB at most
    cache             "slots": grows as it is used; "pages": one pool of fixed size, decoding in flights of several steps (CUDA
                      graphs on a GPU). None: pages on a GPU, slots elsewhere
    stop_ids          ids that end every reply; None: the end tokens of the model's generation config
    """

    reads: Literal["ids", "messages"] = "ids"

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_context: int | None = None,
        max_batch: int | None = None,
        max_step_tokens: int | None = None,
        kv_tokens: int | None = None,
        kv_gib: float | None = None,
        kv_fraction: Share | None = None,
        cache: Literal["slots", "pages"] | None = None,
        stop_ids: Iterable[int] | None = None,
        version: int = 0,
    ) -> None:
        if cache not in ("slots", "pages", None):
            raise ConfigError(f"engine: cache is 'slots' or 'pages', not {cache!r}")
        for name, number in [
            ("max_context", max_context), ("max_batch", max_batch), ("max_step_tokens", max_step_tokens),
            ("kv_tokens", kv_tokens), ("kv_gib", kv_gib), ("kv_fraction", kv_fraction),
        ]:  # fmt: skip
            if number is not None and not number > 0:
                raise ConfigError(f"engine: {name} must be more than 0, not {number}")
        if kv_fraction is not None and kv_fraction > 1:
            raise ConfigError(f"engine: kv_fraction is a share of at most 1, not {kv_fraction}")
        check_cache_size({"kv_tokens": kv_tokens, "kv_gib": kv_gib, "kv_fraction": kv_fraction})
        self.model = model
        self.tokenizer = tokenizer
        self.shares_weights = True
        self.proof: Proof | None = None
        self.version = version
        self.renderer: Any = None  # set by `open_engine`
        self.stop_ids = frozenset(_end_ids(model, tokenizer) if stop_ids is None else stop_ids)
        self.device = next(model.parameters()).device
        gpu = self.device.type == "cuda"
        max_batch = max_batch or (512 if gpu else 256)
        max_step_tokens = max_step_tokens or (4096 if gpu else 1024)
        tune(next(model.parameters()))
        self._twin = make_twin(model)
        probe = check_twin(model, self._twin, self.device)
        if kv_tokens is None:
            kv_tokens = int(_kv_bytes(kv_gib, kv_fraction, self.device) // probe.bytes_per_token)
        self.max_context = min(max_context or _model_context(model), kv_tokens)
        if self.max_context < 2:
            raise ConfigError("engine: the cache has room for less than two tokens; raise kv_tokens, kv_gib or kv_fraction")
        self.capacity = 2 * max_batch  # chains in flight: with more, what is cached of one is lost while its tools run
        self._on_pages = cache == "pages" or (cache is None and gpu)
        sizes: dict[str, Any] = {
            "max_batch": max_batch, "max_step_tokens": max_step_tokens, "max_context": self.max_context, "device": self.device,
        }  # fmt: skip
        self._batch: Batch
        if self._on_pages:
            self._twin = make_twin(model, on_pages=True)
            check_paged_twin(model, self._twin, probe, self.device)
            num_pages = 1 + -(-kv_tokens // PAGE)
            pools = Pools(num_pages, [probe.layers[index] for index in sorted(probe.layers)])
            self._batch = PagedBatch(self._twin, Pages(num_pages), pools, **sizes)
        else:
            length = min(self.max_context, 256)
            slots = Slots(
                SlotCache(max(1, min(8, kv_tokens // length)), length),
                max_tokens=kv_tokens,
                max_slots=self.capacity,
                max_length=self.max_context,
            )
            self._batch = Batch(self._twin, slots, **sizes)
        self._addresses = addresses(model)
        self._inbox: deque[tuple[Literal["add", "remove", "release"], Any]] = deque()
        self._wake = threading.Condition()
        self._forward = threading.Lock()
        self._holders = 0
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._published = 0
        self._forgotten = 0
        self._num_requests = 0
        self._busy_s = 0.0
        self._tail_tokenizer: Any = None
        _engines.add(self)

    async def generate(self, request: Request) -> Completion:
        row = self._row(request)
        row.loop = asyncio.get_running_loop()
        row.future = row.loop.create_future()
        self._post("add", row)
        try:
            completion: Completion = await row.future
        except asyncio.CancelledError:
            self._post("remove", row)
            raise
        return completion

    def publish(self, version: int) -> None:
        """The weights have changed in place: drop every cache; tokens drawn from now on carry `version`.

        Rows that are in the middle of a reply go on with the new weights, and their tokens say so one by one.
        """
        if not same_tensors(self.model, self._twin) or addresses(self.model) != self._addresses:
            with self.hold():
                self._twin = make_twin(self.model, on_pages=self._on_pages)
                self._addresses = addresses(self.model)
                self._batch.use(self._twin)
        self.version = version
        self._published += 1

    @contextmanager
    def hold(self, timeout_s: float = 60.0) -> Iterator[None]:
        """No forward pass runs inside: for a learner that updates the weights while chains are being sampled."""
        with self._wake:
            self._holders += 1  # the thread takes no further step until we had our turn: locks know no queue
        try:
            if not self._forward.acquire(timeout=timeout_s):
                raise DeadlineError(f"the engine's step did not end within {timeout_s:g} s")
        finally:
            with self._wake:
                self._holders -= 1
                self._wake.notify_all()
        try:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # what was sent on its way has arrived
            yield
        finally:
            self._forward.release()

    def rest(self) -> None:
        """Nothing to free: the learner trains the very weights that this engine samples from."""

    def release(self, session: str) -> None:
        with self._wake:
            if self._failure is None:
                self._inbox.append(("release", session))

    def stats(self) -> dict[str, float]:
        """What was done so far, and what is held now. Read without stopping the engine, so figures may be a step apart."""
        batch = self._batch
        return {
            **batch.counts,
            "requests": self._num_requests,
            "evicted": batch.slots.num_evicted,
            "running": len(batch.running),
            "queued": len(batch.queue),
            **batch.memory(),
            "busy_s": self._busy_s,
        }

    async def close(self) -> None:
        await asyncio.to_thread(self.shut)

    def shut(self, timeout_s: float = 10.0) -> None:
        """Close without an event loop. Requests that still run fail; the model stays the caller's."""
        with self._wake:
            self._failure = self._failure or "the engine was closed"
            thread = self._thread
            self._wake.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _row(self, request: Request) -> Row:
        count = len(request.prompt_ids)
        if count == 0:
            raise EngineError("the prompt is empty: there is nothing to go on from")
        if count >= self.max_context:
            raise EngineError(
                f"the prompt has {count} tokens and the context holds {self.max_context}, reply included: "
                "shorten the prompt, end the chain earlier, or raise max_context"
            )
        return Row(request, self.stop_ids, self._decode_tail)

    def _post(self, kind: Literal["add", "remove"], row: Row) -> None:
        with self._wake:
            if kind == "add":
                if self._failure is not None:
                    raise EngineError(self._failure)
                self._num_requests += 1
            self._inbox.append((kind, row))
            if self._thread is None and kind == "add":
                self._thread = threading.Thread(target=self._run, name="agentfly-engine", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _run(self) -> None:
        """The thread. It ends when it is closed, when it fails, or when nothing was asked of it for a while."""
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a thread begins on the first one
            with torch.no_grad():
                while self._wait():
                    self._work()
        except Exception as error:  # noqa: BLE001  whatever it was, those who wait must hear of it
            self._failure = self._failure or f"the local engine stopped: {type(error).__name__}: {error}"
        if self._failure is not None:
            self._fail_all(self._failure)
            with suppress(RuntimeError):  # a device that has failed fails again, and has nothing under way
                self._batch.settle()

    def _wait(self) -> bool:
        """Block until there is work. False: the thread is to end."""
        with self._wake:
            while self._holders and self._failure is None:
                self._wake.wait(IDLE_S)
            self._wake.wait_for(lambda: self._inbox or self._batch.busy or self._failure is not None, IDLE_S)
            if self._failure is not None:
                return False
            if not self._inbox and not self._batch.busy:
                self._thread = None
                return False
        return True

    def _work(self) -> None:
        batch, inbox = self._batch, self._inbox
        with self._forward:  # `publish` may replace what rows come to and leave from
            while inbox:
                kind, what = inbox.popleft()
                if kind == "add":
                    batch.add(what)
                elif kind == "remove":
                    batch.remove(what)
                else:
                    batch.slots.release(what)
            if not batch.busy:
                return
            began = time.perf_counter()
            published, version = self._published, self.version
            if published != self._forgotten:
                batch.forget()
                self._forgotten = published
            news = batch.step(version, lambda: published == self._published)
        self._busy_s += time.perf_counter() - began
        if news:
            self._send(news)

    def _send(self, rows: Sequence[Row]) -> None:
        """Hand news to the event loops they belong to. A loop that is gone takes its rows with it."""
        for loop in {id(row.loop): row.loop for row in rows}.values():
            mine = [row for row in rows if row.loop is loop]
            news = [(row, row.new_text, row.finished, row.error) for row in mine]
            for row in mine:
                row.new_text = ""
            try:
                loop.call_soon_threadsafe(self._deliver, news)
            except RuntimeError:
                for row in mine:
                    self._post("remove", row)

    def _deliver(self, news: Sequence[tuple[Row, str, Literal["stop", "length"] | None, str | None]]) -> None:
        """In the event loop: streamed text, then results."""
        for row, text, finished, error in news:
            if row.future.done():
                continue
            try:
                if text and row.on_text is not None:
                    row.on_text(text)
                if error is not None:
                    row.future.set_exception(EngineError(error))
                elif finished is not None:
                    row.future.set_result(self._complete(row, finished))
            except Exception as failure:  # noqa: BLE001  what a listener raises belongs to whoever asked, not to the loop
                row.future.set_exception(failure)
                self._post("remove", row)

    def _complete(self, row: Row, finished: Literal["stop", "length"]) -> Completion:
        ids = row.tokens[row.num_prompt :]
        text = self._decode(self.tokenizer, ids[:-1] if row.ended_by_id else ids)
        return Completion(text=text, token_ids=ids, logprobs=row.logprobs, versions=row.versions, stop=finished)

    def _fail_all(self, sentence: str) -> None:
        with self._wake:
            rows = self._batch.clear() + [what for kind, what in self._inbox if kind == "add"]
            self._inbox.clear()
            self._thread = None
        for row in rows:
            row.error = sentence
        if rows:
            self._send(rows)

    def _decode_tail(self, ids: Sequence[int]) -> str:
        """For the engine's thread, with its own tokenizer: a fast one must not be read while another thread sets it up."""
        if self._tail_tokenizer is None:
            self._tail_tokenizer = copy.deepcopy(self.tokenizer)
        return self._decode(self._tail_tokenizer, ids)

    @staticmethod
    def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _end_ids(model: Any, tokenizer: Any) -> set[int]:
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if ids is not None:
            found.update([ids] if isinstance(ids, int) else ids)
    return found


def _model_context(model: Any) -> int:
    config = model.config.get_text_config()
    return int(getattr(config, "max_position_embeddings", None) or 4096)


def tune(weights: torch.Tensor) -> None:
    """Switch off two libraries that cost far more than they save here, for the whole process: the learner gains too. And make
    the weights' device that of this thread.

    oneDNN prepares every float32 product anew on ARM, ten times the work of a small layer. cuDNN's attention plans anew for
    every shape it meets, 3 ms each, and a batch that rows join and leave has a new shape at nearly every step. And Triton
    starts kernels on the thread's own device, whatever device their tensors are on: it becomes that of the weights.
    """
    if weights.device.type == "cuda":
        torch.cuda.set_device(weights.device)
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif weights.dtype == torch.float32 and platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def _kv_bytes(kv_gib: float | None, fraction: float | None, device: torch.device) -> float:
    if kv_gib is not None:
        return kv_gib * 2**30
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return (fraction or 0.4) * free
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not every system tells
        if fraction is not None:
            raise ConfigError("engine: this system does not say how much memory is free: set kv_gib, not kv_fraction") from None
        return 2 * 2**30
    return min(2 * 2**30, 0.25 * free) if fraction is None else fraction * free


@atexit.register
def _close_all() -> None:
    """A thread inside a forward pass must not outlive the interpreter."""
    for engine in list(_engines):
        engine.shut(timeout_s=5.0)
