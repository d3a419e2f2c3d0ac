"""Workspaces of the sandbox: what each door that they add lets through, and what it keeps out."""

# ruff: noqa: E501 - programs in texts

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentfly
from agentfly.errors import ConfigError
from agentfly.sandbox import SandboxLimits, SandboxServer
from agentfly.sandbox.limits import WorkspaceLayout
from agentfly.sandbox.runtime.seccomp import _ARGUMENT_CALLS, DENIED

from .conftest import Bench, bench
from .test_filter import ALLOW, COLUMN, EPERM, verdict

LIMITS = SandboxLimits(memory_mb=256, disk_mb=16, inodes=512, processes=24, grace_s=30)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> str:
    top = tmp_path_factory.mktemp("trees")
    for folder in (top, *top.parents[:2]):
        folder.chmod(0o755)
    for name in ("empty", "mine", "others"):
        (top / name / "folder").mkdir(parents=True)
        (top / name / "file").write_text(f"{name}\n")
        (top / name / "folder" / "deep").write_text("deep\n")
    return str(top)


@pytest.fixture(scope="module")
def loopback(trees: str, secret_in_the_trainer: None) -> Iterator[Bench]:
    try:
        made = bench("namespace", limits=LIMITS, layout=WorkspaceLayout(trees, "loopback"))
    except ConfigError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture(scope="module")
def quiet(trees: str, secret_in_the_trainer: None) -> Iterator[Bench]:
    made = bench("namespace", limits=LIMITS, layout=WorkspaceLayout(trees))
    yield made
    made.close()


def inside(server: Bench, code: str, tree: str = "mine") -> Any:
    async def one() -> Any:
        session = await server.server.session(tree)
        try:
            return await session.run(code, 60)
        finally:
            await session.close()

    return server.run(one())


def shell(server: Bench, script: str, tree: str = "mine") -> str:
    code = f"import subprocess\nsubprocess.run(['bash', '-c', {script!r}], stderr=1)"
    result = inside(server, code, tree)
    assert result.error is None, result
    return str(result.stdout)


def test_a_workspace_changes_its_own_tree_and_no_other(quiet: Bench, trees: str) -> None:
    said = shell(
        quiet, "cd /workspace; echo new > file; rm -r folder; mkdir more; chmod 700 more; touch -d 2001-01-01 file; cat file"
    )
    assert said == "new\n"
    assert Path(trees, "mine", "file").read_text() == "mine\n"
    assert Path(trees, "mine", "folder", "deep").exists()
    assert shell(quiet, "cat /workspace/file /workspace/folder/deep") == "mine\ndeep\n"


def test_a_workspace_without_a_tree_is_empty_and_can_be_written(quiet: Bench) -> None:
    assert shell(quiet, "cd /workspace; ls -A; echo x > y; cat y", tree="") == "x\n"


def test_other_trees_and_the_layers_have_no_path(quiet: Bench) -> None:
    said = shell(
        quiet, "ls -A /.trees /tmp /proc/self/root/.trees /proc/1/root/tmp /workspace/../.trees; find / -xdev -name others"
    )
    assert "others" not in said.replace("-name others", "") and "upper" not in said
    assert shell(quiet, "cat /proc/1/cmdline | tr -d '\\0'") == "sandbox"


def test_the_first_process_cannot_be_reached(quiet: Bench) -> None:
    tries = """
import ctypes, os, resource, signal
for path in ("mem", "environ", "maps", "cwd", "root", "fd"):
    try:
        os.listdir(f"/proc/1/{path}") if path in ("fd", "cwd", "root") else open(f"/proc/1/{path}", "r+b" if path == "mem" else "rb").read(1)
        print("reached", path)
    except OSError: pass
for action in (lambda: resource.prlimit(1, resource.RLIMIT_CPU, (1, 1)), lambda: os.sched_setaffinity(1, {0}),
               lambda: os.setpriority(os.PRIO_PROCESS, 1, 19)):
    try:
        action(); print("changed")
    except OSError: pass
os.kill(1, signal.SIGKILL); os.kill(1, signal.SIGSTOP)
print("end")
"""
    if not quiet.server.facts["cgroup"]:
        pytest.skip("without a cgroup the watchdog has to read the first process, so it stays readable")
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {tries!r}], stderr=1)\n1 + 1"
    result = inside(quiet, code)
    assert (result.stdout, result.value) == ("end\n", "2")


def test_nothing_of_the_kernel_can_be_written_through_proc(quiet: Bench) -> None:
    said = shell(quiet, "for f in sysrq-trigger sys/kernel/core_pattern sys/kernel/hostname sys/vm/drop_caches 1/oom_score_adj self/uid_map; "
                 "do (echo 1 > /proc/$f) 2>/dev/null && echo wrote $f; done; cat /proc/keys /proc/kallsyms /proc/interrupts; head -c 9 /proc/cpuinfo")  # fmt: skip
    assert [line for line in said.splitlines() if line.startswith("wrote") and "sysrq" not in line] == []
    assert said.endswith("processor")


MOUNTS = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
names = {"mount": lambda: libc.mount(b"tmpfs", b"/workspace", b"tmpfs", 0, None), "umount": lambda: libc.umount2(b"/tmp", 2),
  "umount work": lambda: libc.umount2(b"/workspace", 2), "unshare": lambda: libc.unshare(0x10000000), "user and mount": lambda: libc.unshare(0x10020000),
  "setns": lambda: libc.setns(os.open("/proc/self/ns/mnt", os.O_RDONLY), 0), "chroot": lambda: libc.chroot(b"/tmp"),
  "fsopen": lambda: libc.syscall(430, b"overlay", 0), "open_tree": lambda: libc.syscall(428, -100, b"/workspace", 1),
  "move_mount": lambda: libc.syscall(429, -100, b"/workspace", -100, b"/tmp", 0),
  "mknod": lambda: libc.mknod(b"/workspace/d", 0o60666, 0x800), "whiteout": lambda: libc.mknod(b"/workspace/w", 0o20666, 0),
  "trusted": lambda: libc.setxattr(b"/workspace/file", b"trusted.overlay.redirect", b"/x", 2, 0),
  "capability": lambda: libc.setxattr(b"/workspace/file", b"security.capability", b"x" * 20, 20, 0),
  "sethostname": lambda: libc.sethostname(b"x", 1), "keyctl": lambda: libc.syscall(250, 0, -3, 1)}
for name, call in names.items():
    if call() >= 0: print("passed", name)
"""


def test_mounts_and_layers_cannot_be_changed(quiet: Bench) -> None:
    assert inside(quiet, MOUNTS).stdout == ""


def test_forged_attributes_and_set_user_id_bits_have_no_effect(quiet: Bench) -> None:
    said = shell(quiet, "cd /workspace; cp /bin/id id; chmod 6755 id; ./id -u; python3 -c \"import os\n"
                 "try: os.setxattr('folder', 'user.overlay.opaque', b'y')\nexcept OSError: pass\"; ls folder")  # fmt: skip
    assert said.split() == ["65534", "deep"]


def test_disk_and_number_of_files_are_limited_in_tree_and_tmp_together(quiet: Bench) -> None:
    said = shell(quiet, "cd /workspace; dd if=/dev/zero of=a bs=1M count=12 2>/dev/null; dd if=/dev/zero of=/tmp/b bs=1M count=12 2>/dev/null; "
                 "du -cm a /tmp/b | tail -1; rm a /tmp/b; for n in $(seq 600); do : > f$n || break; done 2>/dev/null; ls | wc -l")  # fmt: skip
    total, count = int(said.split()[0]), int(said.split()[-1])
    assert total <= 17 and count < 520


def test_terminals_work_and_take_no_forged_input(quiet: Bench) -> None:
    if not quiet.server.facts["terminals"]:
        pytest.skip("devpts cannot be mounted here")
    code = """
import fcntl, os, pty
master, slave = pty.openpty()
os.write(slave, b"shown"); print(os.read(master, 10), os.ttyname(slave), os.listdir("/dev/pts"))
for request in (0x5412, 0x541C):
    try: fcntl.ioctl(slave, request, b"x"); print("forged")
    except OSError as error: print(error.errno)
"""
    said = inside(quiet, code).stdout.split("\n")
    assert said[0].startswith("b'shown' /dev/pts/0") and said[1:3] == ["1", "1"]


NETWORK = """
import shutil
import socket
def tried(*what):
    try: return socket.socket(*what)
    except OSError as error: return error.errno
print(*(tried(*each) if isinstance(tried(*each), int) else "made" for each in
  ((socket.AF_UNIX,), (socket.AF_INET,), (socket.AF_INET6,), (socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_INET, socket.SOCK_RAW),
   (socket.AF_NETLINK, socket.SOCK_RAW), (socket.AF_PACKET, socket.SOCK_RAW), (40, socket.SOCK_STREAM), (38, socket.SOCK_SEQPACKET))))
"""


def test_sockets_exist_only_in_a_private_network_and_only_of_its_kinds(quiet: Bench, loopback: Bench) -> None:
    assert inside(quiet, NETWORK).stdout == "1 1 1 1 1 1 1 1 1\n"
    assert inside(loopback, NETWORK).stdout == "made made made made 1 1 1 1 1\n"


def test_loopback_reaches_neither_the_machine_nor_another_workspace(loopback: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside, socket.socket(socket.AF_UNIX) as abstract:
        name = f"\0agentfly-test-{os.getpid()}"
        abstract.bind(name)
        abstract.listen()
        code = f"""
import shutil
import socket
def reach(family, address):
    try:
        s = socket.socket(family); s.settimeout(2); s.connect(address); print("reached", address)
    except OSError as error: print(error.errno)
reach(socket.AF_INET, ("127.0.0.1", {outside.getsockname()[1]}))
reach(socket.AF_INET, ("192.0.2.1", 80))
reach(socket.AF_UNIX, {name!r})
a = socket.create_server(("127.0.0.1", 0)); b = socket.create_connection(a.getsockname()); b.sendall(b"x"); print(a.accept()[0].recv(1))
try: a.setsockopt(socket.SOL_SOCKET, 25, b"lo"); print("bound")
except OSError: pass
"""

        async def two() -> Any:
            first, second = await loopback.server.session(), await loopback.server.session()
            await first.run(
                "import socket; s = socket.create_server(('127.0.0.1', 45454)); u = socket.socket(socket.AF_UNIX); u.bind('\\0x'); u.listen()",
                60,
            )
            other = await second.run("import socket\nfor f, a in ((socket.AF_INET, ('127.0.0.1', 45454)), (socket.AF_UNIX, '\\0x')):\n"
                                     "    try: socket.socket(f).connect(a); print('reached')\n    except OSError as e: print(e.errno)", 60)  # fmt: skip
            await first.close()
            await second.close()
            return other

        assert inside(loopback, code).stdout.split("\n")[:4] == ["111", "101", "111", "b'x'"]
        assert loopback.run(two()).stdout.split() == ["111", "111"]


def test_the_memory_of_sockets_is_limited(loopback: Bench) -> None:
    code = """
import os, socket
pids, reading = [], os.pipe()
for _ in range(3):
    if pid := os.fork():
        pids.append(pid)
    else:
        os.close(reading[0])
        break
held, sent = [], 0
server = socket.create_server(("127.0.0.1", 0), backlog=128)
try:
    for n in range(120 if len(pids) < 3 else 0):
        client = socket.create_connection(server.getsockname(), timeout=0.02)
        held.append(client)
        try:
            while True: sent += client.send(b"x" * (1 << 20))
        except OSError: pass
except OSError: pass
if len(pids) < 3:
    os.write(reading[1], b"%d " % (sent >> 20))
    import time; time.sleep(1000)
os.close(reading[1])
said = b""
while said.count(b" ") < 3: said += os.read(reading[0], 100)
print(sum(map(int, said.split())))
"""
    result = inside(loopback, code)
    most = LIMITS.memory_mb + LIMITS.disk_mb + 64  # without a limit three times as much is sent
    assert not result.alive or int(result.stdout) <= 1.5 * most  # each socket may exceed it by its smallest buffer


@pytest.mark.parametrize("arch", COLUMN)
def test_the_filter_of_a_private_network_allows_stream_and_datagram_of_three_families(arch: str) -> None:
    column = COLUMN[arch]
    call, pair = _ARGUMENT_CALLS["socket"][column], _ARGUMENT_CALLS["socketpair"][column]
    for family in range(46):
        for kind in range(11):
            wanted = ALLOW if family in (1, 2, 10) and kind in (1, 2) else EPERM
            assert verdict(arch, call, family, kind | 0x80000, sockets=True) == wanted, (family, kind)
            assert verdict(arch, call, family, kind) == EPERM
            assert verdict(arch, pair, family, kind, sockets=True) == (ALLOW if family == 1 and kind in (1, 2) else EPERM)
    for name in ("bind", "listen", "accept4", "connect"):
        assert verdict(arch, DENIED[name][column], sockets=True) == ALLOW
        assert verdict(arch, DENIED[name][column]) == EPERM
    limits = _ARGUMENT_CALLS["prlimit64"][column]
    assert verdict(arch, limits, 1, workspace=True) == EPERM and verdict(arch, limits, 0, workspace=True) == ALLOW


def test_a_tier_that_cannot_do_it_says_so_in_one_sentence(trees: str) -> None:
    with pytest.raises(ConfigError, match="network 'loopback' needs network namespaces"):
        bench("landlock", limits=LIMITS, layout=WorkspaceLayout(trees, "loopback")).close()
    with pytest.raises(ConfigError, match="the network of a workspace is 'none' or 'loopback', not 'host'"):
        WorkspaceLayout(trees, "host")
    with pytest.raises(ConfigError, match="needs a cgroup"):
        bench("namespace", limits=LIMITS, cgroup=False, layout=WorkspaceLayout(trees, "loopback")).close()


def test_without_namespaces_the_tree_is_copied_and_the_report_says_so(trees: str) -> None:
    made = bench("landlock", limits=LIMITS, layout=WorkspaceLayout(trees))
    try:
        assert "a plain copy of its tree" in made.server.report()[-1]
        said = inside(
            made,
            f"open('work/file', 'a').write('more'); print(open('work/file').read())\ntry: open({trees!r} + '/others/file')\nexcept OSError as e: print(e.errno)",
        )
        assert said.stdout == "mine\nmore\n13\n"
        assert Path(trees, "mine", "file").read_text() == "mine\n"
    finally:
        made.close()


def test_where_no_overlay_works_the_tree_is_copied_and_the_report_says_why() -> None:
    from agentfly.sandbox.tiers import workspace_notes

    notes = workspace_notes("namespace", {"no_overlay": "mount overlay: denied", "terminals": False})
    assert notes == [
        "The tree of a workspace is copied at its start, because an overlay is not possible (mount overlay: denied).",
        "Workspaces have no terminals: devpts cannot be mounted.",
    ]


def test_an_ordinary_user_has_an_overlay_too(request: pytest.FixtureRequest) -> None:
    """The same as a user without rights, in a process of that user."""
    if os.geteuid():
        pytest.skip("this test runs as an ordinary user already")
    program = """
import asyncio, os, tempfile
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
from agentfly.errors import ConfigError
from agentfly.sandbox import SandboxServer
from agentfly.sandbox.limits import WorkspaceLayout
async def main():
    top = tempfile.mkdtemp()
    for name in ("empty", "a"):
        os.mkdir(f"{top}/{name}"); open(f"{top}/{name}/file", "w").write("mine")
    try: server = await SandboxServer.start(tier="namespace", layout=WorkspaceLayout(top))
    except ConfigError as error: return print("no tier", error)
    session = await server.session("a")
    result = await session.run("import os; open('/workspace/file', 'a').write('more'); os.chmod('/workspace/file', 0o600); print(open('/workspace/file').read(), os.listdir('/.trees'))")
    print(result.stdout, server.facts["no_overlay"], open(f"{top}/a/file").read())
    await session.close(); await server.close()
asyncio.run(main())
"""
    # A folder that this user can read: the project may lie below one that only root can.
    source = Path(tempfile.mkdtemp(prefix="agentfly-source-"))
    request.addfinalizer(lambda: shutil.rmtree(source))
    source.chmod(0o755)
    shutil.copytree(
        Path(agentfly.__file__).parent, source / "agentfly", ignore=shutil.ignore_patterns("__pycache__", "*.safetensors")
    )
    environment = {
        "PYTHONPATH": str(source),
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    for python in (sys.executable, "/usr/bin/python3"):
        can_run = [
            "-c",
            f"import os, sys; os.setresuid(54321, 54321, 54321); os.execv({python!r}, [{python!r}, '-c', 'import sys; sys.exit(sys.version_info < (3, 11))'])",
        ]
        if subprocess.run([sys.executable, *can_run], capture_output=True, timeout=60).returncode == 0:
            break
    else:
        pytest.skip("a user without rights can start no Python 3.11 here")
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120, env=environment, cwd="/")
    if "no tier" in done.stdout:
        pytest.skip(done.stdout)
    assert done.stdout.split() == ["minemore", "[]", "mine"], done.stderr


def test_many_workspaces_leave_nothing_behind(quiet: Bench, trees: str) -> None:
    def mounts() -> int:
        return len(Path("/proc/self/mountinfo").read_text().splitlines())

    before = mounts()

    async def many() -> None:
        for number in range(20):
            session = await quiet.server.session("mine")
            if number % 2:
                await session.run("import subprocess; subprocess.Popen(['sleep', '100'])", 60)
                session._end("killed by the test")
                assert await session.wait_gone(60)
            await session.close()

    quiet.run(many())
    assert mounts() == before
    assert quiet.server.stats()["live"] == 0
    assert SandboxServer is not None and sorted(os.listdir(trees)) == ["empty", "mine", "others"]
