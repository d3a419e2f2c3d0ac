"""Every test has an empty cache folder, and none of the machine's keys and addresses."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly.envs.search import sources

VARIABLES = (
    "REDIS_URL",
    "SEARCH_DATA",
    "SEARXNG_URL",
    "SERPER_API_KEY",
    "TAVILY_API_KEY",
    "BRAVE_API_KEY",
    "AGENTFLY_SEARCH_TOKEN",
)
WriteJsonl = Callable[..., Path]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    for source in [source for source in sources._local if source.where.startswith(str(tmp_path))]:
        del sources._local[source]


@pytest.fixture
def write_jsonl(tmp_path) -> WriteJsonl:
    """`write_jsonl(rows, "name.jsonl.gz")`: rows as lines; a text is written as it is."""

    def write(rows: list[Any], name: str = "passages.jsonl") -> Path:
        path = tmp_path / name
        text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return path

    return write
