"""Nothing is left behind: not after random kills, cancels and time-outs, and not after a SIGKILL of the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import WorldError
from agentfly.sandbox import SandboxServer

from .attacks import SMALL
from .conftest import bench, kernel_forbids


def processes() -> set[int]:
    """Returns every process of a sandbox, by its command line (forks keep it), and what the cells below start."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                line = Path(f"/proc/{name}/cmdline").read_bytes()
                if b"agentfly_sandbox" in line or b"sleep\x0098765" in line:
                    found.add(int(name))
            except OSError:
                continue  # it ended meanwhile
    return found


def cgroups() -> set[str]:
    with open("/proc/self/mountinfo") as file:
        points = [line.split()[4] for line in file if " - cgroup" in line]
    found: set[str] = set()
    for point in points:
        for folder, names, _ in os.walk(point):
            found |= {os.path.join(folder, name) for name in names if name.startswith("agentfly-")}
    return found


def leftovers() -> dict[str, set[Any]]:
    temporary = {path.name for path in Path(tempfile.gettempdir()).glob("agentfly-sandbox-*")}
    return {
        "processes": processes(),
        "cgroups": cgroups(),
        "folders": temporary,
        "descriptors": set(os.listdir("/proc/self/fd")),
    }


def settled(before: dict[str, set[Any]], wait_s: float = 20) -> dict[str, set[Any]]:
    """Returns what is there now and was not before. Waits for the kernel to finish."""
    deadline = time.monotonic() + wait_s
    while True:
        extra = {name: things - before[name] for name, things in leftovers().items()}
        if not any(extra.values()) or time.monotonic() > deadline:
            return extra
        time.sleep(0.05)


CELLS = [
    "1 + 1",
    "print('x' * 10_000)",
    "while True: pass",
    "import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass",
    "import os\nos._exit(1)",
    "import os\nfor _ in range(3):\n    if os.fork() == 0:\n        while True: pass",
    "import subprocess\nsubprocess.Popen(['sleep', '98765'])",
    "open('f', 'w').write('x' * 100_000)",
]


async def life(server: SandboxServer, dice: random.Random) -> None:
    """Runs a few cells in one session, then ends it in some way."""
    session = await server.session()
    with contextlib.suppress(WorldError):  # a cell on a session that a background process has ended meanwhile
        for _ in range(dice.randrange(3)):
            call = asyncio.create_task(session.run(dice.choice(CELLS), dice.choice([0.05, 0.2])))
            if dice.random() < 0.2:
                await asyncio.sleep(dice.random() * 0.05)
                call.cancel()
            await asyncio.wait([call])
            if call.cancelled() or not call.result().alive:
                break
    if dice.random() < 0.7:
        await session.close()  # the others end with the server


@pytest.mark.parametrize(
    ("tier", "count", "options"),
    [("namespace", 200, {}), ("landlock", 30, {}), ("landlock", 30, {"cgroup": False, "mounts": False}), ("process", 30, {})],
)
def test_random_kills_cancels_and_time_outs_leave_nothing(tier: str, count: int, options: dict[str, Any]) -> None:
    dice = random.Random(7)
    asyncio.run(asyncio.sleep(0))  # what asyncio opens once does not count
    before = leftovers()
    made = bench(tier, limits=SMALL, **options)

    async def work() -> None:
        gate = asyncio.Semaphore(8)

        async def one() -> None:
            async with gate:
                await life(made.server, dice)

        await asyncio.gather(*(one() for _ in range(count)))

    made.run(work())
    stats = made.server.stats()
    assert stats["started"] == count
    assert made.cell("1 + 1").value == "2"
    made.close()
    assert settled(before) == {"processes": set(), "cgroups": set(), "folders": set(), "descriptors": set()}


TRAINER = """
import asyncio
from agentfly.sandbox import SandboxServer
async def main():
    server = await SandboxServer.start(tier={tier!r})
    sessions = [await server.session() for _ in range(3)]
    spinning = asyncio.create_task(sessions[0].run("while True: pass", 100))
    await sessions[1].run("import subprocess; subprocess.Popen(['sleep', '98765'], start_new_session={apart})")
    print("up", flush=True)
    await asyncio.sleep(100)
asyncio.run(main())
"""


@pytest.mark.parametrize("tier", ["namespace", "landlock"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_trainer_that_is_killed_takes_everything_with_it(tier: str, how: signal.Signals) -> None:
    if kernel_forbids(tier):
        pytest.skip(f"the kernel forbids the tier {tier}")
    before = leftovers()
    code = TRAINER.format(tier=tier, apart=tier == "namespace")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as trainer:
        try:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "up\n"
            # Supervisor, server, three sessions, sleep. Popen returns before the kernel shows the command line of its process.
            deadline = time.monotonic() + 60
            while len(processes() - before["processes"]) < 6:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            trainer.send_signal(how)
            trainer.wait(20)
        finally:
            trainer.kill()
    extra = settled(before)
    assert (extra["processes"], extra["cgroups"], extra["folders"]) == (set(), set(), set())


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@pytest.mark.parametrize("tier", ["namespace", "landlock", "landlock without mounts"])
@pytest.mark.parametrize("which", ["supervisor", "server", "watchdog"])
def test_when_the_server_dies_sessions_say_so_and_nothing_is_left(which: str, tier: str) -> None:
    before = leftovers()
    tier, _, without = tier.partition(" ")
    options: dict[str, Any] = {"cgroup": False, "mounts": False} if without or which == "watchdog" else {}
    made = bench(tier, limits=SMALL, **options)
    supervisor = made.server._process.pid
    target = supervisor if which == "supervisor" else child_of(supervisor)
    if which == "watchdog":
        target = child_of(target)  # the fork server's first child

    async def work() -> tuple[Any, ...]:
        session = await made.server.session()
        call = asyncio.create_task(session.run("while True: pass", 30))
        await asyncio.sleep(0.05)
        os.kill(target, signal.SIGKILL)
        result = await call
        with pytest.raises(WorldError, match="server has ended"):
            await made.server.session()
        return result.alive, result.timed_out, session.alive, made.server.stats()["live"]

    assert made.run(work()) == (False, False, False, 0)
    made.close()
    bench(tier, limits=SMALL).close()  # a supervisor that was killed could not clean up: the next one does
    assert settled(before) == {"processes": set(), "cgroups": set(), "folders": set(), "descriptors": set()}
