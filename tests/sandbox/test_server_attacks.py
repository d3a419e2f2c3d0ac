"""No session ends another one or the server, keeps the trainer busy, exceeds its disk, or leaves anything behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import WorldError
from agentfly.sandbox import SandboxSession

from .conftest import Bench, bench
from .server_attacks import ATTACKS, CLEAN_UP, LIMITS, PRELUDE, SERVER, WIRE, Attack
from .test_leftovers import child_of

SERVERS: dict[str, dict[str, Any]] = {
    "namespace": {"tier": "namespace"},
    "namespace without a cgroup": {"tier": "namespace", "cgroup": False},
    "landlock": {"tier": "landlock"},
    "landlock without mounts and cgroup": {"tier": "landlock", "mounts": False, "cgroup": False},
    "process": {"tier": "process"},
}
WAIT_S = 50
"""Within the 60 seconds of `Bench.run`."""
UNCAUGHT_S = {"namespace": 40, "landlock": 40, "process": 1}
"""How long a session over its limits goes on before it counts as not stopped. The tier `process` does not claim to stop it."""


@dataclass
class Arena:
    bench: Bench
    other: SandboxSession
    folder: Path | None  # holds the sessions' folders
    tier: str


@pytest.fixture(scope="module", params=SERVERS)
def arena(request: pytest.FixtureRequest) -> Iterator[Arena]:
    asyncio.run(asyncio.sleep(0))  # what asyncio opens once does not count
    descriptors = os.listdir("/proc/self/fd")
    made = bench(limits=LIMITS, **SERVERS[request.param])
    other = made.run(made.server.session())
    made.run(other.run("kept = 41"))
    supervisor = made.server._process.pid
    found = Arena(made, other, sessions_folder(supervisor), SERVERS[request.param]["tier"])
    yield found
    processes = {str(supervisor), *children(supervisor)}
    made.close()
    deadline = time.monotonic() + WAIT_S
    while processes & set(os.listdir("/proc")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes & set(os.listdir("/proc"))
    assert found.folder is None or not found.folder.exists()
    assert len(os.listdir("/proc/self/fd")) == len(descriptors)


def sessions_folder(supervisor: int) -> Path | None:
    """Returns the folder that the supervisor holds locked."""
    links = [os.readlink(path) for path in Path(f"/proc/{supervisor}/fd").iterdir()]
    return next((Path(link).parent for link in links if link.endswith("/lock") and "/agentfly-sandbox-" in link), None)


def children(pid: int) -> set[str]:
    """Returns all descendants of a process."""
    found: set[str] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                found |= {child, *children(int(child))}
            except OSError:
                found.add(child)  # it ended meanwhile
    return found


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_a_session_harms_only_itself(arena: Arena, attack: Attack, tmp_path: Path) -> None:
    if arena.tier == "process" and not attack.process:
        pytest.skip("the tier `process` does not claim to stop it")
    (tmp_path / "file").write_text("canary")
    server = arena.bench.server

    async def strike() -> tuple[Any, bool, float]:
        standing = children(child_of(server._process.pid))
        session = await server.session()
        busy = time.thread_time()
        result = await session.run(
            f"CELL = 1\nHOST = {str(tmp_path)!r}\nUNCAUGHT_S = {UNCAUGHT_S[arena.tier]}\n{PRELUDE}\n{attack.code}",
            attack.timeout_s,
        )
        if attack.ends:
            await until(lambda: not session.alive)
        elif session.alive:  # the next cell may run, or show that the attack has ended the session
            with contextlib.suppress(WorldError):
                await session.run("1", 1)
        busy = time.thread_time() - busy
        alive = session.alive
        await session.close()
        await until(lambda: arena.folder is None or not os.path.lexists(arena.folder / f"s{session.number}"))
        await until(lambda: children(child_of(server._process.pid)) <= standing)
        return result, alive, busy

    result, alive, busy = arena.bench.run(strike())
    assert "PWNED" not in result.stdout or arena.tier == "process", result
    assert not (attack.ends and alive), result
    assert busy < 2, f"the trainer's thread was busy for {busy:.2f} s"
    assert arena.bench.run(arena.other.run("kept + 1", WAIT_S)).value == "42"
    assert arena.bench.cell("6 * 7").value == "42"
    assert (tmp_path / "file").read_text() == "canary"


async def until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


def test_there_are_enough_attacks_and_no_name_twice() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS)
    assert len([attack for attack in ATTACKS if attack.process]) >= 20
    assert min(len(WIRE), len(SERVER), len(CLEAN_UP)) >= 10
