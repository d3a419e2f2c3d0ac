"""What the files of a model's folder tell before weights are read: whether all are there, whole, and of a kind that is trained.

Of a safetensors file only the header is read: the names, types and places of its tensors.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from ....errors import ConfigError

_POINTER = b"version https://git-lfs"
_READ_FIRST = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json")
_WHOLE_TYPES = {"F64", "F32", "F16", "BF16"}
_FORMS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""The files that transformers looks for, in its order."""


def has_weights(folder: Path) -> bool:
    """Whether a folder holds more of a model than its config and tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in ("*.safetensors*", "*.bin*", "*.gguf", "*.pth", "adapter_config.json"))


def check_settings(name: object, folder: Path) -> None:
    """Raise a ConfigError if the folder is no model's, or if a file with settings is broken."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{str(name)!r} is not a model directory: {_other_format(folder) or 'it has no config.json'}")
    for file in (folder / each for each in _READ_FIRST if (folder / each).is_file()):
        _check_pointer(name, file)
        if file.name != "tokenizer.json" and not isinstance(_json(name, file), dict):
            raise ConfigError(f"{file.name} of the model {str(name)!r} holds no JSON object: download it again")


def check_weights(name: object, folder: Path) -> None:
    """Raise a ConfigError if weights are missing, cut off, quantised, or in a format that is not loaded."""
    form = next((folder / each for each in _FORMS if (folder / each).is_file()), None)
    if form is None:
        why = _other_format(folder) or f"it has no {_FORMS[0]}: the download is not complete"
        raise ConfigError(f"the weights of the model {str(name)!r} cannot be read: {why}")
    if (folder / "adapter_config.json").is_file():
        raise ConfigError(
            f"the model {str(name)!r} has adapters (adapter_config.json) beside its weights: merge them, or remove that file"
        )
    files = [form]
    if form.suffix == ".json":
        index = _json(name, form)
        places = index.get("weight_map") if isinstance(index, dict) else None
        files = sorted({folder / str(place) for place in (places or {}).values()})
        if lost := [file.name for file in files if not file.is_file()]:
            raise ConfigError(
                f"the weights of the model {str(name)!r} are incomplete: {len(lost)} of {len(files)} files missing, {lost[0]} "
                "among them: download it again"
            )
    for file in files:
        _check_pointer(name, file)
        if file.suffix == ".safetensors":
            _check_tensors(name, file)


def _check_tensors(name: object, file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        header = _decoded(stream.read(length)) if length <= size - 8 else None
    if not isinstance(header, dict):
        raise ConfigError(f"{file.name} of the model {str(name)!r} is cut off or no safetensors file: download it again")
    tensors = {key: each for key, each in header.items() if key != "__metadata__"}
    if 8 + length + max((each["data_offsets"][1] for each in tensors.values()), default=0) != size:
        raise ConfigError(f"{file.name} of the model {str(name)!r} is cut off: download it again")
    kinds = {each["dtype"] for key, each in tensors.items() if key.endswith("weight")} - _WHOLE_TYPES
    if kinds:
        raise ConfigError(
            f"the model {str(name)!r} is quantised (its weights are {', '.join(sorted(kinds))}), and such weights cannot be "
            "trained: take one in bfloat16"
        )


def _other_format(folder: Path) -> str | None:
    """What a folder holds instead of a model that can be loaded."""
    if (file := folder / "adapter_config.json").is_file():
        adapter = _decoded(file.read_bytes())
        base = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
        return f"it holds adapters of {base or 'another model'} alone: merge them into that model and give the merged one"
    for pattern, what in (("*.gguf", "GGUF"), ("*.pth", "PyTorch"), ("consolidated*", "Mistral's own"), ("*.onnx", "ONNX")):
        if found_file := next(iter(sorted(folder.glob(pattern))), None):
            return f"it holds weights in {what} format ({found_file.name}): take the model in transformers' format"
    if any((folder / "snapshots").glob("*")):
        return "it is a folder of the hub's cache: give the folder in its snapshots"
    if made := sorted((folder / "checkpoints").glob("step-*")):
        return f"it is the folder of a run: give one of its checkpoints, such as {made[-1]}"
    return None


def _check_pointer(name: object, file: Path) -> None:
    with file.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise ConfigError(f"{file.name} of the model {str(name)!r} is a pointer of Git LFS: run git lfs pull in its folder")


def _json(name: object, file: Path) -> Any:
    value = _decoded(file.read_bytes())
    if value is None:
        raise ConfigError(f"{file.name} of the model {str(name)!r} is no valid JSON: download it again")
    return value


def _decoded(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # UnicodeDecodeError included
        return None
