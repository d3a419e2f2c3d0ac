"""One server and one loop per tier and test module; tests are skipped with the kernel's reason if the tier does not work."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import warnings
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from agentfly.errors import ConfigError
from agentfly.sandbox import SandboxServer

from .attacks import SMALL


class Bench:
    """A server and its event loop, for tests that are plain functions."""

    def __init__(self, tier: str, **options: Any) -> None:
        self.runner = asyncio.Runner()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.server = self.run(SandboxServer.start(tier=tier, **options))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            return await asyncio.wait_for(work, 300)

        return self.runner.run(bounded())

    def cell(self, code: str, timeout_s: float = 40) -> Any:
        async def one() -> Any:
            session = await self.server.session()
            try:
                return await session.run(code, timeout_s)
            finally:
                await session.close()

        return self.run(one())

    def close(self) -> None:
        self.run(self.server.close())
        self.runner.close()


def kernel_forbids(tier: str) -> bool:
    """Asks the kernel without the sandbox's code: a tier that fails although the kernel allows it must fail the tests."""
    code = "import ctypes; c = ctypes.CDLL(None); raise SystemExit("
    code += "c.unshare(0x10020000)" if tier == "namespace" else "c.syscall(444, None, 0, 1) <= 0" if tier == "landlock" else "0"
    return subprocess.run([sys.executable, "-I", "-c", code + ")"], timeout=60).returncode != 0


def bench(tier: str, **options: Any) -> Bench:
    try:
        return Bench(tier, **options)
    except ConfigError as error:
        if not kernel_forbids(tier):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def secret_in_the_trainer() -> Iterator[None]:
    os.environ["AGENTFLY_TEST_API_KEY"] = "canary-5e1f"
    yield
    del os.environ["AGENTFLY_TEST_API_KEY"]


@pytest.fixture(scope="module")
def namespace(secret_in_the_trainer: None) -> Iterator[Bench]:
    made = bench("namespace", limits=SMALL)
    yield made
    made.close()


@pytest.fixture
def patient(namespace: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """The server with a long grace: on a busy machine an interrupted cell may take longer to reply than the default allows."""
    monkeypatch.setattr(namespace.server, "limits", dataclasses.replace(SMALL, grace_s=30))
    return namespace


@pytest.fixture(scope="module")
def bare_landlock(secret_in_the_trainer: None) -> Iterator[Bench]:
    """As on a machine that allows neither mounts nor cgroups."""
    made = bench("landlock", limits=SMALL, cgroup=False, mounts=False)
    yield made
    made.close()


@pytest.fixture(scope="module")
def landlock(secret_in_the_trainer: None) -> Iterator[Bench]:
    made = bench("landlock", limits=SMALL)
    yield made
    made.close()
