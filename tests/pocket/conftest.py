"""The bundled tokenizer, loaded once: the same `from_pretrained` as for any model."""

from __future__ import annotations

from typing import Any

import pytest

from agentfly.pocket import model_dir


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir())
