"""An embedding model as an encoder: texts in, unit vectors out, through transformers.

`pooling` is "mean" (over the tokens), "cls" (the first token), "lasttoken", or "auto": as `1_Pooling/config.json` in the
directory says, else mean. Models such as E5 need `query_prefix` and `passage_prefix`. A text is cut at `max_length` tokens, or
at the model's limit. The model is a local directory: nothing is downloaded.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

POOLINGS = ("auto", "mean", "cls", "lasttoken")
OFFSET_MODELS = ("roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "xlm-roberta-xl", "data2vec-text")
STATED = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}


class TransformersEncoder:
    """A frozen model and its tokenizer. Raises ConfigError if the directory does not contain a usable one."""

    def __init__(
        self,
        model: str | Path,
        *,
        pooling: str = "auto",
        query_prefix: str = "",
        passage_prefix: str = "",
        max_length: int = 256,
        device: str | None = None,
        batch_size: int = 64,
    ) -> None:
        folder = Path(model).expanduser()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{folder} is not the directory of an embedding model: it has no config.json")
        if pooling not in POOLINGS:
            raise ConfigError(f"pooling is {', '.join(POOLINGS)}, not {pooling!r}")
        if max_length < 1 or batch_size < 1:
            raise ConfigError("max_length and batch_size of an encoder must be at least 1")
        import torch
        from transformers import AutoModel, AutoTokenizer

        try:
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            self._model: torch.nn.Module = AutoModel.from_pretrained(str(folder), local_files_only=True).eval()
        except Exception as error:  # the type of the error depends on the model
            what = " ".join(str(error).split())[:300]
            raise ConfigError(f"{folder}: cannot be opened as an embedding model: {type(error).__name__}: {what}") from error
        config = self._model.config
        if getattr(config, "is_encoder_decoder", False):
            self._model = self._model.get_encoder()
        if self._tokenizer.pad_token is None:
            if self._tokenizer.eos_token is None:
                raise ConfigError(f"{folder}: its tokenizer has neither a padding nor an end token, so texts cannot be batched")
            self._tokenizer.pad_token = self._tokenizer.eos_token
        size = getattr(config, "hidden_size", None)
        if not isinstance(size, int):
            raise ConfigError(
                f"{folder}: a {getattr(config, 'model_type', 'model')} has no one hidden size, so it is no encoder of texts"
            )
        parameters = inspect.signature(self._model.forward).parameters
        self._names = ["input_ids", "attention_mask", *(["token_type_ids"] if "token_type_ids" in parameters else [])]
        self._torch = torch
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._model.to(self._device)
        self._pooling = _stated_pooling(folder) if pooling == "auto" else pooling
        self._prefixes = {True: query_prefix, False: passage_prefix}
        self._max_length, self._batch_size = min(max_length, _positions(self._tokenizer, config)), batch_size
        self.size = size
        weights = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
        stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights]
        self.key = json.dumps([str(folder.resolve()), stamps, self._pooling, query_prefix, passage_prefix, self._max_length])

    def encode(self, texts: Sequence[str], *, query: bool) -> Any:
        """A float32 array with one row for each text."""
        torch = self._torch
        rows = []
        with torch.inference_mode():
            for start in range(0, len(texts), self._batch_size):
                batch = [self._prefixes[query] + text for text in texts[start : start + self._batch_size]]
                inputs = self._tokenizer(batch, padding=True, truncation=True, max_length=self._max_length, return_tensors="pt")
                inputs = inputs.to(self._device)
                states = self._model(**{name: inputs[name] for name in self._names if name in inputs}).last_hidden_state
                mask = inputs["attention_mask"]
                if self._pooling == "mean":
                    weights = mask.unsqueeze(-1).to(states.dtype)
                    pooled = (states * weights).sum(1) / weights.sum(1).clamp(min=1)
                else:  # the first or last token that is not padding, on whichever side the padding is
                    places = torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask
                    at = mask.argmax(1) if self._pooling == "cls" else places.argmax(1)
                    pooled = states[torch.arange(len(states), device=mask.device), at]
                rows.append(torch.nn.functional.normalize(pooled.float(), dim=-1).cpu())
        return torch.cat(rows).numpy()


def _stated_pooling(folder: Path) -> str:
    """The pooling that a sentence-transformers directory declares; mean if it declares none."""
    stated = folder / "1_Pooling" / "config.json"
    if not stated.is_file():
        return "mean"
    try:
        settings = json.loads(stated.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{stated}: cannot be read: {error}; give `pooling`") from error
    said = [pooling for key, pooling in STATED.items() if isinstance(settings, dict) and settings.get(key)]
    if len(said) != 1:
        raise ConfigError(f"{stated}: none of mean, cls and lasttoken pooling, or several; give `pooling`")
    return said[0]


def _positions(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> int:
    """The most tokens that the model reads."""
    most = int(tokenizer.model_max_length)
    held = getattr(config, "max_position_embeddings", None)
    if isinstance(held, int) and held > 0:
        # RoBERTa models number positions from the padding token's id + 1.
        offset = (config.pad_token_id or 0) + 1 if config.model_type in OFFSET_MODELS else 0
        most = min(most, held - offset)
    return max(1, most)
