"""The workspace environment: its shell, its files, what it says of bad input, and where its tree comes from."""

# ruff: noqa: E501 - programs in texts

from __future__ import annotations

import asyncio
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentfly.envs.workspace import trees
from agentfly.envs.workspace.env import Workspace, cut_middle, mismatch
from agentfly.errors import ConfigError, DataError
from agentfly.types import Task

FILES = {"app.py": "def f(x):\n    if x > 1:\n        return 2\n    return x\n", "folder/note.txt": "one\ntwo\n"}


def using(action: Callable[[Workspace], Any], fields: dict[str, Any] | None = None, **options: Any) -> Any:
    async def main() -> Any:
        work = Workspace(**{"limit_s": 60, **options})
        try:
            await work.reset(Task("t", (), {"files": FILES} if fields is None else fields))
            return await action(work)
        finally:
            await work.close()

    return asyncio.run(main())


def said(*commands: str, **options: Any) -> list[str]:
    async def action(work: Workspace) -> list[str]:
        return [(await work.bash(command)).observation for command in commands]

    return using(action, **options)  # type: ignore[no-any-return]


def test_the_shell_keeps_its_folder_its_variables_and_its_functions() -> None:
    assert said("cd folder; export A=5; g() { echo $A-$1; }", "pwd; g x", "false", "cat nothing") == [
        "(no output)",
        "/workspace/folder\n5-x",
        "[exit 1]",
        "cat: nothing: No such file or directory\n[exit 1]",
    ]


def test_a_shell_that_ends_is_replaced_and_the_answer_says_so() -> None:
    first, second, third, fourth = said("exit 3", "pwd", "kill -9 $$", "echo again")
    assert first == "[the shell exited with status 3; a new one begins with the next command]\n[exit 3]"
    assert second == "/workspace"
    assert third.startswith("[the shell was ended by signal 9; a new one begins")
    assert fourth == "again"


def test_a_late_command_is_stopped_and_the_shell_and_its_background_processes_live_on() -> None:
    async def action(work: Workspace) -> list[Any]:
        started = await work.bash("export A=5; sleep 1000 & echo $! > pid")
        late = await work.bash("sleep 1000", limit_s=0.5)
        after = await work.bash("echo $A; kill -0 $(cat pid) && echo lives")
        return [started.observation, late.error, late.observation.splitlines()[-1], after.observation]

    assert using(action) == ["(no output)", "timeout", "[stopped after 0.5 s]", "5\nlives"]


def test_a_background_process_that_keeps_the_output_open_does_not_hold_a_call() -> None:
    first, second = said(
        "(until [ -e go ]; do sleep 0.05; done; echo later; touch gone) & echo now",
        "touch go; until [ -e gone ]; do sleep 0.05; done",
    )
    assert (first, second) == ("now", "later")


def test_bytes_that_are_no_text_are_shown_and_long_output_is_cut_with_a_sentence() -> None:
    binary, long = said("printf 'a\\xff\\x00b'", "seq 100000", output_chars=400)
    assert binary == "a\ufffd\0b"
    assert long.startswith("1\n2\n3") and long.endswith("99999\n100000") and "characters left out" in long
    assert len(long) < 600
    assert cut_middle("x" * 400, 400) == "x" * 400


def test_loopback_serves_programs_of_the_workspace() -> None:
    server = "python -c \"import socket; s = socket.create_server(('127.0.0.1', 8000)); open('up', 'w'); s.accept()[0].sendall(b'hello')\" &"
    ask = "until [ -e up ]; do sleep 0.05; done; python -c \"import socket; print(socket.create_connection(('localhost', 8000)).recv(9))\""
    try:
        assert said(server, ask, network="loopback")[1] == "b'hello'"
    except ConfigError as error:
        pytest.skip(str(error))
    assert "PermissionError" in said("python -c 'import socket; socket.socket()'")[0]


def test_a_workspace_that_uses_too_much_ends_and_begins_again_with_the_tasks_files() -> None:
    async def action(work: Workspace) -> list[str]:
        await work.bash("echo changed > app.py")
        box = work._box
        assert box is not None
        box.session._end("it was killed by the test")
        lost = await work.bash("cat app.py")
        again = await work.bash("cat app.py")
        return [lost.observation, again.observation]

    lost, again = using(action)
    assert lost == "[the workspace ended: it was killed by the test; the next call begins with the task's files]"
    assert again.startswith("def f(x)")


def test_files_are_read_edited_and_searched() -> None:
    async def action(work: Workspace) -> list[str]:
        calls = [
            work.read("app.py", 2, 2), work.read("app.py", 9), work.read("nothing"), work.read("/dev/zero"), work.read("/bin/bash"),
            work.edit("app.py", "    if x > 1:", "    if x > 2:"), work.edit("app.py", "if x > 1:", ""), work.edit("app.py", "return", ""),
            work.edit("app.py", "def f(x):\n\tif x > 2:", ""), work.edit("new/file.py", "", "x = 1\n"), work.edit("app.py", "", "x"),
            work.grep("return [0-9]"), work.grep("nowhere"), work.grep("("), work.read("app.py", 0), work.read(""),
        ]  # fmt: skip
        return [(await call).observation for call in calls]

    shown = using(action)
    assert shown[:5] == [
        "2:     if x > 1:\n3:         return 2\n[1 more lines]", "app.py has 4 lines.", "nothing: No such file or directory",
        "/dev/zero: not a regular file", shown[4],
    ]  # fmt: skip
    assert "at most 100,000 can be read at once" in shown[4]
    assert shown[5:11] == [
        "Edited app.py.",
        "Nothing was changed. Line 1 of `old` is not there: 'if x > 1:'.",
        "Nothing was changed. `old` stands 2 times in app.py: give more lines around it.",
        "Nothing was changed. The white space of line 2 of `old` differs: line 2 of the file is '    if x > 2:'.",
        "Wrote new/file.py.",
        "app.py exists: give the text to replace in `old`.",
    ]
    assert shown[11] == "./app.py:3:        return 2" and shown[12] == "No line matches." and "Unmatched" in shown[13]
    assert shown[14:] == ["line and lines count from 1.", "The path must be a text without NUL."]
    assert mismatch("a\nb\nc\n", "a\nx") == "Line 2 of `old` is not there after line 1 of the file: 'x'."


def test_changes_name_what_the_chain_has_changed_and_nothing_else() -> None:
    async def action(work: Workspace) -> Any:
        await work.bash(
            "echo x > new; rm folder/note.txt; cp app.py copy; touch app.py; ln -s /etc/passwd link; mkfifo pipe; chmod +x copy"
        )
        return await work.changes()

    changes = using(action)
    assert changes == {"new": (0o644, b"x\n"), "folder/note.txt": None, "copy": (0o755, FILES["app.py"].encode())}


def test_a_tree_is_a_folder_an_archive_or_a_commit(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a.txt").write_text("first\n")
    (folder / "outside").symlink_to("/etc/passwd")
    (folder / "inside").symlink_to("sub/a.txt")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(folder)]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True, capture_output=True)
    (folder / "sub" / "a.txt").write_text("second\n")
    with tarfile.open(tmp_path / "tree.tar.gz", "w:gz") as packed:
        packed.add(folder / "sub", "sub")
    shell = "cat sub/a.txt; ls -A; echo more >> sub/a.txt; cat inside 2>/dev/null; test -e .git && echo history; true"
    for fields, first in (
        ({"tree": str(folder)}, "second"),
        ({"tree": str(tmp_path / "tree.tar.gz")}, "second"),
        ({"repo": str(folder)}, "first"),
        ({"repo": str(folder), "commit": "HEAD"}, "first"),
    ):

        async def action(work: Workspace) -> Any:
            return (await work.bash(shell)).observation, await work.changes()

        shown, changes = using(action, fields)
        assert shown.splitlines()[0] == first and "outside" not in shown and "history" not in shown
        assert changes == {"sub/a.txt": (0o644, f"{first}\nmore\n".encode())}
    assert (folder / "sub" / "a.txt").read_text() == "second\n"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tree": "/nowhere"}, "there is no such file or folder"),
        ({"tree": "/bin/bash"}, "neither a folder nor an archive"),
        ({"tree": "/", "repo": "/"}, "a task has one tree, not both 'tree' and 'repo'"),
        ({"commit": "abc"}, "needs the field 'repo'"),
        ({"files": {"../x": ""}}, "'../x' is not a path inside the tree"),
        ({"files": ["x"]}, "maps paths to texts"),
    ],
)
def test_a_tree_that_cannot_be_had_is_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        trees.check_source(fields)


def test_a_layer_that_is_no_archive_and_a_commit_that_is_none_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_text("no archive")
    with pytest.raises(DataError, match=r"x\.tar could not be unpacked"):
        trees.layer_of({"tree": str(tmp_path / "x.tar")})
    with pytest.raises(DataError, match="git cannot read"):
        trees.layer_of({"repo": str(tmp_path), "commit": "abc"})
    with tarfile.open(tmp_path / "out.tar", "w") as packed:
        info = tarfile.TarInfo("../../escape")
        packed.addfile(info)
    with pytest.raises(DataError, match="could not be unpacked"):
        trees.layer_of({"tree": str(tmp_path / "out.tar")})
    assert [name for name in os.listdir(trees.store()) if name.endswith(".part")] == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"limit_s": 0}, "limit_s must be above 0"),
        ({"network": "host"}, "the network of a workspace is 'none' or 'loopback', not 'host'"),
        ({"tier": "cloud"}, "no tier is called 'cloud'"),
        ({"memory_mb": -1}, "memory_mb must be a positive number"),
        ({"output_chars": 5}, "output_chars must be from 200"),
    ],
)
def test_an_option_that_cannot_work_is_refused_before_anything_starts(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Workspace(**options)


@pytest.mark.filterwarnings("ignore:sandbox tier process")
@pytest.mark.parametrize("tier", ["landlock", "process"])
def test_without_a_namespace_no_process_of_the_machine_is_stopped_and_the_repair_is_paid(tier: str) -> None:
    """A late command and a judge stop what they have started; the machine's own processes may have begun meanwhile."""
    cases = [{"call": "app:f", "args": [2], "expected": 3}]

    async def action(work: Workspace) -> Any:
        late = asyncio.create_task(work.bash("touch begun; sleep 60", limit_s=1.0))
        await asyncio.sleep(0.3)  # after the command has begun; if it has not, this test sees less
        others = [await asyncio.create_subprocess_exec("sleep", "60") for _ in range(2)]
        try:
            stopped = await late
            await work.edit("app.py", "return 2", "return x + 1")
            graded = await work.grade()
            return stopped.error, graded.success, [other.returncode for other in others]
        finally:
            for other in others:
                if other.returncode is None:
                    other.kill()
                await other.wait()

    try:
        assert using(action, {"files": FILES, "cases": cases}, tier=tier) == ("timeout", True, [None, None])
    except ConfigError as error:
        pytest.skip(str(error))


def test_what_cannot_be_had_is_said_before_the_first_chain() -> None:
    for fields, options, kind in (
        ({"tree": "/nowhere"}, {}, DataError),
        ({"files": FILES, "cases": []}, {}, DataError),
        ({"files": FILES, "tests": {"test_a.py": "def test(): pass"}}, {}, DataError),
        ({"files": FILES}, {"tier": "landlock", "network": "loopback"}, ConfigError),
    ):
        with pytest.raises(kind):
            asyncio.run(Workspace.make_ready(Task("t", (), fields), **options))
    asyncio.run(Workspace.make_ready(Task("t", (), {"files": FILES})))
    asyncio.run(Workspace.make_ready(None))
