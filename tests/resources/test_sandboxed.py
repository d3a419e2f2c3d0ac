"""Placement `sandbox`: what an environment can see and do behind the walls, and tiers that are refused."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from agentfly.agents import ReactAgent
from agentfly.errors import ConfigError, WorldError
from agentfly.resources import ResourceManager, Spec, spec_of
from agentfly.rewards import reward
from agentfly.sandbox.shared_server import SERVERS
from agentfly.testing import ByteRenderer, GuessEnv, ScriptedEngine
from agentfly.tools import tool
from tests.sandbox.conftest import kernel_forbids

from .worlds import TASK, Board, Curious, Digger, Worker

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux"),
    pytest.mark.skipif(kernel_forbids("namespace"), reason="the kernel forbids namespaces: run as root"),
]
WAIT_S = 120


async def lend(spec: Spec, *calls: tuple[Any, ...]) -> list[Any]:
    async with ResourceManager(None, spec) as manager, manager.lease([spec.make], TASK, "c", WAIT_S) as lease:
        return [await lease.call(spec.make, name, *args) for name, *args in calls]


def test_an_environment_reads_writes_and_connects_only_inside_its_sandbox(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("canary")
    shown = tmp_path / "shown.txt"
    shown.write_text("welcome")
    spec = spec_of(Curious, placement="sandbox", memory_mb=64, visible=[str(shown)])
    calls = [
        ("look", str(secret)),
        ("look", str(shown)),
        ("look", "/etc/shadow"),
        ("put", str(shown)),
        ("put", "/tmp/mine"),
        ("put", __file__),
        ("call_out",),
    ]
    found = asyncio.run(lend(spec, *calls))
    assert found[:3] == ["FileNotFoundError", "welcome", "FileNotFoundError"]
    assert found[3] in ("OSError", "PermissionError")
    assert found[4] == "written"
    assert found[5] in ("OSError", "PermissionError")
    assert found[6] in ("PermissionError", "OSError")
    assert shown.read_text() == "welcome"
    with pytest.raises(MemoryError):
        asyncio.run(lend(spec, ("hoard", 200)))


def test_a_world_in_one_file_is_imported_behind_the_walls(tmp_path: Path) -> None:
    world = tmp_path / "my_world.py"
    marker = tmp_path / "imported"
    world.write_text(
        "import os\n"
        "try:\n"
        f"    open({str(marker)!r}, 'w').close()\n"
        "    reached = True\n"
        "except OSError:\n"
        "    reached = False\n"
        "class World:\n"
        "    def reset(self, task): return f'{task.id} {reached}'\n"
        "    def close(self): ...\n"
    )

    async def main() -> str:
        spec = spec_of(f"{world}:World", name="world", placement="sandbox")
        marker.unlink(missing_ok=True)  # looking at the class has imported it here
        async with ResourceManager(None, spec) as manager, manager.lease(["world"], TASK, "c", WAIT_S) as lease:
            return str(lease.observation("world"))

    assert asyncio.run(main()) == "t False"
    assert not marker.exists()


def test_a_neighbour_module_that_is_not_visible_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("x = 1\n")
    world = tmp_path / "lonely_world.py"
    world.write_text(
        "class World:\n"
        "    def __init__(self):\n        import neighbour\n"
        "    def reset(self, task): ...\n    def close(self): ...\n"
    )
    spec = spec_of(f"{world}:World", name="world", placement="sandbox")

    async def main(spec: Spec) -> None:
        async with ResourceManager(None, spec) as manager, manager.lease(["world"], TASK, "c", WAIT_S):
            return

    with pytest.raises(WorldError, match="No module named 'neighbour'"):
        asyncio.run(main(spec))
    shown = spec_of(spec, visible=[str(tmp_path)])
    if os.geteuid() == 0:
        tmp_path.chmod(0o700)
        with pytest.raises(ConfigError, match=r"that root starts runs as another user, who may not read .*: chmod o\+rx"):
            ResourceManager(None, shown)
    tmp_path.chmod(0o755)
    asyncio.run(main(shown))


def test_pools_with_the_same_options_share_a_server_which_ends_with_the_loop() -> None:
    async def main() -> int:
        specs = [spec_of(Worker, name=name, placement="sandbox") for name in ("one", "two")]
        other = spec_of(Worker, name="three", placement="sandbox", memory_mb=99)
        async with ResourceManager(None, *specs, other) as manager:
            for name in ("one", "two", "three"):
                async with manager.lease([name], TASK, name, WAIT_S):
                    continue
            return len(SERVERS)

    assert asyncio.run(main()) == 2
    assert not SERVERS


def test_a_tier_that_does_not_work_is_refused_and_no_weaker_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    from agentfly.sandbox.server import SandboxServer

    async def fail(self: SandboxServer) -> None:
        await self.close()
        raise WorldError("the kernel said no")

    monkeypatch.setattr(SandboxServer, "_launch", fail)
    with pytest.raises(ConfigError, match="the sandbox tier 'namespace' cannot be had here"):
        asyncio.run(lend(spec_of(Board, placement="sandbox"), ("read",)))


@pytest.mark.parametrize("name", ["ConfigError", "InvariantError", "RewardError"])
def test_an_environment_in_the_sandbox_cannot_stop_the_run(name: str) -> None:
    with pytest.raises(WorldError, match=f"{name}: stop the run"):
        asyncio.run(lend(spec_of(Digger, placement="sandbox"), ("lie", name)))


def test_an_environment_in_the_sandbox_cannot_send_millions_of_values() -> None:
    with pytest.raises(WorldError, match="more than 100000 values"):
        asyncio.run(lend(spec_of(Digger, placement="sandbox"), ("flood",)))


def test_deep_folders_of_a_worker_process_are_removed() -> None:
    (folder,) = asyncio.run(lend(spec_of(Digger, placement="process"), ("dig",)))
    assert not os.path.exists(folder)


def test_a_bundled_world_plays_in_the_sandbox() -> None:
    spec = spec_of(GuessEnv, placement="sandbox", tier="namespace", min_tier="landlock", memory_mb=128)
    assert asyncio.run(lend(spec, ("guess", 1), ("guess", 5))) == ["higher", "correct"]


@tool(name="note", register=False)
def note(text: str, board: Board) -> str:
    """Write something down."""
    return f"{board.write(text)} notes"


@reward(name="noted")
def noted(board: Board, wanted: str) -> float:
    return float(wanted in board.read())


def test_an_agent_plays_in_the_sandbox_because_its_config_says_so() -> None:
    engine = ScriptedEngine(['Action: note\nInput: {"text": "pen"}', "Answer: done"])
    pools = {"Board": {"placement": "sandbox", "max": 2, "memory_mb": 128, "limit_s": 60}}
    agent = ReactAgent(engine, tools=[note], reward=noted, renderer=ByteRenderer(), resources={"pools": pools})
    result = agent.run_sync(
        [{"question": "Write pen.", "wanted": "pen"}, {"question": "Write pen.", "wanted": "ink"}], num_chains=2
    )
    assert result.rewards == [1.0, 1.0, 0.0, 0.0]
