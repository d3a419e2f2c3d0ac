"""A model behind a vLLM or SGLang server as an engine with token ids: for training from a remote server.

The learner trains its own copy (`model`). `publish` saves the copy to a shared folder, has the server load it and empty its
cache, and proves that the server now samples from it. A server tells one version for a whole reply, so `publish` lets the
replies in flight end first, and requests that come meanwhile wait for it.

A restarted server has lost the weights. Its first reply comes over a new connection, so a reply over a connection that was
opened after the last proof is used only after the server has been probed again (`_probe_again`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, DeadlineError, EngineError, InvariantError
from ..net.client import RetryPolicy
from ..schema import Count, Name, NotNegative, Positive
from ..types import Completion, Proof, Request, Sampling
from .openai_dialects import DIALECTS, NoIds
from .openai_server import ModelServer
from .options import COUNTERS, Address, ApiKey, AtUpdate, Device, Dtype, Seconds, TokenIds, check_arguments
from .prompt import complete, cuts, room_for


class ServedEngine:
    """A served model and the learner's copy of it.

    base_url            such as http://localhost:8000/v1; None: OPENAI_BASE_URL
    server              "vllm" or "sglang"
    served_model        the model's name on the server; None: as here
    weights_dir         a folder shared by this process and the server; needed for training
    server_weights_dir  the path of that folder on the server, if it differs
    max_context         tokens of a prompt and its reply together; None: what the model was made for
    handover_s          how long the server may take to load new weights
    max_gap             largest mean difference (nats) between the server's log-probs and the learner's after a hand-over
    device, dtype       of the learner's copy
    """

    reads: Literal["ids", "messages"] = "ids"
    at_update = AtUpdate("finish", why="the server tells one version for a whole reply, so replies end before weights change")

    def __init__(
        self,
        name: str | Path,
        *,
        base_url: Address | None = None,
        server: Literal["vllm", "sglang"] = "vllm",
        served_model: Name | None = None,
        weights_dir: Name | Path | None = None,
        server_weights_dir: Name | None = None,
        max_context: Count | None = None,
        api_key: ApiKey | None = None,
        timeout_s: Positive = 120.0,
        deadline_s: Positive = 600.0,
        handover_s: Positive = 600.0,
        max_retries: NotNegative = 8,
        retry_s: Seconds = 0.5,
        max_connections: Count = 256,
        max_gap: Positive = 0.05,
        stop_ids: TokenIds | None = None,
        device: Device | None = None,
        dtype: Dtype | None = None,
        chat_template: Name | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        from .copies import LearnerCopy

        check_arguments(ServedEngine, locals())
        self.model_name = served_model or str(name)
        policy = RetryPolicy(retries=max_retries, pause_s=retry_s, deadline_s=deadline_s)
        self._server = ModelServer(self.model_name, base_url, api_key, timeout_s, max_connections, policy)
        self.base_url = self._server.base_url
        self._dialect = DIALECTS[server](self._server, self.model_name)
        self._copy = LearnerCopy(
            name,
            device=device,
            dtype=dtype,
            max_context=max_context,
            stop_ids=stop_ids,
            chat_template=chat_template,
            template_args=template_args,
        )
        self.tokenizer, self.renderer, self.stop_ids = self._copy.tokenizer, self._copy.renderer, self._copy.stop_ids
        self.max_context = self._copy.context
        self.version = 0
        self.shares_weights = False
        self.proof: Proof | None = None
        self.handover_took_s = 0.0
        self._weights_dir = None if weights_dir is None else Path(weights_dir).expanduser().resolve()
        self._server_dir = server_weights_dir
        self._handover_s = handover_s
        self._max_gap = max_gap
        self._gate = threading.Condition()
        self._in_flight = 0
        self._changing = False
        self._waiting: list[asyncio.Future[None]] = []  # requests that came while weights change
        self._sampled_tokens = 0
        self._opened = self._began = time.perf_counter()
        self._busy_s = 0.0
        self._checked = False
        self._proven_at = -math.inf  # when the last successful probe was sent
        self._probe_locks: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()
        self._cleanup: weakref.finalize[..., Any] | None = None  # removes the last folder handed over, at the latest at exit

    def __repr__(self) -> str:
        return f"ServedEngine({self.model_name!r}, base_url={self.base_url!r}, server={self._dialect.name!r})"

    @property
    def model(self) -> Any:
        """The learner's copy. Reading it means training, so the first read checks that the server supports training."""
        if not self._checked:
            self._check()
            self._checked = True
        return self._copy.model

    async def generate(self, request: Request) -> Completion:
        room = room_for(request, self.max_context)
        stops = sorted({*self.stop_ids, *request.sampling.stop_ids})
        body = self._dialect.body(request.prompt_ids, request.sampling, room, stops)
        async with self._admitted():
            version = self.version
            drawn = await self._server.retry(lambda: self._once(body))
        if len(drawn.ids) > room or not 0 <= min(drawn.ids) <= max(drawn.ids) < self._copy.num_ids:
            raise EngineError(f"{self._server.who} gave more than {room} ids, or ids that the model does not have")
        # vLLM's log-probs under truncation are those of the truncated distribution: report NaN, not wrong numbers.
        has_logprobs = self._dialect.cut_logprobs or cuts(request.sampling) is None
        logprobs = drawn.logprobs if has_logprobs else [math.nan] * len(drawn.ids)
        # SGLang also stops at the model's own end ids, and reports "length" if the last allowed token is one of them.
        ends = {*stops, *([] if drawn.end is None else [drawn.end])}
        stop: Literal["stop", "length"] = "stop" if drawn.ids[-1] in ends else drawn.stop
        self._sampled_tokens += len(drawn.ids)
        done = complete(self.tokenizer, drawn.ids, logprobs, [version] * len(drawn.ids), stop, ends)
        if request.on_text is not None:
            request.on_text(done.text)
        return done

    def rest(self) -> None:
        """Nothing to free: the server has its own device memory."""

    def hold(self, timeout_s: float = 600.0) -> contextlib.AbstractContextManager[None]:
        """Nothing to hold: the server samples from its own copy of the weights until `publish`."""
        return contextlib.nullcontext()

    def stats(self) -> dict[str, float]:
        """`decode_s` is the time in which any reply was in flight: the server does not tell more."""
        with self._gate:
            now = time.perf_counter()
            busy_s = self._busy_s + (now - self._began if self._in_flight else 0.0)
        figures = {"decode_s": busy_s, "idle_s": now - self._opened - busy_s, "sampled_tokens": self._sampled_tokens}
        return {**dict.fromkeys(COUNTERS, 0.0), **figures}

    def publish(self, version: int) -> None:
        """Hand the learner's weights to the server. Raises InvariantError if the server does not sample from them."""
        self.model  # noqa: B018  checks that the server supports training
        began = time.perf_counter()
        with self._alone():
            if not (self.proof is not None and version == self.version and self._copy.unchanged()):
                self._hand_over(version)
            self.version = version
            asked = time.monotonic()
            self.proof = self._copy.prove(version, self._ask, self._max_gap)
            self._proven_at = asked
        self.handover_took_s = time.perf_counter() - began

    async def check_alive(self) -> None:
        """Raises EngineError within seconds if the server does not answer."""
        await self._server.check_alive()

    def release(self, session: str) -> None:
        """Nothing to release: the server evicts by itself."""

    async def close(self) -> None:
        await self._server.client.close()
        if self._cleanup is not None:
            await asyncio.to_thread(self._cleanup)

    async def _once(self, body: Mapping[str, Any]) -> Any:
        drawn = self._dialect.read(await self._server.post(self._dialect.url, body))
        if self.proof is not None:
            if drawn.label not in (None, str(self.version)):
                raise EngineError(f"{self._server.who} sampled from its version {drawn.label!r}, not from {self.version}")
            await self._probe_again()
        return drawn

    async def _probe_again(self) -> None:
        """Probe the server if its connection is newer than the last proof: it may have been restarted with other weights."""
        connected = self._server.client.connected_at
        if connected < self._proven_at:
            return
        async with self._probe_locks.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if connected < self._proven_at:  # another reply probed it while this one waited for the lock
                return
            ids, asked = self._copy.probe_ids(), time.monotonic()
            score = self._dialect.score_body(ids)
            # Retried separately, so that a busy probe does not sample the reply again.
            answer = await self._server.retry(lambda: self._server.post(self._dialect.url, score))
            if not self._copy.still(self._dialect.read_scores(answer, ids), self._max_gap):
                raise EngineError(f"{self._server.who} came back with other weights than those of version {self.version}")
            self._proven_at = max(self._proven_at, asked)

    def _hand_over(self, version: int) -> None:
        assert self._weights_dir is not None
        folder = self._weights_dir / f"agentfly-{os.getpid()}-{time.time_ns()}"
        folder.mkdir(parents=True)
        cleanup_old, self._cleanup = self._cleanup, weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self._copy.save(folder)
        seen = Path(self._server_dir) / folder.name if self._server_dir is not None else folder
        self._dialect.load(seen, version, timeout_s=self._handover_s)
        if cleanup_old is not None:
            cleanup_old()

    def _ask(self, ids: list[int], sampling: Sampling) -> Any:
        from .prompt import ProbeAnswer

        scored = self._server.call("POST", self._dialect.url, self._dialect.score_body(ids), timeout_s=self._handover_s)
        scores = self._dialect.read_scores(scored, ids)
        body = self._dialect.body(ids, sampling, sampling.max_tokens, sorted(self.stop_ids))
        drawn = self._dialect.read(self._server.call("POST", self._dialect.url, body, timeout_s=self._handover_s))
        if drawn.label not in (None, str(self.version)):
            raise InvariantError(f"the server says it samples from version {drawn.label!r}, after it was given {self.version}")
        return ProbeAnswer(scores, complete(self.tokenizer, drawn.ids, drawn.logprobs, [0] * len(drawn.ids), drawn.stop, ()))

    def _check(self) -> None:
        """Raise a ConfigError unless the server supports training."""
        if self._weights_dir is None:
            raise ConfigError("training from a server needs agent.engine.weights_dir: a folder that both sides see")
        limit_s = min(60.0, self._handover_s)
        try:
            self._dialect.check(self.max_context, timeout_s=limit_s)
            body = self._dialect.body([3], Sampling(max_tokens=1), 1, sorted(self.stop_ids))
            self._dialect.read(self._server.call("POST", self._dialect.url, body, timeout_s=limit_s))
        except NoIds as error:
            raise ConfigError(
                f"{self._server.who} cannot be trained from: {error}. Use a recent vLLM, or SGLang; any server will do "
                'for evaluation, with model = "openai:NAME@URL"'
            ) from error
        except EngineError as error:
            raise ConfigError(f"cannot train from the server: {error}") from error

    @contextlib.asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        """Count a reply as in flight. Waits while new weights are handed over."""
        while not self._enter():
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            with self._gate:
                if not self._changing:
                    continue
                self._waiting.append(waiter)
            try:
                async with asyncio.timeout(2 * self._handover_s):
                    await waiter
            except TimeoutError:
                raise EngineError(f"the hand-over of new weights took longer than {2 * self._handover_s:g} s") from None
        try:
            yield
        finally:
            with self._gate:
                self._in_flight -= 1
                if not self._in_flight:
                    self._busy_s += time.perf_counter() - self._began
                self._gate.notify_all()

    def _enter(self) -> bool:
        with self._gate:
            if self._changing:
                return False
            if not self._in_flight:
                self._began = time.perf_counter()
            self._in_flight += 1
            return True

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Wait for replies in flight; new ones wait until the context is left. So every token has exactly one version."""
        with self._gate:
            self._changing = True
        try:
            with self._gate:
                if not self._gate.wait_for(lambda: not self._in_flight, timeout=self._handover_s):
                    raise DeadlineError(f"replies were still in flight {self._handover_s:g} s after new weights were ready")
            yield
        finally:
            with self._gate:
                self._changing = False
                waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                with contextlib.suppress(RuntimeError):  # its event loop is closed
                    waiter.get_loop().call_soon_threadsafe(_resolve, waiter)


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
