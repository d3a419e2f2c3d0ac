"""Tiny random models of several families, a byte tokenizer, and short ways to ask an engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import torch
import transformers

from agentfly.engines.local import LocalEngine
from agentfly.engines.local.page_allocator import PAGE_SIZE
from agentfly.engines.options import CACHE_SIZES
from agentfly.types import Completion, Request, Sampling
from tests.close import ROUNDING, error_of_norm

END = 257
SHAPE = {
    "vocab_size": 260,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # loud weights: with the usual 0.02 every token is about as likely, and a bug would not show
    "bos_token_id": 256,
    "eos_token_id": END,
    "pad_token_id": 258,
}
WINDOWED = {"sliding_window": 10}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {"use_sliding_window": True, "max_window_layers": 1, **WINDOWED}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "mistral": ("MistralForCausalLM", "MistralConfig", WINDOWED),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {"query_pre_attn_scalar": 12, "attn_logit_softcapping": 5.0, **WINDOWED}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {"query_pre_attn_scalar": 12, **WINDOWED}),
}


@lru_cache
def _model(family: str, seed: int) -> Any:
    model, config, extra = FAMILIES[family]
    torch.manual_seed(seed)
    made = getattr(transformers, model)(getattr(transformers, config)(**SHAPE, **extra))
    made.generation_config.pad_token_id = SHAPE["pad_token_id"]
    if family == "gemma2":
        made.set_attn_implementation("eager")  # the only one that soft-caps its scores in every release of transformers
    return made.eval()


def make_model(family: str = "llama", seed: int = 0) -> Any:
    return copy.deepcopy(_model(family, seed))


@lru_cache
def byte_tokenizer() -> Any:
    """One id per byte, then <|im_start|> 256, <|im_end|> 257, <|pad|> 258; a ChatML template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # the bytes that byte-level BPE writes as themselves
    hidden = [byte for byte in range(256) if byte not in plain]
    vocabulary = {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        chat_template=(
            "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ),
    )


def run(work: Callable[[LocalEngine], Awaitable[Any]], model: Any = None, **options: Any) -> Any:
    """Open an engine, do the work in it, close it; never longer than ten minutes."""

    async def main() -> Any:
        async with opened(model, **options) as engine, asyncio.timeout(600):
            return await work(engine)

    return asyncio.run(main())


@asynccontextmanager
async def opened(model: Any = None, **options: Any) -> Any:
    if not options.keys() & set(CACHE_SIZES):
        options["kv_gib"] = 1 / 64  # of these models 29,000 tokens; the default is up to 2 GiB, written at once over pages
    engine = LocalEngine(make_model() if model is None else model, byte_tokenizer(), **options)
    try:
        yield engine
    finally:
        await engine.close()


async def ask(
    engine: LocalEngine, prompt: list[int] | str, session: str = "", on_text: Any = None, **sampling: Any
) -> Completion:
    ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
    return await engine.generate(Request(ids, Sampling(**sampling), session, on_text=on_text))


async def ask_or_leave(engine: LocalEngine, rng: Any, share: float, *asked: Any, **sampling: Any) -> Completion | None:
    """As `ask`, but a share of those who ask gives up after a moment; None for them."""
    going = asyncio.ensure_future(ask(engine, *asked, **sampling))
    if rng.random() < share:
        await asyncio.sleep(rng.random() * 0.02)
        going.cancel()
    try:
        return await going
    except asyncio.CancelledError:
        return None


async def until(happened: Callable[[], Any]) -> None:
    """Wait for something that the engine's thread does; `run` bounds the wait."""
    while not happened():
        await asyncio.sleep(0.001)


def is_idle(engine: LocalEngine) -> bool:
    """No request is left. The end of a session does not wake an idle engine, so it may wait in the inbox."""
    return not engine._scheduler.busy and all(kind == "release" for kind, _ in engine._inbox.copy())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, 250, (length,), generator=generator).tolist()


def full_logprobs(model: Any, prompt: list[int], sampled: list[int], temperature: float = 1.0) -> list[float]:
    """What an ordinary forward pass over everything says about the sampled tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


def close_to(a: list[float], b: list[float]) -> bool:
    """Whether the log-probs differ by rounding alone; they are differences of numbers of the size of 1 or more."""
    return len(a) == len(b) and error_of_norm(a, b, scale=1.0) <= ROUNDING


def check_pages(allocator):
    """Assert that free list, reference counts and page tables agree: a page held twice would corrupt samples."""
    held = [0] * allocator.num_pages
    for seq in allocator._seqs:
        assert seq.cached <= len(seq.pages) * PAGE_SIZE
        for page in seq.pages:
            held[page] += 1
    assert held == allocator._refcounts
    assert len(allocator._free) == sum(count == 0 for count in held[1:])
    assert held[0] == 0
