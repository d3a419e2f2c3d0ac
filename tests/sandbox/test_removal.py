"""Folders that foreign code filled are removed, whatever is in them; what cannot be removed is said once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from agentfly.sandbox.interpreter.removal import removal_of, remove_tree


def nest(folder: Path, depth: int, name: str = "a") -> None:
    """Makes folders inside each other, with a file and a link in each."""
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        os.symlink("/", "link", dir_fd=fd)
        inner = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)


@pytest.mark.parametrize(("depth", "name"), [(1500, "a"), (60, "x" * 250)], ids=["recursion limit", "PATH_MAX"])
def test_depth_does_not_matter(tmp_path: Path, depth: int, name: str) -> None:
    top = tmp_path / "top"
    top.mkdir()
    nest(top, depth, name)
    assert remove_tree(str(top)) is None
    assert not top.exists()
    assert Path("/").exists()


def test_names_that_removal_itself_uses_do_not_collide(tmp_path: Path) -> None:
    top = tmp_path / "top"
    for number in range(20):
        (top / f".{number}" / f".{number}" / ".0").mkdir(parents=True)
        (top / f".{number}" / ".5").mkdir(exist_ok=True)
        (top / f".{number}" / ".5" / "file").write_text("x")
    (top / os.fsdecode(b"\xff\n")).mkdir()
    assert remove_tree(str(top)) is None
    assert not top.exists()


def test_no_link_is_followed_and_a_link_in_place_of_the_folder_is_removed(tmp_path: Path) -> None:
    host = tmp_path / "host"
    host.mkdir(mode=0o500)
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "link").symlink_to(host)
    (tmp_path / "instead").symlink_to(host)
    assert remove_tree(str(tmp_path / "top")) is None
    assert remove_tree(str(tmp_path / "instead")) is None
    assert remove_tree(str(tmp_path / "nothing")) is None
    assert [path.name for path in tmp_path.iterdir()] == ["host"]
    assert host.stat().st_mode & 0o777 == 0o500


def test_removal_goes_in_small_steps(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    for number in range(50):
        (top / f"f{number}").touch()
    steps = removal_of(str(top))
    assert next(steps) is None
    assert len(list(top.iterdir())) == 49
    assert [step for step in steps if step is not None] == []
    assert not top.exists()


def as_a_user(work: Callable[[], str]) -> str:
    """Returns what a function returns in a child process without the rights of root, who needs no rights to a folder."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(1234, 1234, 1234)
                os.setresuid(1234, 1234, 1234)
            os.write(writing, work().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def test_folders_without_rights_are_removed_and_those_of_others_are_reported() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        top = f"{place}/top"

        def work() -> str:
            for mode in (0, 0o100, 0o200, 0o300, 0o400, 0o500):
                os.makedirs(f"{top}/{mode}/a/b/c")
                Path(f"{top}/{mode}/a/file").touch()
                for folder in ("a/b/c", "a/b", "a", ""):
                    os.chmod(f"{top}/{mode}/{folder}", mode)
            os.chmod(top, 0)
            return f"{remove_tree(top)} {os.path.lexists(top)}"

        assert as_a_user(work) == "None False"
        if os.geteuid() == 0:
            Path(top, "inner").mkdir(parents=True)
            assert as_a_user(lambda: str(remove_tree(top))) == f"{top}: Permission denied"
            assert Path(top, "inner").exists()
