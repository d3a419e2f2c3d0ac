"""Control groups looked at as data and as folders: what is written where, and that a machine without them is told so."""

from __future__ import annotations

from pathlib import Path

from agentfly.sandbox.runtime.cgroup import Cgroups, _remove_tree, _try_v2


def test_each_hierarchy_gets_its_limits_and_swap_does_not_lift_them() -> None:
    groups = Cgroups({}, memory_mb=100, processes=10)
    memory = str(100 << 20)
    assert groups.settings("memory") == [
        ("memory.limit_in_bytes", memory, True),
        ("memory.memsw.limit_in_bytes", memory, False),
        ("memory.kmem.tcp.limit_in_bytes", memory, False),
    ]
    assert groups.settings("pids") == [("pids.max", "11", True)]
    unified = {file: (value, needed) for file, value, needed in groups.settings("v2")}
    assert unified["memory.max"] == (memory, True)
    assert unified["pids.max"] == ("11", True)
    assert unified["memory.swap.max"] == ("0", False)


def folder(path: Path, flows: str) -> Path:
    path.mkdir()
    (path / "cgroup.controllers").write_text("cpu memory pids\n")
    (path / "cgroup.subtree_control").write_text(flows)
    return path


def test_a_unified_hierarchy_without_controllers_that_flow_down_is_not_used(tmp_path: Path) -> None:
    root = folder(tmp_path / "cgroup", "cpu\n")
    own = folder(root / "session.scope", "")
    assert _try_v2(str(own)) is None


def test_a_group_that_the_kernel_does_not_fill_is_removed_again(tmp_path: Path) -> None:
    """An ordinary folder gets no control files, so nothing can be handed down in it."""
    root = folder(tmp_path / "cgroup", "memory pids\n")
    own = folder(root / "session.scope", "")
    assert _try_v2(str(own)) is None
    assert sorted(path.name for path in root.iterdir()) == ["cgroup.controllers", "cgroup.subtree_control", "session.scope"]


def test_removing_what_is_gone_is_no_failure_and_what_is_busy_is_one(tmp_path: Path) -> None:
    assert _remove_tree(str(tmp_path / "nothing"))
    (tmp_path / "parent" / "group" / "busy").mkdir(parents=True)
    assert not _remove_tree(str(tmp_path / "parent"))
    (tmp_path / "parent" / "group" / "busy").rmdir()
    assert _remove_tree(str(tmp_path / "parent"))
