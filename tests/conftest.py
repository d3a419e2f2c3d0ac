"""Shared by all tests: one torch thread (two contend on small machines), no access to the network, and the marks `slow`
and `nightly`."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from agentfly import plugins

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so started by a shell in the background: tests send it to themselves
    signal.signal(signal.SIGINT, signal.default_int_handler)
# How long an example takes depends on how busy the machine is. The same examples in every run, so that a change is judged by
# what it changed; `pytest --hypothesis-profile search` draws new ones.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("agentfly", settings.get_profile("search"), derandomize=True)
settings.load_profile("agentfly")


def longest_first(items: list[pytest.Item], times: Path) -> None:
    """Order the tests by the seconds of their files, in the longest run; the tests of a file stay together and in order."""
    rows = re.findall(r"^\| (tests/\S+\.py) \| (\d+) \|$", times.read_text(encoding="utf-8"), re.MULTILINE)
    seconds: Counter[Path] = Counter()
    for path, number in rows:
        seconds[times.parent.parent / path] = max(int(number), seconds[times.parent.parent / path])
    items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of `slow.txt`, which `make test-fast` leaves out, and those of `nightly.txt`, which `make test` does.

    Workers of pytest-xdist begin with the files that take longest, so that they end together.
    """
    root = Path(__file__).parent
    if hasattr(config, "workerinput"):
        longest_first(items, root / "times.md")
    for mark in (pytest.mark.slow, pytest.mark.nightly):
        lines = (root / f"{mark.name}.txt").read_text(encoding="utf-8").splitlines()
        named = {line for line in lines if line and not line.startswith("#")}
        for item in items:
            path = item.path.relative_to(root.parent)
            function = f"{path.as_posix()}::{item.name.partition('[')[0]}"
            if named & {function, path.as_posix(), *(parent.as_posix() for parent in path.parents)}:
                item.add_marker(mark)


@pytest.fixture(autouse=True)
def built_in_names_mean_the_built_ins() -> None:
    """A test module that registers a `multiply` shadows the built-in one; no test may depend on which module came first."""
    for kind, registered in plugins._registered.items():
        for name in plugins.BUILTIN.get(kind, {}):
            registered.pop(name, None)


@pytest.fixture(autouse=True, scope="module")
def a_collection_visits_the_objects_of_one_module() -> Iterator[None]:
    """A worker holds millions of objects of imports and of collected tests, so a full collection would take up to a second.

    `envs.check` collects ten times per environment.
    """
    gc.freeze()
    yield
    gc.collect()


def numerics() -> tuple[object, ...]:
    """How torch computes in this process; as torch begins if it is not imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "highest", "torch.float32", False
    deterministic = torch.are_deterministic_algorithms_enabled()
    return torch.get_float32_matmul_precision(), str(torch.get_default_dtype()), deterministic


@pytest.fixture(autouse=True, scope="module")
def torch_computes_as_before() -> Iterator[None]:
    """A module that left another precision would change what the next one computes, in an order that depends on the workers."""
    before = numerics()
    yield
    assert numerics() == before, f"the tests of this module left torch with {numerics()}"


@pytest.fixture(autouse=True, scope="module")
def java_ends_with_the_module() -> Iterator[None]:
    """ScienceWorld's JVMs stay up for a minute; close them after each module of tests."""
    yield
    module = sys.modules.get("agentfly.envs.scienceworld.jvms")
    if module is not None:
        module.close_jvms()
