"""What the watchdog reads: files that are deleted, mapped, linked, deep or unreadable; memory; processes that hide."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentfly.sandbox.interpreter.removal import remove_tree
from agentfly.sandbox.runtime.usage import Hidden, Proc, SessionFiles, cpu_ns

from .test_removal import nest

MB = 1 << 20


@pytest.fixture
def proc() -> Iterator[Proc]:
    fd = os.open("/proc", os.O_RDONLY)
    yield Proc(fd)
    os.close(fd)


def counted(folder: Path, max_count: int = 10_000) -> SessionFiles:
    files = SessionFiles()
    files.add_folder(str(folder), 1 << 40, max_count)
    return files


def test_every_file_counts_once_and_every_name_counts(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(os.urandom(MB))
    before = counted(tmp_path)
    for number in range(5):
        os.link(tmp_path / "f", tmp_path / f"l{number}")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 32)
    after = counted(tmp_path)
    assert after.size - before.size < MB // 2
    assert (before.count, after.count) == (1, 7)
    assert before.size >= MB


def test_depth_and_rights_hide_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "deep"
    folder.mkdir()
    try:
        nest(folder, 1200)
        assert counted(folder).count == 2400
        (folder / "closed").mkdir()
        (folder / "closed" / "f").write_bytes(os.urandom(MB))
        (folder / "closed").chmod(0)
        assert counted(folder).size >= MB
        assert 100 <= counted(folder, max_count=100).count < 110  # stops when the limit is exceeded
    finally:
        assert remove_tree(str(folder)) is None  # pytest cannot remove folders as deep as these


def test_deleted_files_count_while_they_are_open_or_mapped(tmp_path: Path, proc: Proc) -> None:
    def seen() -> SessionFiles:
        files = counted(tmp_path)
        proc.descriptors(os.getpid(), files)
        files.add_mapped(proc.mappings(os.getpid()), os.fsencode(tmp_path) + b"/", 64 * MB)
        return files

    path = tmp_path / "f"
    with path.open("w+b") as file:
        file.write(os.urandom(MB))
        file.flush()
        mapped = mmap.mmap(file.fileno(), MB)
        path.unlink()
        assert MB <= seen().size < 2 * MB
    del mapped
    assert seen().size < MB


def test_a_mapping_without_a_descriptor_counts_as_the_largest_file(tmp_path: Path) -> None:
    files = SessionFiles()
    line = b"7f00-7f01 rw-s 00000000 fe:00 4711                       " + os.fsencode(tmp_path) + b"/f (deleted)"
    other = b"7f00-7f01 r-xp 00000000 fe:00 4712                       /usr/lib/libx.so (deleted)"
    files.add_mapped([line, line, other], os.fsencode(tmp_path) + b"/", 64 * MB)
    assert files.size == 64 * MB


def test_files_inside_a_socket_are_seen(tmp_path: Path, proc: Proc) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, (tmp_path / "f").open("wb") as file:
        files = counted(tmp_path)
        proc.descriptors(os.getpid(), files)
        assert not files.in_flight
        socket.send_fds(ours, [b"x"], [file.fileno()])
        proc.descriptors(os.getpid(), files)
        assert files.in_flight
        assert len(files.sockets) >= 2


def test_a_living_process_that_cannot_be_read_is_hidden_and_one_that_ended_is_not(proc: Proc) -> None:
    class Refusing(Proc):
        def is_alive(self, pid: int) -> bool:
            return True

    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert not proc.is_alive(pid)
    assert proc.mappings(pid) == []
    os.waitpid(pid, 0)
    proc.descriptors(pid, SessionFiles())
    assert cpu_ns(pid) == -1
    with pytest.raises(Hidden):
        Refusing(proc.fd).descriptors(pid, SessionFiles())
    with pytest.raises(Hidden):
        Refusing(proc.fd).mappings(pid)


def test_cpu_time_and_memory_are_those_of_the_process(proc: Proc) -> None:
    before = cpu_ns(os.getpid())
    sum(range(100_000))
    assert cpu_ns(os.getpid()) > before > 0
    small = proc.private_mb(os.getpid())
    kept = bytearray(b"x") * (64 * MB)
    assert proc.private_mb(os.getpid()) > small + 50
    assert proc.proportional_mb(os.getpid()) > 50
    del kept
