"""The bundled tokenizer, loaded once; and `scripts/pocket` on the import path, whose modules build the bundled models."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agentfly.pocket import model_dir

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "pocket"))


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir())
