"""Loads and saves models. A name is a directory, a hub name, "pocket" or "pocket-worlds" (bundled), or "smollm2".

`load_model` returns a transformers causal LM in evaluation mode and its tokenizer, in float32 on a CPU and bfloat16 on a GPU
by default. Code that comes with a model is never executed. A broken or incomplete directory raises a ConfigError:
transformers would fill missing weights with random numbers. "smollm2" is found by `engines.smollm2`.
"""

from __future__ import annotations

import difflib
import gc
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ...errors import AgentFlyError, ConfigError, InvariantError
from ...kernels.lent_memory import LentMemory, can_lend
from ...kernels.rope import fix_rope
from ..options import LocalOptions, default_cache, lends_by_default
from ..smollm2 import find_smollm2
from .families.files import check_settings, check_weights
from .families.support import check_config, check_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig

POCKET = Path(__file__).parents[2] / "pocket" / "model"
BUNDLED = {"pocket": POCKET, "pocket-worlds": POCKET.with_name("worlds_model")}
NAMES = (*BUNDLED, "smollm2")
SWITCH_S, DEFAULT_SWITCH_S = 2e-4, 5e-3  # seconds that a thread may keep the interpreter from others: ours, and Python's
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(
    name: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    max_context: int | None = None,
    sampled: bool = False,
    check: Callable[[Any], object] | None = None,
) -> tuple[Any, Any]:
    """Return (model, tokenizer). `max_context`: the longest sequence of the run (see `fix_rope`); `sampled`: the local engine
    will serve the model; `check` may refuse the tokenizer before weights are read. Raises ConfigError."""
    place = _device(device)
    kind = _dtype(dtype, place)
    with _explaining_errors(name), quiet():
        model, tokenizer = _load_smollm2(kind) if name == "smollm2" else _load(name, kind, sampled, max_context, check)
        model = model.to(place).eval()
        fix_rope(model, max_context)
        return model, tokenizer


def read_settings(name: str | Path) -> tuple[Any, Any, Any]:
    """Return (tokenizer, config, generation config or None) without the weights. Raises ConfigError if there are none."""
    from transformers import AutoConfig, GenerationConfig

    with _explaining_errors(name):
        source = find_source(name)
        tokenizer = _read_tokenizer(source)
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    generation: Any = GenerationConfig
    try:
        return tokenizer, config, generation.from_pretrained(source)
    except OSError:  # optional in a model's folder
        return tokenizer, config, None


def read_config(name: str | Path) -> Any:
    """The config of a model, without tokenizer and weights. Raises ConfigError."""
    from transformers import AutoConfig

    with _explaining_errors(name):
        if name == "smollm2":
            return AutoConfig.from_pretrained((file := find_smollm2()).parent, gguf_file=file.name)
        return AutoConfig.from_pretrained(find_source(name), trust_remote_code=False)


def save_model(model: Any, tokenizer: Any, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write a folder that `from_pretrained` and the servers can load: `weights`, by default `merged_weights(model)`.

    Without a tokenizer, none is written.
    """
    with quiet():
        model.save_pretrained(folder, state_dict=merged_weights(model) if weights is None else weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)


def merged_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of the equivalent model without adapters, under its original names."""
    return dict(merged_tensors(model))


@torch.no_grad()
def merged_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the items of `merged_weights`. A merged weight is computed when it is yielded."""
    for name, tensor, adapter in plain_tensors(model):
        yield name, tensor if adapter is None else adapter.merged()


def plain_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, Any]]:
    """Yields the tensors of the model without adapters under their original names, each with the adapter beside it or None."""
    adapters = {name: part for name, part in model.named_modules() if hasattr(part, "lora_a")}
    wrappers = {name for name, part in model.named_modules() if getattr(part, "adapts", False)}
    for name, tensor in model.state_dict().items():
        outer, base, last = name.rpartition(".base.")
        if base and outer in wrappers:
            plain = f"{outer}.{last}"
            yield plain, tensor, adapters.get(plain if last != "weight" else outer)
        elif name.rpartition(".")[0] not in adapters:  # neither lora_a nor lora_b
            yield name, tensor, None


@torch.no_grad()
def copy_weights(model: torch.nn.Module, buckets: Iterable[Sequence[tuple[str, torch.Tensor]]]) -> None:
    """Copy tensors into a model in place. Raises InvariantError unless each of its weights gets a value of the right shape."""
    own: dict[str, torch.Tensor] = model.state_dict()
    missing = {tensor.data_ptr() for tensor in own.values()}  # tied weights have one address and several names
    for bucket in buckets:
        for name, tensor in bucket:
            if name not in own or own[name].shape != tensor.shape:
                shape = tuple(own[name].shape) if name in own else "none"
                raise InvariantError(f"{name} has the shape {tuple(tensor.shape)}, but in the engine's model {shape}")
            own[name].copy_(tensor)
            missing.discard(own[name].data_ptr())
    if missing:
        lost = sorted(name for name, tensor in own.items() if tensor.data_ptr() in missing)
        raise InvariantError(f"of the weights that were handed over, {len(lost)} are missing, among them {lost[0]}")


def end_ids(*holders: object) -> set[int]:
    """The end tokens that configs and a tokenizer name."""
    named = [getattr(holder, "eos_token_id", None) for holder in holders]
    return {token for ids in named if ids is not None for token in ([ids] if isinstance(ids, int) else ids)}


def count_gpus() -> int:
    """The CUDA devices that PyTorch sees."""
    return torch.cuda.device_count()


def free_gpu() -> None:
    """Give the memory of dropped models back to the GPU, where other processes need it while this one waits for them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def count_weights(config: object, chosen: int = 1) -> tuple[int, int, int]:
    """The weights of a model of this config, those of them that take part in a token for which `chosen` experts of a layer are
    chosen, and those of adapters of rank 1. The model is made on the meta device, which holds no numbers."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    sizes = {name: (weight.numel(), weight.shape) for name, weight in model.named_parameters()}
    idle = sum(
        size - size * chosen // shape[0] for name, (size, shape) in sizes.items() if len(shape) == 3 and "experts" in name
    )
    head = model.get_output_embeddings()
    linears = [part for part in model.modules() if type(part) is torch.nn.Linear and part is not head]
    total = sum(size for size, _ in sizes.values())
    experts = [part for part in model.modules() if hasattr(part, "_apply_gate")]  # as in `learn.model.expert_lora`
    stacks = [weight.shape for part in experts for weight in part.parameters(recurse=False) if weight.ndim == 3]
    adapted = sum(part.in_features + part.out_features for part in linears) + sum(n * (a + b) for n, a, b in stacks)
    return total, total - idle, adapted


def cache_bytes(options: LocalOptions, model: torch.nn.Module, device: torch.device) -> float:
    """Returns the size of the cache that the options ask for, or that fits beside a learner's states."""
    if options.kv_gib is not None:
        return options.kv_gib * 2**30
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if options.kv_fraction is not None:
            return options.kv_fraction * free
        return default_cache(free, options.learner_bytes * _num_weights(model))
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # not available on every system
        if options.kv_fraction is not None:
            raise ConfigError("engine: this system does not report its free memory: set kv_gib, not kv_fraction") from None
        return 2 * 2**30
    return min(2 * 2**30, 0.25 * free) if options.kv_fraction is None else options.kv_fraction * free


def _num_weights(model: torch.nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


def cache_lender(options: LocalOptions, model: torch.nn.Module, device: torch.device) -> Callable[[int], LentMemory] | None:
    """Returns what makes a cache's memory if a learner gets it. Raises ConfigError if that is asked for and cannot be."""
    lends = options.lend_cache
    if device.type != "cuda" or options.cache == "slots":
        if lends:
            raise ConfigError('engine: lend_cache needs a GPU and cache = "pages": remove it')
        return None
    if lends is None:
        lends = lends_by_default(_num_weights(model), torch.cuda.mem_get_info(device)[1]) and can_lend()
    return partial(LentMemory, device=device) if lends else None


def tune(weights: torch.Tensor) -> None:
    """Process-wide settings for the device of the weights; the learner profits from them, too.

    On ARM, oneDNN repacks the weights at every float32 product, ten times the work of a small layer: switched off. cuDNN's
    attention plans for 3 ms at every new shape, and the shape of a batch changes at nearly every step: switched off. Triton
    launches kernels on the thread's current device, whatever device their tensors are on: set to that of the weights.

    The engine's thread releases the interpreter at every launch of a graph. While the event loop computes, each launch would
    then cost Python's switch interval of 5 ms, and the device would wait: lowered, unless the program has set another one.
    """
    if sys.getswitchinterval() == DEFAULT_SWITCH_S:
        sys.setswitchinterval(SWITCH_S)
    if weights.device.type == "cuda":
        torch.cuda.set_device(weights.device)
        torch.backends.cuda.enable_cudnn_sdp(False)
    elif weights.dtype == torch.float32 and platform.machine() in ("aarch64", "arm64"):
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]


def context_of(config: PretrainedConfig) -> int:
    """The number of tokens that a model was made for."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 4096)


def _load(
    name: str | Path, dtype: torch.dtype, sampled: bool, max_context: int | None, check: Callable[[Any], object] | None
) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    source = find_source(name)
    config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    check_config(name, config, sampled=sampled, max_context=max_context)
    if (folder := Path(source)).is_dir():
        check_weights(name, folder)
    tokenizer = _read_tokenizer(source)
    check_tokenizer(name, tokenizer, config)
    if check is not None:
        check(tokenizer)
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    model, info = auto.from_pretrained(
        source,
        trust_remote_code=False,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, with a name
        # Some releases of transformers ignore the soft cap silently unless attention is eager.
        **({"attn_implementation": "eager"} if capped else {}),
    )
    for weight, there, wanted in info.get("mismatched_keys", ()):
        raise ConfigError(
            f"the weights of the model {str(name)!r} do not fit its config.json: {weight} has the shape {tuple(there)} "
            f"instead of {tuple(wanted)}"
        )
    lost = sorted(info.get("missing_keys", ()))
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise ConfigError(f"the weights of the model {str(name)!r} are incomplete: {lost[0]}{more} missing from its files")
    return model, tokenizer


def _read_tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"its tokenizer cannot be read: {error}") from error


def find_source(name: str | Path) -> str:
    """The directory or hub name to pass to `from_pretrained`."""
    if (bundled := BUNDLED.get(str(name))) is not None:
        if not (bundled / "config.json").is_file():
            raise ConfigError(f"the model {str(name)!r} is not in this installation of agentfly: install it again, or build it")
        return str(bundled)
    path = Path(name).expanduser()
    if path.is_dir():
        check_settings(name, path)
        return str(path.resolve())
    if path.exists():
        raise ConfigError(f"{str(name)!r} is a file; give the model's directory")
    text = str(name)
    if isinstance(name, Path) or text.startswith((".", "/", "~")) or text.count("/") > 1 or text.endswith("/"):
        raise ConfigError(f"no such model directory: {text!r}")
    return text


def _load_smollm2(dtype: torch.dtype) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct from GGUF, copied into a new model: transformers cannot save a model that it read from GGUF."""
    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    file = find_smollm2()
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import modeling_gguf_pytorch_utils

    llama: Any = LlamaForCausalLM
    gguf: Any = modeling_gguf_pytorch_utils
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The conversion loses the pre-tokenizer: digits are single tokens, and "\n\n" before a number stays one token.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    config._name_or_path = "smollm2"
    with torch.device("meta"):
        shape = llama(config)
    weights = gguf.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=shape)["tensors"]
    model = llama(config).to(dtype)
    lost = model.load_state_dict(weights, strict=False).missing_keys
    model.tie_weights()
    if set(lost) - {"lm_head.weight"}:
        raise ConfigError(f"the weights of 'smollm2' are incomplete: {sorted(lost)[0]} missing")
    model.generation_config.eos_token_id = config.eos_token_id
    tokenizer.model_max_length = config.max_position_embeddings
    return model, tokenizer


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"engine: {device!r} is not a device; use 'cpu', 'cuda' or 'cuda:1'") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine: device {str(device)!r} was requested, but PyTorch sees no GPU; use device='cpu'")
    return place


def _dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(f"engine: dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    return DTYPES[dtype]


@contextmanager
def _explaining_errors(name: str | Path) -> Iterator[None]:
    """Turn an error of transformers into a ConfigError that names the model."""
    try:
        yield
    except AgentFlyError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        if "trust_remote_code" in reason:
            raise ConfigError(
                f"the model {str(name)!r} comes with code of its own, which is never run: take a model of a family that "
                "transformers has (docs/models.md)"
            ) from error
        if len(reason) > 300:
            reason = reason[:300].rpartition(". ")[0] or reason[:300]
        near = difflib.get_close_matches(str(name), NAMES, n=1, cutoff=0.6)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ConfigError(f"cannot load the model {str(name)!r}: {reason}{hint}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Disable the progress bars of transformers."""
    from transformers import utils

    logging: Any = utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
