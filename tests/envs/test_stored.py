"""What is stored is built once, checked whenever it is read, and built again when it was damaged."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentfly.envs import stored as store
from agentfly.envs.stored import MANIFEST, Damaged, cache_root, key_of, stamp_of, stored
from agentfly.errors import ConfigError, DeadlineError, WorldError


class Maker:
    """Builds a folder with two files, and counts how often."""

    def __init__(self, text: str = "hello") -> None:
        self.text, self.built = text, 0

    def build(self, folder: Path) -> None:
        self.built += 1
        (folder / "text").write_text(self.text)
        (folder / "deep").mkdir()
        (folder / "deep" / "numbers").write_bytes(bytes(range(256)) * 100)

    def load(self, folder: Path) -> str:
        assert len((folder / "deep" / "numbers").read_bytes()) == 25_600
        return (folder / "text").read_text()


def test_it_is_built_once_and_then_read(tmp_path):
    maker = Maker()
    assert [stored(tmp_path / "thing", maker.build, maker.load) for _ in range(3)] == ["hello"] * 3
    assert maker.built == 1


@pytest.mark.parametrize("damage", ["cut", "altered", "missing", "manifest altered", "no manifest", "a file instead"])
def test_what_was_damaged_is_built_again(tmp_path, damage):
    maker, path = Maker(), tmp_path / "thing"
    stored(path, maker.build, maker.load)
    numbers = path / "deep" / "numbers"
    if damage == "cut":
        numbers.write_bytes(numbers.read_bytes()[:-1])
    elif damage == "altered":
        numbers.write_bytes(b"\xff" + numbers.read_bytes()[1:])
    elif damage == "missing":
        numbers.unlink()
    elif damage == "manifest altered":
        manifest = path / MANIFEST
        manifest.write_text(manifest.read_text().replace("numbers", "nummers"))
    elif damage == "no manifest":
        (path / MANIFEST).unlink()
    else:
        path.rename(tmp_path / "elsewhere")
        path.write_text("not a folder")
    assert stored(path, maker.build, maker.load) == "hello"
    assert maker.built == 2
    assert stored(path, maker.build, maker.load) == "hello"
    assert maker.built == 2


def test_sizes_alone_are_compared_where_asked_for(tmp_path):
    maker, path = Maker(), tmp_path / "thing"
    stored(path, maker.build, maker.load)
    (path / "text").write_text("jello")
    assert stored(path, maker.build, maker.load, check=False) == "jello"
    assert stored(path, maker.build, maker.load) == "hello"


def test_a_loader_can_refuse_what_it_finds(tmp_path):
    maker = Maker("old")
    stored(tmp_path / "thing", maker.build, maker.load)
    maker.text = "new"

    def only_new(folder: Path) -> str:
        if maker.load(folder) != "new":
            raise Damaged("too old")
        return "new"

    assert stored(tmp_path / "thing", maker.build, only_new) == "new"


def test_a_fresh_build_that_cannot_be_read_is_the_worlds_failure(tmp_path):
    def refuse(folder: Path) -> str:
        raise ValueError("seven")

    with pytest.raises(WorldError, match="cannot be read: ValueError: seven"):
        stored(tmp_path / "thing", Maker().build, refuse)


def test_a_builder_that_fails_leaves_nothing_behind(tmp_path):
    def fail(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("no space")

    with pytest.raises(RuntimeError, match="no space"):
        stored(tmp_path / "thing", fail, Maker().load)
    assert [file.name for file in tmp_path.iterdir()] == ["thing.lock"]


def test_of_two_threads_one_builds_and_one_waits(tmp_path):
    maker, results = Maker(), []
    inside, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        inside.set()
        assert go_on.wait(60)
        maker.build(folder)

    def want() -> None:
        results.append(stored(tmp_path / "thing", slow, maker.load, wait_s=60))

    threads = [threading.Thread(target=want) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert inside.wait(60)
    go_on.set()
    for thread in threads:
        thread.join(60)
    assert results == ["hello", "hello"]
    assert maker.built == 1


def test_who_waits_too_long_is_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(store, "SAY_S", 0.0)
    inside, go_on = threading.Event(), threading.Event()

    def hang(folder: Path) -> None:
        inside.set()
        assert go_on.wait(60)
        Maker().build(folder)

    thread = threading.Thread(target=lambda: stored(tmp_path / "thing", hang, Maker().load))
    thread.start()
    try:
        assert inside.wait(60)
        with pytest.raises(DeadlineError, match="another run"):
            stored(tmp_path / "thing", Maker().build, Maker().load, wait_s=0.1)
        (said,) = [record.getMessage() for record in caplog.records]
        assert said == f"another run is building {tmp_path / 'thing'}: waiting for it, at most 0.1 s"
    finally:
        go_on.set()
        thread.join(60)


def test_a_builder_that_was_killed_is_taken_over(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from agentfly.envs.stored import stored
def build(folder):
    (folder / "half").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
stored(Path(sys.argv[1]), build, lambda folder: None)
"""
    path = tmp_path / "thing"
    done = subprocess.run([sys.executable, "-c", code, str(path)], timeout=800, check=False)
    assert done.returncode != 0
    assert not path.exists()
    maker = Maker()
    assert stored(path, maker.build, maker.load, wait_s=10) == "hello"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["thing", "thing.lock"]


def test_of_two_processes_one_builds_and_one_waits(tmp_path):
    code = """
import sys, time
from pathlib import Path
from agentfly.envs.stored import stored
where, log = Path(sys.argv[1]), Path(sys.argv[2])
def build(folder):
    with open(log, "a") as stream:
        stream.write("built\\n")
    (folder / "text").write_text("hello")
    deadline = time.monotonic() + 60
    while not (log.parent / "go").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
print(stored(where, build, lambda folder: (folder / "text").read_text(), wait_s=120))
"""
    log = tmp_path / "log"
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "thing"), str(log)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        deadline = time.monotonic() + 60
        while not log.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        (tmp_path / "go").touch()
        assert [process.communicate(timeout=800)[0].strip() for process in both] == ["hello", "hello"]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert log.read_text() == "built\n"


def test_a_cache_that_cannot_be_written_names_the_cure(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="AGENTFLY_CACHE"):
        stored(tmp_path / "file" / "thing", Maker().build, Maker().load)


def test_the_cache_is_where_the_user_says(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENTFLY_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("AGENTFLY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "agentfly"


def test_a_key_depends_on_every_part_and_on_a_files_stamp(tmp_path):
    file = tmp_path / "data"
    file.write_text("one")
    before = key_of("bm25", 1, stamp_of(file))
    assert before == key_of("bm25", 1, stamp_of(file))
    file.write_text("three")
    assert before != key_of("bm25", 1, stamp_of(file))
    assert key_of("a", "bc") != key_of("ab", "c")
