"""The local engine: a transformers model that samples for many chains at once, in a separate thread.

Requests come from any event loop through an inbox; results go back with `call_soon_threadsafe`, one call per step and loop. No
event loop waits for a forward pass. The learner changes the weights of `model` in place, inside `hold` if chains are sampled
meanwhile; `publish` then makes sure that no new request uses a key or value computed before. After a failure every request
fails with the same sentence. On a GPU the thread has its own stream, so that kernels of the learner run beside those of the
engine; both meet in `hold` and `publish`.

    event loops     generate -> inbox "add"      cancelled -> "remove"      release -> "release"         <- _deliver
    engine thread   _work: wait until due -> empty the inbox -> if published: renew the caches -> scheduler.step -> _send
    learner         hold [ weights change -> publish ]
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Literal

import torch

from ...errors import ConfigError, DeadlineError, EngineError
from ...kernels.lent_memory import LentMemory
from ...kernels.memory import out_of_memory
from ...kernels.rope import fix_rope
from ...protocols import Renderer
from ...types import Completion, Proof, Request
from ..options import AtUpdate, LocalOptions
from ..prompt import complete, decode, hand_over, room_for
from .cuda_graphs import new_stream
from .load import cache_bytes, cache_lender, context_of, copy_weights, end_ids, tune
from .page_allocator import PAGE_SIZE, PageAllocator
from .paged_attention import KVPools
from .paged_scheduler import PagedScheduler
from .replica import addresses, check_paged_replica, check_replica, make_replica, same_tensors
from .scheduler import BatchScheduler, SequenceState, uniforms_of
from .slot_allocator import SlotAllocator
from .slot_attention import SlotCache
from .slot_scheduler import SlotScheduler

IDLE_S = 5.0  # an idle thread ends after this long; the next request starts a new one
QUIET_S = 0.02  # idle for this long, the thread captures one of the graphs that were missing; then it waits for work again
TURN_S = 0.01  # seconds that an event loop waits for the engine's thread: more than a launch takes, unless it captures a graph
DEFAULT_SHARE = 0.4  # of a GPU's free memory: the cache, if its size is not given
LEAST_SHARE, SPARE_SHARE = (
    0.05,
    0.9,
)  # the same where a learner needs most of it: at least, and with its states together at most
_engines: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


class LocalEngine:
    """Continuous batching over one model. Takes the fields of `LocalOptions` as keywords, or an instance of it.

    `at_update` says what happens to the replies in progress when new weights are published (a new request never uses what
    older weights have cached):

    recompute   they go on with the new weights; their keys and values are computed again
    keep        they go on with the new weights and keep their keys and values, once a token of theirs is sampled
    finish      `hold` lets them end first; requests that have not started wait until it is left
    """

    reads: Literal["ids", "messages"] = "ids"
    at_update = AtUpdate("recompute", "keep", "finish")
    uniforms = staticmethod(uniforms_of)

    def __init__(
        self, model: Any, tokenizer: Any, options: LocalOptions | None = None, *, version: int = 0, **fields: Any
    ) -> None:
        options = LocalOptions(**fields) if options is None else replace(options, **fields)
        self.model, self.tokenizer = model, tokenizer
        self.shares_weights = True
        self.version = version
        self.renderer: Renderer | None = None  # set by `open_engine`
        self.proof: Proof | None = None  # for engines that hold a copy of the weights
        ends = end_ids(getattr(model, "generation_config", None), model.config, tokenizer)
        self.stop_ids = frozenset(ends if options.stop_ids is None else options.stop_ids)
        self.device = next(model.parameters()).device
        gpu = self.device.type == "cuda"
        max_batch = options.max_batch or (512 if gpu else 256)
        tune(next(model.parameters()))
        fix_rope(model, options.max_context)
        self._replica = make_replica(model)
        probe = check_replica(model, self._replica, self.device)
        kv_tokens = options.kv_tokens or int(cache_bytes(options, model, self.device) // probe.bytes_per_token)
        self.max_context = min(options.max_context or context_of(model.config), kv_tokens)
        if self.max_context < 2:
            raise ConfigError("engine: the cache has room for less than two tokens; raise kv_tokens, kv_gib or kv_fraction")
        # Chains in flight. While one chain's tools run, another can sample; with more than that, its cache would be evicted.
        self.capacity = 2 * max_batch
        self._on_pages = (options.cache or ("pages" if gpu else "slots")) == "pages"
        sizes: dict[str, Any] = {
            "max_batch": max_batch,
            "max_step_tokens": options.max_step_tokens or (4096 if gpu else 1024),
            "max_context": self.max_context,
            "device": self.device,
        }
        self._prepare_s = options.prepare_s if gpu and self._on_pages else 0.0
        self._scheduler: BatchScheduler
        self._lender: LentMemory | None = None  # the memory of the cache, if a learner may use it
        lender = cache_lender(options, model, self.device)
        if self._on_pages:
            self._replica = make_replica(model, on_pages=True)
            check_paged_replica(model, self._replica, probe, self.device)
            num_pages = 1 + -(-kv_tokens // PAGE_SIZE)
            pools = KVPools(num_pages, [probe.layers[index] for index in sorted(probe.layers)], lender)
            self._lender = pools.memory
            self._scheduler = PagedScheduler(self._replica, PageAllocator(num_pages), pools, **sizes)
        else:
            length = min(self.max_context, 256)
            slots = SlotAllocator(
                SlotCache(max(1, min(8, kv_tokens // length)), length),
                max_tokens=kv_tokens,
                max_slots=self.capacity,
                max_length=self.max_context,
            )
            self._scheduler = SlotScheduler(self._replica, slots, **sizes)
        self._addresses = addresses(model)
        self._stream = new_stream(self.device)
        self._source: Callable[[], Iterable[Sequence[tuple[str, torch.Tensor]]]] | None = None
        self._prove: Callable[[int], Proof] | None = None
        self._inbox: deque[tuple[Literal["add", "remove", "release", "prepare"], Any]] = deque()
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)
        self._waits = False  # whether the thread waits for work
        self._forward = threading.Lock()
        # See `_take_turn`. A scheduler that computes in `step` would make event loops wait for its forward passes.
        self._turn: Any = threading.Lock() if self._scheduler.launches_ahead else None
        if self._turn is not None:
            self._scheduler.while_waiting = self._give_turn
        self._holders = 0  # threads that wait for `_forward`
        self._drains = 0  # threads that hold the engine, or wait to, until the replies in progress have ended
        self._owner: int | None = None  # the thread that holds the engine
        self._held_s = 0.0
        self._thread: threading.Thread | None = None
        self._failure: str | None = None
        self._published = 0  # counts calls of `publish`
        self._recomputed = 0  # the last publication at which running replies do not keep their keys and values
        self._renewed = 0  # the last publication for which the thread has renewed the caches
        self._refined = False  # whether a graph was captured since the last step
        self._num_requests = 0
        self._opened = time.perf_counter()
        self._busy_s = self._host_s = 0.0
        self._tail_tokenizer: Any = None
        _engines.add(self)

    async def generate(self, request: Request) -> Completion:
        room_for(request, self.max_context)
        seq = SequenceState(request, self.stop_ids, self._decode_tail)
        seq.loop = asyncio.get_running_loop()
        seq.future = seq.loop.create_future()
        self._take_turn()
        self._post("add", seq)
        try:
            completion: Completion = await seq.future
        except asyncio.CancelledError:
            self._post("remove", seq)
            hand_over(request, self.tokenizer, seq.tokens[seq.num_prompt :], seq.logprobs, seq.versions)
            raise
        return completion

    def copy_from(
        self, weights: Callable[[], Iterable[Sequence[tuple[str, torch.Tensor]]]], prove: Callable[[int], Proof]
    ) -> None:
        """Sample from a copy of a learner's weights from now on: `publish` loads what `weights` yields into `model`.

        `weights` yields buckets of named tensors, all of the model's state dict. `prove` is called after each publication.
        """
        self.shares_weights = False
        self._source, self._prove = weights, prove

    def publish(self, version: int) -> None:
        """Sample from the learner's weights from now on, under this version. They have changed in place, or are copied."""
        if self._source is None or self._prove is None:
            self._publish(version)
            return
        with self._hold(600.0):
            copy_weights(self.model, self._source())
            self._publish(version)
        self.proof = self._prove(version)

    def _publish(self, version: int) -> None:
        """The weights have changed in place: tokens sampled from now on carry `version`, and no new request uses old caches.

        Replies in progress continue with the new weights, unless `at_update` is "finish"; `Completion.versions` records the
        version of each token. Outside of `hold`, the step that runs now is not waited for: it sees the new count when it ends
        and discards what it sampled. Its keys and values may be of a mix of weights, so "keep" holds inside of `hold` only.
        """
        held = self._owner == threading.get_ident()
        if not held and self.device.type == "cuda":
            # `hold` waits for the whole device when it is left. Here that would break a graph that another thread captures.
            torch.cuda.current_stream(self.device).synchronize()
        rebuilt = not same_tensors(self.model, self._replica) or addresses(self.model) != self._addresses
        with self._hold(600.0) if rebuilt or self.at_update == "finish" else nullcontext():
            if rebuilt:
                self._replica = make_replica(self.model, on_pages=self._on_pages)
                self._addresses = addresses(self.model)
                self._scheduler.use_model(self._replica)
            if self.at_update != "keep" or not held:
                self._recomputed = self._published + 1
            # Version first: a step that starts between these lines still has the old count and is discarded when it ends.
            self.version = version
            self._published += 1

    def take_weights(self, version: int, buckets: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
        """Copy new weights into `model` and publish them: for an engine in another process than the learner.

        The names are those of the model's state dict. Each bucket is copied before the next is requested. No token is sampled
        meanwhile; `at_update` says what happens to the replies in progress. If the weights do not come whole, the engine stops
        and every request fails: its weights would be those of no version.
        """
        with self.hold():
            try:
                copy_weights(self.model, buckets)
            except BaseException as error:
                self._failure = self._failure or f"the weights of version {version} did not come whole: {error}"
                raise
            self._synchronize()
            self.publish(version)

    @contextmanager
    def hold(self, timeout_s: float = 600.0) -> Iterator[None]:
        """No forward pass runs inside the context: for a learner that updates the weights while chains are sampled.

        What was launched before is finished first. If `at_update` is "finish", so are all replies in progress, and no request
        starts meanwhile. The thread that holds the engine may hold it again. Raises DeadlineError after `timeout_s`.
        An engine that samples from a copy of the weights goes on; it is held while `publish` loads them.
        """
        with self._hold(timeout_s) if self._source is None else nullcontext():
            yield

    @contextmanager
    def _hold(self, timeout_s: float) -> Iterator[None]:
        if self._owner == threading.get_ident():
            yield
            return
        finish = self.at_update == "finish"
        with self._draining() if finish else nullcontext():
            self._acquire(time.monotonic() + timeout_s, timeout_s, finish)
            began = time.perf_counter()
            try:
                self._owner = threading.get_ident()
                self._synchronize()  # launched kernels have ended, too
                with self._turn or nullcontext():
                    news = self._scheduler.settle()
                self._send(news)
                yield
                self._synchronize()  # the learner may have launched its kernels on another stream
            finally:
                self._held_s += time.perf_counter() - began
                self._owner = None
                self._forward.release()

    @contextmanager
    def _draining(self) -> Iterator[None]:
        """Inside the context no queued request starts."""
        try:
            with self._wake:
                self._drains += 1
                self._scheduler.draining = True
            yield
        finally:
            with self._wake:
                self._drains -= 1
                self._scheduler.draining = self._drains > 0
                self._wake.notify_all()

    def _acquire(self, deadline: float, timeout_s: float, finish: bool) -> None:
        """Acquire `_forward`; with `finish`, once no reply is in progress."""
        ended = True
        while True:
            with self._wake:
                if finish:
                    ended = self._wake.wait_for(lambda: not self._scheduler.in_progress, max(0.0, deadline - time.monotonic()))
                # threading.Lock is not fair: without this count the engine thread could re-acquire it for every next step.
                self._holders += 1
            try:
                if not ended:
                    raise DeadlineError(f"the replies in progress did not end within {timeout_s:g} s")
                if not self._forward.acquire(timeout=max(0.0, deadline - time.monotonic())):
                    raise DeadlineError(f"the engine's step did not end within {timeout_s:g} s")
            finally:
                with self._wake:
                    self._holders -= 1
                    self._wake.notify_all()
            # A step that began before `draining` was set may have started a reply.
            if not (finish and self._scheduler.in_progress):
                return
            self._forward.release()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def prepare(self, num_chains: int | None = None) -> float:
        """Capture the CUDA graphs for so many concurrent chains (None: `capacity`) before the first request.

        Returns the seconds that it took, at most about `prepare_s` (`LocalOptions`). After that a graph of a finer size is
        captured only while the engine is idle. Without a GPU there is nothing to do. Triton keeps compiled kernels on disk
        (TRITON_CACHE_DIR, by default ~/.triton/cache), so later runs do not compile them again.
        """
        if not self._prepare_s:
            return 0.0
        began, limit_s = time.perf_counter(), self._prepare_s + 600.0  # one capture may exceed the limit
        done: Future[None] = Future()
        self._post("prepare", (num_chains or self.capacity, done))
        try:
            done.result(limit_s)
        except TimeoutError:
            raise DeadlineError(f"the engine did not prepare its graphs within {limit_s:g} s") from None
        return time.perf_counter() - began

    def rest(self) -> None:
        """Lend the cache's memory (`LocalOptions.lend_cache`) until the next request. What is cached is lost."""
        if self._lender is not None:
            with self._hold(600.0):
                self._published += 1
                self._recomputed = self._published
                self._lender.lend()

    def release(self, session: str) -> None:
        self._take_turn()
        with self._lock:
            if self._failure is None:
                self._inbox.append(("release", session))

    def stats(self) -> dict[str, float]:
        """Counters (see `engines.options.COUNTERS`) and current sizes.

        They are read without stopping the engine, so figures may be one step apart. `idle_s` includes `held_s`, the time in
        which a learner held the engine.
        """
        scheduler = self._scheduler
        return {
            **scheduler.counts,
            "requests": self._num_requests,
            "evicted": scheduler.allocator.num_evicted,
            "stale_hits": scheduler.allocator.audit.stale_tokens,
            "running": len(scheduler.running),
            "queued": len(scheduler.queue),
            **scheduler.memory(),
            **scheduler.times,
            "host_s": self._host_s,
            "busy_s": self._busy_s,
            "idle_s": time.perf_counter() - self._opened - self._busy_s,
            "held_s": self._held_s,
        }

    async def close(self) -> None:
        await asyncio.to_thread(self.shut)

    def shut(self, timeout_s: float = 10.0) -> None:
        """Close without an event loop. Requests in progress fail; the model is not touched."""
        with self._wake:
            self._failure = self._failure or "the engine was closed"
            thread = self._thread
            self._wake.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _post(self, kind: Literal["add", "remove", "prepare"], what: object) -> None:
        with self._lock:
            if kind != "remove" and self._failure is not None:
                raise EngineError(self._failure)
            self._num_requests += kind == "add"
            self._inbox.append((kind, what))
            if self._thread is None and kind != "remove":
                self._thread = threading.Thread(target=self._run, name="agentfly-engine", daemon=True)
                self._thread.start()
            if self._waits:
                self._wake.notify_all()

    def _run(self) -> None:
        """The thread's function. Returns when the engine is closed, fails, or has been idle for IDLE_S."""
        try:
            stream: AbstractContextManager[Any] = nullcontext()
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # a new thread starts on device 0
                self._stream.wait_stream(torch.cuda.default_stream(self.device))  # what the constructor launched
                stream = torch.cuda.stream(self._stream)
            with torch.no_grad(), stream:
                while self._wait():
                    self._work()
        except torch.OutOfMemoryError as error:
            self._failure = out_of_memory("the local engine", error)
        except Exception as error:  # noqa: BLE001  any failure must reach the requests that wait
            self._failure = self._failure or f"the local engine stopped: {type(error).__name__}: {error}"
        if self._failure is not None:
            self._fail_all(self._failure)
            with suppress(RuntimeError):  # a failed device raises again, but then nothing runs on it any more
                self._scheduler.drain()
                if self._stream is not None:
                    self._stream.synchronize()

    def _wait(self) -> bool:
        """Block until there is work. Returns False if the thread must end."""
        with self._lock:
            self._waits = True  # from here on `_post` notifies
            try:
                return self._wait_for_work()
            finally:
                self._waits = False

    def _wait_for_work(self) -> bool:
        scheduler, inbox = self._scheduler, self._inbox
        while (self._holders or (self._drains and not inbox and not scheduler.busy)) and not self._failure:
            self._wake.wait(IDLE_S)
        if self._failure is None and (inbox or scheduler.busy):
            return True
        quiet = scheduler.wants_capture and not self._refined
        self._wake.wait_for(lambda: inbox or scheduler.busy or self._failure is not None, QUIET_S if quiet else IDLE_S)
        if self._failure is not None:
            return False
        if not quiet and not inbox and not scheduler.busy:
            self._thread = None
            return False
        return True

    def _work(self) -> None:
        with self._forward:  # also around the inbox: `publish` may replace the replica, which restarts every sequence
            began = time.perf_counter()
            self._scheduler.wait_until_due()
            waited_s = time.perf_counter() - began
            # A capture writes to the cache, so none is made while a learner has the memory.
            quiet = not self._inbox and (self._lender is None or not self._lender.lent)
            self._empty_inbox()
            news: list[SequenceState] = []
            if self._scheduler.busy:
                with self._turn or nullcontext():
                    news = self._step(waited_s)
                self._refined = False
            elif quiet and not self._refined:
                self._scheduler.refine()
                self._refined = True
        if self._drains:
            with self._wake:
                self._wake.notify_all()
        if news:
            self._send(news)

    @contextmanager
    def _give_turn(self) -> Iterator[None]:
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()

    def _take_turn(self) -> None:
        """In an event loop: wait while the engine's thread prepares a launch, for at most TURN_S.

        Both threads need the interpreter. If they competed for it, each of the calls that make up a launch could give it away
        for a switch interval, and the device would run out of work. So the engine's thread holds `_turn` except while it waits
        for the device, and a chain passes here once in each of its turns.
        """
        if self._turn is not None and self._turn.acquire(timeout=TURN_S):
            self._turn.release()

    def _empty_inbox(self) -> None:
        scheduler, inbox = self._scheduler, self._inbox
        while inbox:
            kind, what = inbox.popleft()
            if kind == "add":
                scheduler.add(what)
            elif kind == "remove":
                scheduler.remove(what)
            elif kind == "prepare":
                num_chains, done = what
                with _telling(done):
                    self._take_memory()
                    scheduler.prepare(num_chains, self._prepare_s)
            else:
                scheduler.allocator.release(what)

    def _step(self, waited_s: float) -> list[SequenceState]:
        """Run a step of the scheduler, after a wait of `waited_s` until it was due."""
        scheduler = self._scheduler
        began, computed_s = time.perf_counter(), sum(scheduler.times.values())
        # The count is read before the version. If `publish` runs between the two, the step gets the new version with the
        # old count, is invalid when it ends, and the next step renews the caches.
        self._take_memory()
        published = self._published
        version = self.version
        scheduler.allocator.audit.publication = published
        if published != self._renewed:
            scheduler.renew(published, keep=self._recomputed <= self._renewed)
            self._renewed = published
        news = scheduler.step(version, lambda: published == self._published)
        took_s = waited_s + time.perf_counter() - began
        self._busy_s += took_s
        self._host_s += max(0.0, took_s - (sum(scheduler.times.values()) - computed_s))
        return news

    def _take_memory(self) -> None:
        if self._lender is not None:
            self._lender.take()

    def _send(self, seqs: Sequence[SequenceState]) -> None:
        """Send news to the event loops of the requests. The requests of a closed loop are removed."""
        for loop in {id(seq.loop): seq.loop for seq in seqs}.values():
            mine = [seq for seq in seqs if seq.loop is loop]
            news = [(seq, seq.new_text, seq.finished, seq.error) for seq in mine]
            for seq in mine:
                seq.new_text = ""
            try:
                loop.call_soon_threadsafe(self._deliver, news)
            except RuntimeError:
                for seq in mine:
                    self._post("remove", seq)

    def _deliver(self, news: Sequence[tuple[SequenceState, str, Literal["stop", "length"] | None, str | None]]) -> None:
        """In the event loop: call `on_text`, then resolve the futures."""
        for seq, text, finished, error in news:
            if seq.future.done():  # cancelled; `generate` has posted its removal
                continue
            try:
                if text and seq.on_text is not None:
                    seq.on_text(text)
                if error is not None:
                    seq.future.set_exception(EngineError(error))
                elif finished is not None:
                    ids = seq.tokens[seq.num_prompt :]
                    seq.future.set_result(complete(self.tokenizer, ids, seq.logprobs, seq.versions, finished, seq.stop_ids))
            except Exception as failure:  # noqa: BLE001  an exception of `on_text` belongs to the request, not to the loop
                seq.future.set_exception(failure)
                self._post("remove", seq)

    def _fail_all(self, sentence: str) -> None:
        with self._wake:
            seqs = self._scheduler.clear() + [what for kind, what in self._inbox if kind == "add"]
            waiting = [what[1] for kind, what in self._inbox if kind == "prepare"]
            self._inbox.clear()
            self._thread = None
            self._wake.notify_all()  # a thread may wait for the replies in progress to end
        for done in waiting:
            done.set_exception(EngineError(sentence))
        for seq in seqs:
            seq.error = sentence
        if seqs:
            self._send(seqs)

    def _decode_tail(self, ids: Sequence[int]) -> str:
        """Decode in the engine's thread, with a copy of the tokenizer: fast tokenizers are not thread-safe."""
        if self._tail_tokenizer is None:
            self._tail_tokenizer = copy.deepcopy(self.tokenizer)
        return decode(self._tail_tokenizer, ids)


@contextmanager
def _telling(done: Future[None]) -> Iterator[None]:
    """Resolve the future when the context is left; an exception is also raised."""
    try:
        yield
    except BaseException as error:
        done.set_exception(error)
        raise
    done.set_result(None)


@atexit.register
def _close_all() -> None:
    """Stop the threads: a thread inside a forward pass would crash at interpreter shutdown."""
    for engine in list(_engines):
        engine.shut(timeout_s=5.0)
