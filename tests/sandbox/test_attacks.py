"""Every attack of the table is stopped in every tier that claims to, and works outside."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .attacks import ATTACKS, PRELUDE, PROCESSES, Attack
from .conftest import Bench

by_name = pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)


@pytest.fixture(scope="module")
def outside(secret_in_the_trainer: None) -> Iterator[dict[str, Any]]:
    """Targets on the machine: sockets that answer, and a process with a secret in its environment."""
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0agentfly-test-{os.getpid()}")
        abstract.listen(50)
        datagram = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        datagram.bind(f"\0agentfly-datagram-{os.getpid()}")
        yield {
            "tcp": tcp.getsockname()[1],
            "abstract": f"agentfly-test-{os.getpid()}",
            "datagram": f"agentfly-datagram-{os.getpid()}",
        }


@pytest.fixture
def host(outside: dict[str, Any], tmp_path: Path) -> Iterator[dict[str, Any]]:
    secret = tmp_path / "secret.txt"
    secret.write_text("canary-5e1f")
    with ExitStack() as stack:
        victim = subprocess.Popen(["sleep", "60"], cwd=tmp_path)
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(str(tmp_path / "s"))
        unix.listen(5)
        file = stack.enter_context(secret.open("r+"))
        os.set_inheritable(file.fileno(), True)
        yield {
            **outside, "secret": str(secret), "folder": str(tmp_path), "victim": victim.pid, "unix": str(tmp_path / "s"),
            "inode": os.fstat(file.fileno()).st_ino, "fd": file.fileno(),
        }  # fmt: skip


def program(attack: Attack, host: dict[str, Any]) -> str:
    return f"{PRELUDE}\nHOST = {host!r}\n{attack.code}"


@by_name
def test_it_is_stopped_by_namespaces(namespace: Bench, host: dict[str, Any], attack: Attack) -> None:
    result = namespace.cell(program(attack, host))
    assert "PWNED" not in result.stdout, result
    assert not result.timed_out, result


@by_name
def test_it_is_stopped_by_landlock(landlock: Bench, host: dict[str, Any], attack: Attack) -> None:
    if not attack.landlock:
        pytest.skip("the call succeeds without effect: another test checks the effect")
    result = landlock.cell(program(attack, host))
    assert "PWNED" not in result.stdout, result
    assert not result.timed_out, result


@pytest.mark.parametrize("attack", PROCESSES, ids=lambda attack: attack.name)
def test_it_is_stopped_by_landlock_without_mounts_and_cgroups(
    bare_landlock: Bench, host: dict[str, Any], attack: Attack
) -> None:
    if not attack.landlock:
        pytest.skip("the call succeeds without effect: another test checks the effect")
    result = bare_landlock.cell(program(attack, host))
    assert "PWNED" not in result.stdout, result
    assert not result.timed_out, result


@by_name
def test_it_works_outside(host: dict[str, Any], attack: Attack, tmp_path: Path) -> None:
    if attack.control == "root" and os.geteuid() != 0:
        pytest.skip("the control of this attack needs root: run pytest as root")
    code = attack.code if attack.control in ("same", "root") else attack.control
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"{PRELUDE}\nHOST = {host!r}\n{code}"],
        capture_output=True, text=True, timeout=300, cwd=tmp_path, pass_fds=[host["fd"]], start_new_session=True,
    )  # fmt: skip
    if "PWNED" not in done.stdout and not done.stderr:
        pytest.skip("this host stops it by itself")
    assert "PWNED" in done.stdout, done.stderr


@pytest.mark.parametrize("tier", ["namespace", "landlock"])
def test_a_signal_to_all_processes_reaches_none_outside(tier: str, request: pytest.FixtureRequest) -> None:
    bench: Bench = request.getfixturevalue(tier)
    code = "import signal; signal.signal(28, lambda *_: print('hit', flush=True)); print('up', flush=True)"
    code += "\nwhile True: signal.pause()"
    with subprocess.Popen([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, text=True) as victim:
        try:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "up\n"
            bench.cell("import os\nos.kill(-1, 28)")  # SIGWINCH: ignored by processes without a handler for it
            ready, _, _ = select.select([victim.stdout], [], [], 0.3)
            assert not ready
            victim.send_signal(28)
            assert victim.stdout.readline() == "hit\n"
        finally:
            victim.kill()


@pytest.mark.parametrize("tier", ["namespace", "landlock"])
def test_killing_the_own_group_leaves_other_sessions_alone(tier: str, request: pytest.FixtureRequest) -> None:
    bench: Bench = request.getfixturevalue(tier)

    async def both() -> str | None:
        one, other = await bench.server.session(), await bench.server.session()
        await one.run("import os\nos.fork()\nos.kill(0, 9)")  # process 1 of a namespace is immune to its own children
        spared = await other.run("1 + 1")
        await other.close()
        await one.close()
        return spared.value

    assert bench.run(both()) == "2"


def test_there_are_enough_attacks_and_no_name_twice() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 60
