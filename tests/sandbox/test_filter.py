"""The system call filter, looked at as a program: a few lines of BPF interpreter, and the kernel's own list of numbers."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from agentfly.sandbox.runtime.seccomp import _ARCH, _ARGUMENT_CALLS, CLONE3, DENIED, METADATA, NEWEST, assemble
from agentfly.sandbox.runtime.syscalls import _NUMBERS

ALLOW, EPERM, ENOSYS, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
COLUMN = {"x86_64": 0, "aarch64": 1}
READ = {"x86_64": 0, "aarch64": 63}


def verdict(arch: str, call: int, *arguments: int, data_arch: int | None = None, **options: object) -> int:
    """What the filter answers: the program run by hand."""
    padded = (*arguments, 0, 0, 0, 0, 0, 0)[:6]
    data = struct.pack("<iIQ6Q", call, _ARCH[arch] if data_arch is None else data_arch, 0, *padded)
    return run(decoded(arch, **options), data)


def decoded(arch: str, **options: object) -> list[tuple[int, int, int, int]]:
    code = assemble(arch, **options)  # type: ignore[arg-type]
    return [struct.unpack_from("<HBBI", code, place) for place in range(0, len(code), 8)]


def run(program: list[tuple[int, int, int, int]], data: bytes) -> int:
    place = value = 0
    while True:
        op, yes, no, constant = program[place]
        place += 1
        if op == 0x20:
            value = struct.unpack_from("<I", data, constant)[0]
        elif op == 0x05:
            place += constant
        elif op == 0x54:
            value &= constant
        elif op == 0x06:
            return constant
        else:
            test = {0x15: value == constant, 0x25: value > constant, 0x35: value >= constant, 0x45: bool(value & constant)}[op]
            place += yes if test else no


@pytest.mark.parametrize("arch", COLUMN)
def test_denied_calls_are_refused_and_ordinary_ones_pass(arch: str) -> None:
    for name, numbers in DENIED.items():
        if numbers[COLUMN[arch]] >= 0:
            assert verdict(arch, numbers[COLUMN[arch]]) == EPERM, name
    assert verdict(arch, READ[arch]) == ALLOW
    assert verdict(arch, CLONE3) == ENOSYS
    assert verdict(arch, 999) == ENOSYS
    assert verdict(arch, 0x40000000 | READ[arch]) == ENOSYS
    assert verdict(arch, READ[arch], data_arch=0x40000003) == KILL


@pytest.mark.parametrize(
    "options",
    [{}, {"keep_session": True}, {"keep_session": True, "lone_pid": 77}, {"shared_memory": False, "preallocate": False}],
    ids=str,
)
@pytest.mark.parametrize("arch", COLUMN)
def test_every_number_gets_the_verdict_of_the_tables_and_none_falls_between(arch: str, options: dict[str, object]) -> None:
    """The search by halves against the plain list."""
    refused = {numbers[COLUMN[arch]] for numbers in DENIED.values()}
    if "keep_session" in options:
        refused |= {numbers[COLUMN[arch]] for numbers in METADATA.values()}
    looked_at = {numbers[COLUMN[arch]] for numbers in _ARGUMENT_CALLS.values()}
    program = decoded(arch, **options)
    for call in [*range(NEWEST + 50), 0x3FFFFFFF, 0x40000000, 0xFFFFFFFF]:
        if call in looked_at:
            continue
        expected = EPERM if call in refused else ENOSYS if call == CLONE3 or call > NEWEST else ALLOW
        assert run(program, struct.pack("<IIQ6Q", call, _ARCH[arch], 0, *[0] * 6)) == expected, call
    assert len(program) < 4096  # the kernel's limit


@pytest.mark.parametrize("column", COLUMN.values(), ids=COLUMN)
def test_no_number_stands_for_two_calls(column: int) -> None:
    tables = {**DENIED, **METADATA, **_ARGUMENT_CALLS}
    assert len(tables) == len(DENIED) + len(METADATA) + len(_ARGUMENT_CALLS)
    numbers = [row[column] for row in tables.values() if row[column] >= 0]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) <= NEWEST
    for name, row in _NUMBERS.items():  # what the server itself calls
        assert tables.get(name, row)[column] == row[column], name
    for row in tables.values():  # from 424 on all machines count alike
        assert row[0] == row[1] or max(row) < 424


@pytest.mark.parametrize("arch", COLUMN)
def test_some_calls_depend_on_their_arguments(arch: str) -> None:
    calls = {name: numbers[COLUMN[arch]] for name, numbers in _ARGUMENT_CALLS.items()}
    assert verdict(arch, calls["clone"], 17) == ALLOW
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x8000):
        assert verdict(arch, calls["clone"], 17 | flag) == EPERM
    assert verdict(arch, calls["socketpair"], 1, 1 | 0o2000000) == ALLOW
    assert verdict(arch, calls["socketpair"], 1, 2) == EPERM
    assert verdict(arch, calls["socketpair"], 2, 1) == EPERM
    assert verdict(arch, calls["ioctl"], 0, 0x5412) == EPERM
    assert verdict(arch, calls["ioctl"], 0, 0x5401) == ALLOW
    assert verdict(arch, calls["kill"], 1, 9) == ALLOW
    assert verdict(arch, calls["kill"], 77, 9, lone_pid=77) == ALLOW
    assert verdict(arch, calls["kill"], 0, 9, lone_pid=77) == EPERM
    assert verdict(arch, calls["kill"], 0xFFFFFFFF, 9, lone_pid=77) == EPERM
    assert verdict(arch, calls["setsid"]) == ALLOW
    assert verdict(arch, calls["setsid"], keep_session=True) == EPERM
    assert verdict(arch, METADATA["fchmod"][COLUMN[arch]], keep_session=True) == EPERM
    assert verdict(arch, METADATA["fchmod"][COLUMN[arch]]) == ALLOW


@pytest.mark.parametrize("options", [{}, {"keep_session": True}, {"keep_session": True, "lone_pid": 77}], ids=str)
@pytest.mark.parametrize("arch", COLUMN)
def test_no_file_is_locked_leased_or_watched(arch: str, options: dict[str, object]) -> None:
    calls = {name: numbers[COLUMN[arch]] for name, numbers in _ARGUMENT_CALLS.items()}
    assert verdict(arch, calls["flock"], 3, 2, **options) == ENOSYS
    for command in (1024, 1026, 1024 | 1 << 32):  # F_SETLEASE, F_NOTIFY; the kernel reads the low half
        assert verdict(arch, calls["fcntl"], 3, command, 1, **options) == EPERM
    for command in (1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1031, 1033):  # flags, record locks, pipes, seals
        assert verdict(arch, calls["fcntl"], 3, command, **options) == ALLOW
    for advice in range(6):  # 4: POSIX_FADV_DONTNEED
        assert verdict(arch, calls["fadvise64"], 3, 0, 0, advice, **options) == (EPERM if advice == 4 else ALLOW)
    for flags in (0, 1, 8, 9):  # 8: RWF_NOWAIT
        assert verdict(arch, calls["preadv2"], 3, 0, 1, 0, 0, flags, **options) == (EPERM if flags & 8 else ALLOW)


@pytest.mark.parametrize("arch", COLUMN)
def test_memory_and_files_that_no_limit_counts_depend_on_their_arguments(arch: str) -> None:
    calls = {name: numbers[COLUMN[arch]] for name, numbers in _ARGUMENT_CALLS.items()}
    thread, files, private, shared, anonymous, huge = 0x10000, 0x400, 2, 1, 0x20, 0x40000
    assert verdict(arch, calls["clone"], thread | files) == ALLOW
    assert verdict(arch, calls["clone"], thread) == EPERM  # a thread with descriptors of its own
    for flags in (private, shared, private | anonymous, shared | anonymous, 3):
        assert verdict(arch, calls["mmap"], 0, 4096, 3, flags) == ALLOW
        refused = flags == shared | anonymous
        assert verdict(arch, calls["mmap"], 0, 4096, 3, flags, shared_memory=False) == (EPERM if refused else ALLOW)
        for options in ({}, {"shared_memory": False}):
            assert verdict(arch, calls["mmap"], 0, 4096, 3, flags | huge, **options) == EPERM
    assert verdict(arch, calls["mmap"], 0, 4096, 3, 3 | anonymous, shared_memory=False) == EPERM  # MAP_SHARED_VALIDATE
    assert verdict(arch, calls["fallocate"], 3, 0, 0, 1) == ALLOW
    assert verdict(arch, calls["fallocate"], 3, 0, 0, 1, preallocate=False) == 0x00050000 | 95
    for option in (7, 8):
        assert verdict(arch, calls["setsockopt"], 3, 1, option) == ALLOW
        assert verdict(arch, calls["setsockopt"], 3, 1, option, shared_memory=False) == EPERM


@pytest.mark.parametrize("arch", COLUMN)
def test_a_descriptor_sends_no_signals_to_others(arch: str) -> None:
    calls = {name: numbers[COLUMN[arch]] for name, numbers in _ARGUMENT_CALLS.items()}
    for command in (8, 10, 15):  # F_SETOWN, F_SETSIG, F_SETOWN_EX
        assert verdict(arch, calls["fcntl"], 3, command) == ALLOW
        assert verdict(arch, calls["fcntl"], 3, command, keep_session=True) == EPERM
    for request in (0x8901, 0x8902, 0x5412):
        assert verdict(arch, calls["ioctl"], 3, request, keep_session=True) == EPERM
    for command in (1, 2, 3, 4):
        assert verdict(arch, calls["fcntl"], 3, command, keep_session=True) == ALLOW
    assert verdict(arch, calls["ioctl"], 3, 0x5401, keep_session=True) == ALLOW


def test_the_numbers_are_the_kernels() -> None:
    """aarch64 uses the generic table; x86_64 has its own. Whichever header is installed is compared."""
    compared = 0
    for column, paths in (
        (1, ["/usr/include/asm-generic/unistd.h"]),
        (0, [f"/usr/{folder}/asm/unistd_64.h" for folder in ("include/x86_64-linux-gnu", "x86_64-linux-gnu/include")]),
    ):
        for path in map(Path, paths):
            if not path.is_file():
                continue
            known = {name: int(number) for name, number in re.findall(r"#define __NR3?2?6?4?_?(\w+)\s+(\d+)", path.read_text())}
            for name, numbers in {**DENIED, **METADATA, **_ARGUMENT_CALLS, **_NUMBERS}.items():
                if name in known:
                    assert numbers[column] == known[name], name
                    compared += 1
    if not compared:
        pytest.skip("no kernel headers: apt-get install linux-libc-dev")
    assert compared > 60
