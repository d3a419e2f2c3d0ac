"""A session keeps its names and survives mistakes, and the trainer trusts nothing that it says."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from agentfly.errors import ConfigError, WorldError
from agentfly.sandbox import CellResult, SandboxLimits, SandboxServer, SandboxSession

from .attacks import SMALL
from .conftest import Bench
from .rootless import as_another_user


def cells(bench: Bench, *codes: str, timeout_s: float = 20) -> list[CellResult]:
    async def work() -> list[CellResult]:
        session = await bench.server.session()
        results = [await session.run(code, timeout_s) for code in codes]
        await session.close()
        return results

    results: list[CellResult] = bench.run(work())
    return results


def test_names_imports_and_functions_stay(namespace: Bench) -> None:
    *_, last = cells(
        namespace, "import math\ndef f(n):\n    return 1 if n < 2 else n * f(n - 1)", "x = f(5)", "x + math.floor(2.5)"
    )
    assert last == CellResult(value="122")


def test_output_of_every_level_comes_back_in_order(namespace: Bench) -> None:
    code = "import os, sys\nprint('one')\nos.write(1, b'two\\n')\nos.system('echo three')\nprint('four', file=sys.stderr)"
    assert cells(namespace, code, "print('next')") == [CellResult("one\ntwo\nthree\n", "four\n"), CellResult("next\n")]


def test_a_session_joins_its_cgroup_before_its_cgroup_namespace_begins(namespace: Bench) -> None:
    """With the opposite order systemd's mount option `nsdelegate` forbids the joining, and the group shows its name here."""
    code = "print(*{line.rsplit(':', 1)[1] for line in open('/proc/self/cgroup').read().split()})"
    if not namespace.server.facts["proc"]:
        pytest.skip("/proc cannot be mounted: run outside a container, or in one with --privileged")
    assert cells(namespace, code) == [CellResult("/\n")]


def test_a_traceback_names_only_the_cells_lines(namespace: Bench) -> None:
    *_, last = cells(namespace, "def f(x):\n    return 1 / x", "import json\nf(0)")
    assert last.error == (
        "Traceback:\n  <cell 2> line 2, in <module>: f(0)\n  <cell 1> line 2, in f: return 1 / x\n"
        "ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("import sys; sys.exit(3)", "SystemExit: 3 (the session goes on)"),
        ("exit()", "SystemExit"),
        ("input('name? ')", "input() does not work here"),
        ("def f(): f()\nf()", "RecursionError"),
        ("x = (", "SyntaxError"),
        ("x\0y", "null bytes"),
        ("x = '\ud800'", "surrogates"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class E(Exception):\n    def __str__(self): raise E\nraise E", "E"),
        ("b = bytearray(300 << 20)", "MemoryError"),
        ("open('/tmp/x', 'wb').write(b'x' * (9 << 20))", "Error"),
        ("import socket; socket.socket()", "PermissionError"),
        ("class R:\n    def __repr__(self): return 3\nR()", "TypeError"),
        ("import sys; sys.stdout.close(); print('x')", "closed file"),
    ],
)
def test_a_mistake_gives_an_error_and_the_session_lives(namespace: Bench, code: str, word: str) -> None:
    _, second, third = cells(namespace, "kept = 5", code, "print('out')\nkept")
    assert word in (second.error or ""), second
    assert (third.stdout, third.value, third.alive) == ("out\n", "5", True)


def test_descriptors_that_a_cell_closes_come_back(namespace: Bench) -> None:
    *_, last = cells(namespace, "import os; os.close(1); os.close(2)", "print('still here')")
    assert last.stdout == "still here\n"


def test_long_output_is_cut_in_the_middle(namespace: Bench) -> None:
    result, value = cells(namespace, "print('a' * 100_000, end='z')", "'b' * 100_000")
    assert len(result.stdout) < 2100
    assert result.stdout.startswith("aaa")
    assert result.stdout.endswith("az")
    assert "98,001 characters left out" in result.stdout
    assert value.value is not None
    assert len(value.value) < 2100


def test_endless_output_ends_at_the_limit_of_the_disk_or_of_time(patient: Bench) -> None:
    flood, after = cells(patient, "while True: print('x' * 1000)", "1", timeout_s=5)
    assert flood.error is not None
    assert len(flood.stdout) < 2100
    assert after.value == "1"


def test_a_late_cell_is_interrupted_and_the_session_kept(patient: Bench) -> None:
    async def work() -> Any:
        session = await patient.server.session()
        await session.run("x = 1")
        late = await session.run("import time\nwhile True: time.sleep(0.01)", 0.2)
        return late, await session.run("x"), await session.close()

    late, after, _ = patient.run(work())
    assert (late.timed_out, late.alive) == (True, True)
    assert "longer than 0.2 s" in late.error
    assert after == CellResult(value="1")


@pytest.mark.parametrize(
    "deafness",
    [
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "signal.signal(signal.SIGINT, lambda *_: None)",
        "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    ],
)
def test_a_cell_that_ignores_the_interrupt_is_killed_with_its_session(namespace: Bench, deafness: str) -> None:
    async def work() -> Any:
        session = await namespace.server.session()
        await session.run(f"import signal\n{deafness}")
        result = await session.run("while True: pass", 0.2)
        with pytest.raises(WorldError, match="has ended"):
            await session.run("1")
        await session.close()
        return result

    result = namespace.run(work())
    assert (result.timed_out, result.alive) == (True, False)


@pytest.mark.parametrize(
    ("code", "word"), [("os._exit(7)", "code 7"), ("os.abort()", "signal"), ("os.kill(os.getpid(), 9)\n1/0", "")]
)
def test_the_fork_server_says_how_a_session_ended(namespace: Bench, code: str, word: str) -> None:
    (result,) = cells(namespace, f"import os, ctypes\n{code}")
    assert word in (result.error or "")


@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("x = bytearray(3 << 30)", "memory"),
        ("with open('/tmp/x', 'wb') as file:\n    for _ in range(1000): file.write(bytes(1 << 20))", "disk"),
        ("import os\nfor _ in range(1000):\n    if not os.fork(): __import__('time').sleep(20)", "processes"),
        ("kept = [open('/dev/null') for _ in range(5000)]", "files"),
        ("print('x' * 1_000_000)", "output"),
        ("while True: pass", "time"),
        ("1 / 0", None),
    ],
)
def test_a_result_names_the_limit_that_its_cell_reached(namespace: Bench, code: str, limit: str | None) -> None:
    (result,) = cells(namespace, code, timeout_s=0.5 if limit == "time" else 120)
    assert result.limit == limit, result


FORGERIES = {
    "the wrong cell": "reply(99)",
    "JSON": 'send(b\'{"id": 1, "stdout": "forged"}\')',
    "JSON too deep": "send(b'[' * 50_000)",
    "eight megabytes of lists": "send(b'{\"id\": 1, \"x\": [' + b'[],' * 2_700_000 + b'[]]}')",
    "an unknown flag": "reply(1, flags=8)",
    "a length that is not the sum": "reply(1, stdout=5, extra=3)",
    "a text that is too long": "reply(1, stdout=2_000_000)",
    "an image that is too long": "reply(1, image=3_000_000)",
    "a text of four gigabytes": "reply(1, stdout=0xfffffff0, body=b'')",
    "bytes that are no text": "reply(1, stdout=4, body=b'\\xff' * 4)",
    "a reply and more": "reply(1, body=b'x' * 10)",
    "a frame of four gigabytes": "channel.sendall(b'\\xff' * 4 + b'x' * 1000)",
    "silence": "channel.shutdown(2)",
    "a closed socket": "channel.close()",
}
FORGE = """
import os, socket, stat, struct, time
def is_socket(fd):
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False
channel = socket.socket(fileno=next(filter(is_socket, range(3, 64))))
def send(body):
    channel.sendall(struct.pack(">I", len(body)) + body)
def reply(number, flags=0, stdout=0, image=0, extra=0, body=None):
    head = struct.pack(">IB8I", number, flags, 0, 0, stdout, 0, image, 0, 0, 0)
    body = b"x" * (stdout + image + extra) if body is None else body
    channel.sendall(struct.pack(">I", (37 + stdout + image + extra) & 0xffffffff) + head + body)
"""


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_replies_end_the_session_and_nothing_else(namespace: Bench, name: str) -> None:
    (result,) = cells(namespace, FORGE + FORGERIES[name] + "\nwhile True: time.sleep(1)")
    assert result.alive is False
    assert not result.timed_out
    assert cells(namespace, "1 + 1")[0].value == "2"


def test_a_forged_reply_counts_as_the_sessions_reply_and_a_second_one_ends_it(namespace: Bench) -> None:
    async def work() -> Any:
        session = await namespace.server.session()
        forged = await session.run(FORGE + "reply(1, stdout=6, body=b'forged')\ntime.sleep(0.2)", 60)
        while session.alive:  # the true reply to the cell is unexpected now
            await asyncio.sleep(0.01)
        after = await session.run("1")
        with pytest.raises(WorldError, match="has ended"):
            await session.run("1")
        await session.close()
        return forged, after

    forged, after = namespace.run(work())
    assert forged.stdout == "forged"
    assert (after.alive, after.timed_out) == (False, False)  # the code caused it, so it is no failure of the world


def test_a_session_cannot_claim_more_time(namespace: Bench) -> None:
    async def work() -> Any:
        session = await namespace.server.session()
        await session.run(FORGE + "import signal\nsignal.signal(2, signal.SIG_IGN)")
        result = await session.run("channel.sendall(b'\\0')\nwhile True: time.sleep(1)", 0.4)
        await session.close()
        return result

    result = namespace.run(work())
    assert (result.timed_out, result.alive) == (True, False)


def test_figures_come_back_as_images(namespace: Bench) -> None:
    """With a stand-in for matplotlib, which need not be installed."""
    fake = """
import sys, types
plots = types.ModuleType("matplotlib.pyplot")
plots.shown = [1]
class Figure:
    def savefig(self, file, format): file.write(b"\\x89PNG...")
plots.get_fignums = lambda: plots.shown
plots.figure = lambda number: Figure()
plots.close = lambda what: plots.shown.clear()
sys.modules["matplotlib.pyplot"] = plots
"""
    first, second = cells(namespace, fake, "1")
    assert first.images == (b"\x89PNG...",)
    assert second.images == ()


def test_sessions_do_not_see_each_other(namespace: Bench) -> None:
    async def work() -> Any:
        one, other = await namespace.server.session(), await namespace.server.session()
        await one.run("open('/tmp/mine', 'w').write('x')\nx = 1")
        found = await other.run(
            "import os\n'mine' in os.listdir('/tmp'), 'x' in globals(), [p for p in os.listdir('/proc') if p.isdigit()]"
        )
        await asyncio.gather(one.close(), other.close())
        return found

    assert namespace.run(work()).value == "(False, False, ['1'])"


def test_sessions_draw_different_random_numbers(namespace: Bench) -> None:
    code = "import random\nrandom.random()"
    assert cells(namespace, code)[0].value != cells(namespace, code)[0].value
    numpy = "import numpy\nfloat(numpy.random.rand())"
    one, other = cells(namespace, numpy)[0], cells(namespace, numpy)[0]
    assert one.error or one.value != other.value


def test_a_session_runs_one_cell_at_a_time(namespace: Bench) -> None:
    async def work() -> None:
        session = await namespace.server.session()
        first = asyncio.create_task(session.run("import time; time.sleep(0.2)"))
        await asyncio.sleep(0)
        with pytest.raises(WorldError, match="one at a time"):
            await session.run("1")
        assert (await first).alive
        await session.close()
        await session.close()

    namespace.run(work())


def test_a_megabyte_of_code_runs_and_more_than_the_limit_is_refused(namespace: Bench) -> None:
    big, huge = cells(namespace, "x = 1\n#" + "y" * 1_000_000 + "\nx", "#" * 2_000_001)
    assert big.value == "1"
    assert "the limit is 2,000,000" in (huge.error or "")
    assert huge.alive


def test_tiers_are_checked_before_anything_starts() -> None:
    async def work(**options: Any) -> None:
        await SandboxServer.start(**options)

    for options, word in (
        ({"tier": "jail"}, "no sandbox tier"),
        ({"tier": "process", "min_tier": "landlock"}, "below min_tier"),
    ):
        with pytest.raises(ConfigError, match=word):
            asyncio.run(work(**options))
    with pytest.raises(ValueError, match="memory_mb"):
        SandboxLimits(memory_mb=0)


def test_the_plain_tier_must_be_typed_out_and_warns() -> None:
    async def work() -> Any:
        server = await SandboxServer.start(tier="process", limits=SMALL)
        result = await (await server.session()).run("1 + 1")
        await server.close()
        return server.report(), result

    with pytest.warns(UserWarning, match="plain processes"):
        report, result = asyncio.run(work())
    assert result.value == "2"
    assert len(report) > 1


def test_the_report_names_the_tier_and_what_it_does_not_stop(namespace: Bench) -> None:
    first, *rest = namespace.server.report()
    assert first.startswith("namespace:")
    assert any("kernel" in sentence for sentence in rest)
    assert namespace.server.tier == "namespace"
    assert isinstance(namespace.run(namespace.server.session()), SandboxSession)
    assert namespace.server.stats()["live"] >= 1


def test_without_root_and_cgroups_every_attack_is_stopped_too() -> None:
    """Runs the attack table in a process of an ordinary user."""
    if os.geteuid() != 0:
        pytest.skip("the other tests ran without root already")
    done = as_another_user()
    if done is None:
        pytest.skip("another user can start no Python or not read this folder: give others access to both")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
