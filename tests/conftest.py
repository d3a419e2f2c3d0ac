"""Shared by all tests: one torch thread (two fight each other on small machines) and no way out to the network."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from agentfly import plugins

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def built_in_names_mean_the_built_ins() -> None:
    """A test module with a `multiply` of its own shadows the built-in one; no test may depend on which module came first."""
    for kind, registered in plugins._registered.items():
        for name in plugins.BUILTIN.get(kind, {}):
            registered.pop(name, None)


@pytest.fixture(autouse=True, scope="module")
def java_ends_with_the_module() -> Iterator[None]:
    """JVMs of ScienceWorld wait a minute for more work; after a module of tests there is none."""
    yield
    module = sys.modules.get("agentfly.envs.scienceworld.jvms")
    if module is not None:
        module.close_jvms()
