"""Any embedding model directory as an encoder: texts in, vectors of length 1 out, through transformers.

`pooling` is "mean" (over the tokens), "cls" (the first token) or "auto": what the directory's own `1_Pooling/config.json`
says, else mean. Models such as E5 want a word before each text: `query_prefix` and `passage_prefix`. Only a directory is
opened here; nothing is fetched. Not for training: the model is frozen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError

POOLINGS = ("auto", "mean", "cls")


class TransformersEncoder:
    """A frozen model and its tokenizer."""

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
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
            self._model: Any = AutoModel.from_pretrained(str(folder), local_files_only=True).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}: cannot be opened as an embedding model: {error}") from error
        self._torch = torch
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._model.to(self._device)
        self._pooling = _stated_pooling(folder) if pooling == "auto" else pooling
        self._prefixes = {True: query_prefix, False: passage_prefix}
        self._max_length, self._batch_size = max_length, batch_size
        self.size = int(self._model.config.hidden_size)
        weights = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
        stamps = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in weights]
        self.key = json.dumps([str(folder.resolve()), stamps, self._pooling, query_prefix, passage_prefix, max_length])

    def encode(self, texts: Sequence[str], *, query: bool) -> Any:
        """A float32 array with one row for each text."""
        torch = self._torch
        rows = []
        with torch.inference_mode():
            for start in range(0, len(texts), self._batch_size):
                batch = [self._prefixes[query] + text for text in texts[start : start + self._batch_size]]
                inputs = self._tokenizer(batch, padding=True, truncation=True, max_length=self._max_length, return_tensors="pt")
                inputs = inputs.to(self._device)
                states = self._model(**inputs).last_hidden_state
                if self._pooling == "cls":
                    pooled = states[:, 0]
                else:
                    mask = inputs["attention_mask"].unsqueeze(-1).to(states.dtype)
                    pooled = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
                rows.append(torch.nn.functional.normalize(pooled.float(), dim=-1).cpu())
        return torch.cat(rows).numpy()


def _stated_pooling(folder: Path) -> str:
    """What a sentence-transformers directory says about itself."""
    stated = folder / "1_Pooling" / "config.json"
    if not stated.is_file():
        return "mean"
    try:
        told = json.loads(stated.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{stated}: cannot be read: {error}; give `pooling`") from error
    if told.get("pooling_mode_mean_tokens"):
        return "mean"
    if told.get("pooling_mode_cls_token"):
        return "cls"
    raise ConfigError(f"{stated}: neither mean nor cls pooling; give `pooling`")
