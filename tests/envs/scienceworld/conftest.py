"""Tests that play need Java and the package `scienceworld`; where either is missing they say so and are left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentfly.envs.scienceworld.java import missing


@pytest.fixture(scope="session")
def java() -> None:
    """What the simulator needs."""
    if sentence := missing():
        pytest.skip(sentence)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own."""
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
