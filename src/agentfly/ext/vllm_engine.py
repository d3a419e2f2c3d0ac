"""vLLM in this process as an engine: token ids in and out, and the learner's weights after every update.

In: requests with prompt ids, from any event loop. Out: completions with sampled ids, log-probs and a version per token. vLLM
has a copy of the weights of its own; the learner trains `model`, and `publish` copies it over in memory (adapters merged),
empties the prefix cache, and proves by log-probs that vLLM now samples from it. With `sleep`, vLLM gives its memory to the
learner while it updates. Refuses prompts that do not fit, and every request while it sleeps or after a failure.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..engines.options import Device, Dtype, Share
from ..engines.prompt import complete, cuts, room_for
from ..errors import AgentFlyError, ConfigError, EngineError, InvariantError
from ..plugins import missing_extra
from ..types import Completion, Proof, Request, Sampling
from .vllm_thread import Row, VllmThread

if TYPE_CHECKING:
    from ..engines.copies import Probe

ASLEEP = "vLLM sleeps while the learner updates: there are no replies before weights are published"


class VllmEngine:
    """One vLLM engine on one device, and the learner's copy of its model.

    max_context      tokens of a prompt and its reply together; None: what the model was made for
    max_batch        how many requests run at once; more wait their turn
    kv_gib           memory of the cache on a CPU; None: 1
    memory_fraction  share of a GPU's memory that vLLM takes, weights and cache together; None: 0.5 with `sleep` off, else 0.85
    block_size       tokens of one block of the cache; None: vLLM's own choice
    prefix_caching   whether prompts that begin alike are read once
    eager            no compilation and no CUDA graphs; None: on a CPU
    dtype            of vLLM's weights; None: float32 on a CPU, bfloat16 on a GPU
    sleep            give weights and cache back while the learner updates; needs a GPU. None: where vLLM and learner share one
    learner_device   where the learner's copy lives; None: where vLLM runs
    learner_dtype    None: as `dtype`
    start_s          how long vLLM may take to start; handover_s: to take new weights; deadline_s: for one reply
    max_gap          largest mean difference (nats) between its log-probs and the learner's that a hand-over may leave;
                     None: 0.001 where both compute in float32, else 0.05
    """

    reads: Literal["ids", "messages"] = "ids"
    slept = False
    """Whether this process has had an engine that sleeps."""

    def __init__(
        self,
        name: str | Path,
        *,
        max_context: int | None = None,
        max_batch: int = 256,
        kv_gib: float | None = None,
        memory_fraction: Share | None = None,
        block_size: int | None = None,
        prefix_caching: bool = True,
        eager: bool | None = None,
        dtype: Dtype | None = None,
        sleep: bool | None = None,
        learner_device: Device | None = None,
        learner_dtype: Dtype | None = None,
        start_s: float = 600.0,
        handover_s: float = 300.0,
        deadline_s: float = 600.0,
        max_gap: float | None = None,
        stop_ids: Iterable[int] | None = None,
        chat_template: str | None = None,
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        for option, number in [
            ("max_context", max_context), ("max_batch", max_batch), ("kv_gib", kv_gib), ("memory_fraction", memory_fraction),
            ("start_s", start_s), ("handover_s", handover_s), ("deadline_s", deadline_s), ("max_gap", max_gap),
            ("block_size", block_size),
        ]:  # fmt: skip
            if number is not None and not number > 0:
                raise ConfigError(f"engine: {option} must be more than 0, not {number}")
        if memory_fraction is not None and memory_fraction > 1:
            raise ConfigError(f"engine: memory_fraction is a share of at most 1, not {memory_fraction}")
        if importlib.util.find_spec("vllm") is None:
            raise missing_extra("the engine 'vllm'", "vllm")
        import torch

        from ..engines.copies import LearnerCopy

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
        rendering = {"chat_template": chat_template, "template_args": template_args}
        self._copy = LearnerCopy(
            name,
            device=learner_device or ("cuda:0" if gpu else "cpu"),
            dtype=learner_dtype,
            stop_ids=stop_ids,
            rendering={key: value for key, value in rendering.items() if value is not None},
        )
        self.tokenizer, self.renderer, self.stop_ids = self._copy.tokenizer, self._copy.renderer, self._copy.stop_ids
        self.max_context = max_context or self._copy.context
        self.shares_weights = False
        self.proof: Proof | None = None
        self.handover_took_s = 0.0
        self.capacity = 2 * max_batch  # while some chains wait for their tools, others sample
        self._asleep = False
        self._handover_s, self._deadline_s = handover_s, deadline_s
        self._ids = itertools.count()
        settings = {
            "max_model_len": self.max_context,
            "max_num_seqs": max_batch,
            "dtype": self.dtype,
            "enforce_eager": not gpu if eager is None else eager,
            "enable_prefix_caching": prefix_caching,
            "enable_sleep_mode": self.sleeps,
            # Of the distribution that is drawn from, temperature included: what `Completion.logprobs` means.
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": 1,
            "generation_config": "vllm",  # the model's folder has no say in how we sample
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "seed": 0,
            **({"block_size": block_size} if block_size is not None else {}),
            **({} if gpu else _for_cpu(kv_gib or 1.0, self.max_context)),
            **({"gpu_memory_utilization": memory_fraction or (0.85 if self.sleeps else 0.5)} if gpu else {}),
        }
        if self.sleeps:
            _refuse_a_second_sleeper()
        self._saved: str | None = None
        source = self._copy.source()
        if source is None:
            source = self._saved = tempfile.mkdtemp(prefix="agentfly-vllm-")
            self._copy.save(Path(source))
        try:
            self._thread = VllmThread(lambda: _make({"model": source, **settings}), start_s)
        except AgentFlyError:
            self._forget_folder()
            raise
        except Exception as error:
            self._forget_folder()
            raise ConfigError(f"vLLM cannot serve {str(name)!r}: {' '.join(str(error).split())[:400]}") from error
        VllmEngine.slept = VllmEngine.slept or self.sleeps

    @property
    def model(self) -> Any:
        """The learner's copy, loaded when it is first asked for."""
        return self._copy.model

    @property
    def version(self) -> int:
        return self._thread.version

    async def generate(self, request: Request) -> Completion:
        if self._asleep:
            raise EngineError(ASLEEP)
        row = self._row(request)
        try:
            async with asyncio.timeout(self._deadline_s):
                self._thread.add(row)
                await row.future
        except TimeoutError:
            self._thread.remove(row)
            raise EngineError(f"vLLM gave no reply within {self._deadline_s:g} s") from None
        except BaseException:
            self._thread.remove(row)
            raise
        assert row.finished is not None
        # What a cut does to vLLM's log-probs cannot be undone: better none than wrong ones.
        logprobs = row.logprobs if cuts(request.sampling) is None else [math.nan] * len(row.ids)
        stops = {*self.stop_ids, *request.sampling.stop_ids}
        return complete(self.tokenizer, row.ids, logprobs, row.versions, row.finished, stops)

    def publish(self, version: int) -> None:
        """Give vLLM the learner's weights, and prove that it samples from them. Replies under way go on with the new ones."""
        began = time.perf_counter()
        weights = self._copy.weights()

        def take(engine: Any) -> None:
            if self._asleep:
                engine.wake_up(["weights"])
            engine.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
            if self._asleep:
                engine.wake_up(["kv_cache"])
            if not engine.reset_prefix_cache(reset_running_requests=True):
                raise InvariantError("vLLM took the new weights but could not empty its cache")
            self._thread.version = version
            self._thread.welcome()

        self._thread.call(take, self._handover_s, "take the new weights")
        self._asleep = False
        self.proof = self._copy.prove(version, self._ask, self._max_gap)
        self.handover_took_s = time.perf_counter() - began

    def rest(self) -> None:
        """The learner is about to update: give it our memory. `publish` wakes us."""
        if self.sleeps and not self._asleep:
            self._asleep = True
            self._thread.call(self._sleep, self._handover_s, "go to sleep")

    def _sleep(self, engine: Any) -> None:
        self._thread.give_up(engine, ASLEEP)
        engine.sleep(level=2)

    def release(self, session: str) -> None:
        """vLLM forgets by itself."""

    def stats(self) -> dict[str, float]:
        return {"steps": self._thread.steps, "busy_s": self._thread.busy_s}

    async def close(self) -> None:
        await asyncio.to_thread(self.shut)

    def shut(self) -> None:
        self._thread.shut()
        self._forget_folder()

    def _forget_folder(self) -> None:
        if self._saved is not None:
            shutil.rmtree(self._saved, ignore_errors=True)
            self._saved = None

    def _row(self, request: Request) -> Row:
        loop = asyncio.get_running_loop()
        room = room_for(request, self.max_context)
        params = _params(request.sampling, room, sorted({*self.stop_ids, *request.sampling.stop_ids}))
        row = Row(f"r{next(self._ids)}", list(request.prompt_ids), params, loop, loop.create_future())
        if request.on_text is not None:
            row.on_token = _listener(self.tokenizer, request, {*self.stop_ids, *request.sampling.stop_ids})
        return row

    def _ask(self, ids: list[int], sampling: Sampling) -> Probe:
        """In a thread without an event loop: score the ids, then go on from them."""
        from ..engines.copies import Probe

        async def both() -> Probe:
            loop = asyncio.get_running_loop()
            params = _params(Sampling(max_tokens=1), 1, [], scores=True)
            scored = Row(f"p{next(self._ids)}", ids, params, loop, loop.create_future())
            async with asyncio.timeout(self._handover_s):
                self._thread.add(scored)
                await scored.future
                return Probe(scored.scores, await self.generate(Request(ids, sampling)))

        try:
            found: Probe = _run_aside(both)
            return found
        except TimeoutError:
            raise EngineError(f"vLLM did not answer the probe within {self._handover_s:g} s") from None


def _refuse_a_second_sleeper() -> None:
    """vLLM's allocator for sleeping serves one engine in the life of a process, and stays taken after the engine's end."""
    if VllmEngine.slept:
        raise ConfigError(
            "this process has had a vLLM engine that sleeps, and vLLM cannot make a second one: "
            "start a new process, or set agent.engine.sleep = false"
        )


def _for_cpu(kv_gib: float, max_context: int) -> dict[str, Any]:
    """A prompt is read in one piece: on a CPU, vLLM stops at a seed whose prompt was cut (its generator has no offset)."""
    return {
        "kv_cache_memory_bytes": int(kv_gib * 2**30),
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_context, 8192),
    }


def _run_aside(work: Any) -> Any:
    """Run a coroutine to its end from a thread that may itself have a running loop."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work())).result()


def _make(settings: Mapping[str, Any]) -> Any:
    """The engine, in this process and this thread: no second process, no pinning of threads that the learner needs, too."""
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
        ignore_eos=True,  # the model's end token is among ours
        stop_token_ids=stop_ids,
        skip_special_tokens=False,
        detokenize=bool(sampling.stop),
        logprobs=0,
        prompt_logprobs=0 if scores else None,
        output_kind=RequestOutputKind.DELTA,
    )


def _listener(tokenizer: Any, request: Request, stops: set[int]) -> Any:
    """Text as it becomes certain, without the id that ends the reply."""
    from ..engines.local.text import TextStream
    from ..engines.prompt import decode

    stream = TextStream(lambda ids: decode(tokenizer, ids))

    def hear(new: list[int]) -> None:
        text = "".join(stream.push(token) for token in new if token not in stops)
        if text and request.on_text is not None:
            request.on_text(text)

    return hear
