"""Ordinary programs go on behind the filter: databases, version control, a compiler, processes, locks on own files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from .conftest import Bench, bench

LOCKS = """
import fcntl, os
with open("mine", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    if os.fork() == 0:
        with open("mine", "w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os._exit(1)
            except OSError:
                os._exit(0)
    held = os.waitstatus_to_exitcode(os.wait()[1]) == 0
    fcntl.flock(file, fcntl.LOCK_UN)
    fcntl.flock(file, fcntl.LOCK_SH)
held"""
SQLITE = """
import sqlite3
for mode in ("delete", "wal"):
    base = sqlite3.connect(mode)
    base.execute(f"pragma journal_mode={mode}")
    with base:
        base.execute("create table t(x)")
        base.execute("insert into t values (7)")
    other = sqlite3.connect(mode)
    print(other.execute("select x from t").fetchone())
    base.close(), other.close()
"""
GIT = """
import os, subprocess
os.environ.update(HOME=os.getcwd(), GIT_CONFIG_NOSYSTEM="1")
os.environ.update({f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")})
open("f", "w").write("x")
for words in ("init -q .", "add f", "commit -qm one", "gc -q", "log --oneline"):
    done = subprocess.run(["git", *words.split()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
print(done.stdout.split()[-1])
"""
GCC = """
import subprocess
open("a.c", "w").write('#include <stdio.h>\\nint main(void) { puts("built"); return 0; }')
open("Makefile", "w").write("a: a.c\\n\\tgcc -O2 -o a a.c\\n")
print(subprocess.run("make -n && gcc -O2 -o a a.c && ./a", shell=True, capture_output=True, text=True))
"""
PROCESSES = """
import multiprocessing, concurrent.futures, tempfile, asyncio
pool = multiprocessing.get_context("fork").Pool(2)
print(pool.map(abs, [-1, -2]))
pool.terminate()
lock = multiprocessing.Lock()
with lock, tempfile.NamedTemporaryFile() as file:
    file.write(b"x")
async def main():
    made = await asyncio.create_subprocess_exec("true")
    return await made.wait()
print(asyncio.run(main()))
"""


@pytest.fixture(scope="module", params=["namespace", "landlock"])
def roomy(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = bench(request.param)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("code", "wanted", "needs"),
    [
        (LOCKS, "True", ()),
        (SQLITE, "(7,)\n(7,)", ()),
        (GIT, "one", ("git",)),
        (GCC, "built", ("gcc", "make")),
        (PROCESSES, "[1, 2]\n0", ()),
    ],
    ids=["locks", "sqlite", "git", "gcc", "processes"],
)
def test_an_ordinary_program_works_in_a_session(roomy: Bench, code: str, wanted: str, needs: tuple[str, ...]) -> None:
    if missing := [name for name in needs if shutil.which(name) is None]:
        pytest.skip(f"there is no {missing[0]} here")
    if code in (GIT, GCC, PROCESSES) and roomy.server.tier == "landlock":
        pytest.skip("without a private root a session cannot change modes, run what it has written, or make semaphores")
    result = roomy.cell(code, 50)
    assert result.error is None, result
    assert wanted in (result.stdout + str(result.value)), result
