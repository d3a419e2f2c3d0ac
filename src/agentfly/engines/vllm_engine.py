"""vLLM in this process as an engine: token ids in and out, and the learner's weights after every update.

vLLM holds a copy of the weights. The learner trains `model`; `publish` copies it over in memory (adapters merged), empties the
prefix cache, and proves by log-probs that vLLM samples from it. With `sleep`, vLLM frees its memory while the learner updates;
requests are refused until the next `publish`. Without, replies may be in progress during an update and a `publish`: vLLM
samples from its copy until then, so `hold` has nothing to do.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
import os
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

from ..aio.threads import run_to_end
from ..errors import AgentFlyError, ConfigError, EngineError, InvariantError
from ..plugins import missing_extra
from ..schema import Count, Name, Positive
from ..types import Completion, Proof, Request, Sampling
from .options import COUNTERS, AtUpdate, Device, Dtype, Fraction, TokenIds, check_arguments
from .prompt import ProbeAnswer, complete, cuts, hand_over, room_for
from .vllm_thread import VllmRequest, VllmThread

ASLEEP = "vLLM sleeps while the learner updates: it accepts requests again after the next publish"


class VllmEngine:
    """One vLLM engine on one device and the learner's copy of its model.

    max_context      tokens of a prompt and its reply together; None: what the model was made for
    max_batch        requests that run at once; more wait in a queue
    kv_gib           memory of the cache on a CPU; None: 1
    memory_fraction  fraction of a GPU's memory for vLLM's weights and cache; None: 0.85 with `sleep`, else 0.5
    block_size       tokens per cache block; None: vLLM's default
    prefix_caching   whether a common prefix of prompts is computed once
    eager            no compilation and no CUDA graphs; None: on a CPU
    dtype            of vLLM's weights; None: float32 on a CPU, bfloat16 on a GPU
    sleep            free weights and cache while the learner updates; needs a GPU. None: if vLLM and learner share one
    learner_device   device of the learner's copy; None: as vLLM
    learner_dtype    None: as `dtype`
    start_s          how long vLLM may take to start; handover_s: to load new weights; deadline_s: for one reply
    max_gap          largest mean difference (nats) between vLLM's log-probs and the learner's after a hand-over;
                     None: 0.001 where both compute in float32, else 0.05
    """

    reads: Literal["ids", "messages"] = "ids"
    at_update = AtUpdate("recompute", "keep", "finish")
    slept = False
    """Whether this process has created an engine with `sleep`."""

    def __init__(
        self,
        name: str | Path,
        *,
        max_context: Count | None = None,
        max_batch: Count = 256,
        kv_gib: Positive | None = None,
        memory_fraction: Fraction | None = None,
        block_size: Count | None = None,
        prefix_caching: bool = True,
        eager: bool | None = None,
        dtype: Dtype | None = None,
        sleep: bool | None = None,
        learner_device: Device | None = None,
        learner_dtype: Dtype | None = None,
        start_s: Positive = 600.0,
        handover_s: Positive = 300.0,
        deadline_s: Positive = 600.0,
        max_gap: Positive | None = None,
        stop_ids: TokenIds | None = None,
        chat_template: Name | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        check_arguments(VllmEngine, locals())
        if importlib.util.find_spec("vllm") is None:
            raise missing_extra("the engine 'vllm'", "vllm")
        import torch

        from .copies import LearnerCopy

        gpu = torch.cuda.is_available()
        shares = learner_device is None or torch.device(learner_device) in (torch.device("cuda"), torch.device("cuda:0"))
        self.sleeps = gpu and shares if sleep is None else sleep
        if self.sleeps and not gpu:
            raise ConfigError("engine: sleep = true needs a GPU, and PyTorch sees none: remove it")
        if gpu and kv_gib is not None:
            raise ConfigError("engine: kv_gib is for a CPU; on a GPU set memory_fraction")
        if not gpu and memory_fraction is not None:
            raise ConfigError("engine: memory_fraction is for a GPU; on a CPU set kv_gib")
        self.dtype = dtype or ("bfloat16" if gpu else "float32")
        learner_dtype = learner_dtype or self.dtype
        exact = self.dtype == learner_dtype == "float32"
        self._max_gap = max_gap or (1e-3 if exact else 0.05)
        self._copy = LearnerCopy(
            name,
            device=learner_device or ("cuda:0" if gpu else "cpu"),
            dtype=learner_dtype,
            max_context=max_context,
            stop_ids=stop_ids,
            chat_template=chat_template,
            template_args=template_args,
        )
        self.tokenizer, self.renderer, self.stop_ids = self._copy.tokenizer, self._copy.renderer, self._copy.stop_ids
        self.max_context = self._copy.context
        self.shares_weights = False
        self.proof: Proof | None = None
        self.handover_took_s = 0.0
        self.capacity = 2 * max_batch  # chains: while the tools of some run, others sample
        self._asleep = False
        self._handover_s, self._deadline_s = handover_s, deadline_s
        self._ids = itertools.count()
        self._salts = itertools.count(1)
        self._opened = time.perf_counter()
        settings: dict[str, Any] = {
            "max_model_len": self.max_context,
            "max_num_seqs": max_batch,
            "dtype": self.dtype,
            "enforce_eager": not gpu if eager is None else eager,
            "enable_prefix_caching": prefix_caching,
            "enable_sleep_mode": self.sleeps,
            # Log-probs after the temperature: what `Completion.logprobs` means.
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 1,
            "generation_config": "vllm",  # ignore the sampling defaults of the model's folder
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": 0,
            **({"block_size": block_size} if block_size is not None else {}),
        }
        if gpu:
            settings["gpu_memory_utilization"] = memory_fraction or (0.85 if self.sleeps else 0.5)
        else:
            # No chunked prefill: on a CPU, vLLM fails on a seeded request whose prompt is split (its generator has no offset).
            settings["kv_cache_memory_bytes"] = int((kv_gib or 1.0) * 2**30)
            settings["enable_chunked_prefill"] = False
            settings["max_num_batched_tokens"] = max(self.max_context, 8192)
        if self.sleeps:
            _check_first_sleeper()
        self._saved = tempfile.TemporaryDirectory(prefix="agentfly-vllm-", ignore_cleanup_errors=True)
        source = self._copy.source()
        if source is None:
            source = self._saved.name
            self._copy.save(Path(source))
        try:
            self._thread = VllmThread(lambda: _make({"model": source, **settings}), start_s)
        except Exception as error:
            self._saved.cleanup()
            if isinstance(error, AgentFlyError):
                raise
            raise ConfigError(f"vLLM cannot serve {str(name)!r}: {' '.join(str(error).split())[:400]}") from error
        VllmEngine.slept = VllmEngine.slept or self.sleeps

    @property
    def model(self) -> Any:
        """The learner's copy, loaded at the first use."""
        return self._copy.model

    @property
    def version(self) -> int:
        return self._thread.version

    async def generate(self, request: Request) -> Completion:
        if self._asleep:
            raise EngineError(ASLEEP)
        running = self._vllm_request(request)
        try:
            async with asyncio.timeout(self._deadline_s):
                self._thread.add(running)
                await running.future
        except TimeoutError:
            self._thread.remove(running)
            raise EngineError(f"vLLM gave no reply within {self._deadline_s:g} s") from None
        except BaseException:
            self._thread.remove(running)
            hand_over(request, self.tokenizer, running.ids, _known(running, request), running.versions)
            raise
        assert running.finished is not None
        stops = {*self.stop_ids, *request.sampling.stop_ids}
        return complete(self.tokenizer, running.ids, _known(running, request), running.versions, running.finished, stops)

    def publish(self, version: int) -> None:
        """Copy the learner's weights to vLLM and prove that it samples from them. `at_update` says what replies in progress do.

        New requests get a new salt, so they share no prefix with requests of before, whatever those have cached.
        """
        began = time.perf_counter()
        self.take_weights(version, self._copy.weights())
        self.proof = self._copy.prove(version, self.ask, self._max_gap)
        self.handover_took_s = time.perf_counter() - began

    def take_weights(self, version: int, buckets: Iterable[Sequence[tuple[str, Any]]]) -> None:
        """Sample from these weights from now on, under this version. Each bucket is copied before the next is requested."""
        mode = self.at_update

        def take(engine: Any) -> None:
            asleep = self._asleep
            if asleep:
                engine.wake_up(["weights"])
            else:
                self._thread.pause(engine)
            engine.collective_rpc("reload_weights", kwargs={"weights_iterator": itertools.chain.from_iterable(buckets)})
            if asleep:
                engine.wake_up(["kv_cache"])
            if mode != "keep" and not engine.reset_prefix_cache(reset_running_requests=True):
                raise InvariantError("vLLM took the new weights but could not empty its cache")
            if not asleep:
                self._thread.resume(engine)
            self._thread.version, self._thread.salt = version, str(next(self._salts))
            self._thread.accept_requests()

        self._thread.call(take, self._handover_s, "take the new weights", last=mode == "finish")
        self._asleep = False

    def hold(self, timeout_s: float = 600.0) -> AbstractContextManager[None]:
        """Nothing to hold: vLLM samples from its own copy of the weights until `publish`."""
        return nullcontext()

    def rest(self) -> None:
        """Free vLLM's device memory for the learner, if `sleep` is on. `publish` wakes vLLM up."""

        def sleep(engine: Any) -> None:
            self._thread.abort_all(engine, ASLEEP)
            engine.sleep(level=2)

        if self.sleeps and not self._asleep:
            self._asleep = True
            self._thread.call(sleep, self._handover_s, "go to sleep")

    def release(self, session: str) -> None:
        """Nothing to release: vLLM evicts by itself."""

    def stats(self) -> dict[str, float]:
        """Prefill and decode are one step of vLLM: their time is all in `decode_s`."""
        thread = self._thread
        return {
            **dict.fromkeys(COUNTERS, 0.0),
            "steps": thread.steps,
            "busy_s": thread.busy_s,
            "decode_s": thread.busy_s,
            "idle_s": max(0.0, time.perf_counter() - self._opened - thread.busy_s),
            "prefilled_tokens": thread.prefilled_tokens,
            "sampled_tokens": thread.sampled_tokens,
        }

    async def close(self) -> None:
        await asyncio.to_thread(self.shut)

    def shut(self) -> None:
        self._thread.shut()
        self._saved.cleanup()

    def _vllm_request(self, request: Request) -> VllmRequest:
        loop = asyncio.get_running_loop()
        room = room_for(request, self.max_context)
        params = _params(request.sampling, room, sorted({*self.stop_ids, *request.sampling.stop_ids}))
        running = VllmRequest(f"r{next(self._ids)}", list(request.prompt_ids), params, loop, loop.create_future())
        if request.on_text is not None:
            running.on_token = _listener(self.tokenizer, request, {*self.stop_ids, *request.sampling.stop_ids})
        return running

    def ask(self, ids: list[int], sampling: Sampling) -> ProbeAnswer:
        """Score the ids, then continue them. Called from a thread without an event loop."""

        async def both() -> ProbeAnswer:
            loop = asyncio.get_running_loop()
            params = _params(Sampling(max_tokens=1), 1, [], scores=True)
            scored = VllmRequest(f"p{next(self._ids)}", ids, params, loop, loop.create_future())
            async with asyncio.timeout(self._handover_s):
                self._thread.add(scored)
                await scored.future
                return ProbeAnswer(scored.scores, await self.generate(Request(ids, sampling)))

        try:
            return run_to_end(both())
        except TimeoutError:
            raise EngineError(f"vLLM did not answer the probe within {self._handover_s:g} s") from None


def _known(running: VllmRequest, request: Request) -> list[float]:
    """The log-probs of a request. With truncation, vLLM's are those of the truncated distribution: NaN, not wrong numbers."""
    return running.logprobs if cuts(request.sampling) is None else [math.nan] * len(running.ids)


def _check_first_sleeper() -> None:
    """vLLM's allocator for sleep mode serves one engine per process, also after that engine was closed."""
    if VllmEngine.slept:
        raise ConfigError(
            "this process has created a vLLM engine with sleep, and vLLM supports only one: "
            "start a new process, or set agent.engine.sleep = false"
        )


def _make(settings: Mapping[str, Any]) -> Any:
    """Create the engine in this process and thread, without pinning the CPU threads that the learner uses, too."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(EngineArgs(**settings))


def _params(sampling: Sampling, room: int, stop_ids: list[int], *, scores: bool = False) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        min_p=sampling.min_p,
        seed=sampling.seed,
        max_tokens=room,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        ignore_eos=True,  # the model's end token is in stop_token_ids
        stop_token_ids=stop_ids,
        skip_special_tokens=False,
        detokenize=bool(sampling.stop),
        logprobs=0,
        prompt_logprobs=0 if scores else None,
        output_kind=RequestOutputKind.DELTA,
    )


def _listener(tokenizer: Any, request: Request, stops: set[int]) -> Any:
    """A callback that passes new text to `on_text`, without the id that ends the reply."""
    from .prompt import decode
    from .text import TextStream

    stream = TextStream(lambda ids: decode(tokenizer, ids))

    def hear(new: list[int]) -> None:
        text = "".join(stream.push(token) for token in new if token not in stops)
        if text and request.on_text is not None:
            request.on_text(text)

    return hear
