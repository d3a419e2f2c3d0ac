"""Containers: refusals of the engine, containers of dead trainers, limits that the entry point sets, and mounted code."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentfly.errors import ConfigError, WorldError
from agentfly.resources import ResourceManager, Spec, spec_of
from agentfly.resources.backends.bundle import bundle_of, hello_of
from agentfly.resources.backends.container import LABEL, main_command, own_label, reap
from agentfly.resources.backends.docker import Docker, DockerError
from agentfly.resources.placements import ContainerOptions
from agentfly.resources.rpc.frames import NEW, FrameReader, pack_call, pack_hello

from .fake_docker import FakeDocker
from .far import far_place
from .worlds import TASK, Board, Worker, soon_gone

WAIT_S = 120


class Prober(Board):
    """Reports the limits that hold for it."""

    def walls(self) -> dict[str, Any]:
        import os
        import resource

        status = dict(
            line.split(":\t", 1) for line in Path("/proc/thread-self/status").read_text().splitlines() if ":\t" in line
        )
        return {
            "interfaces": sorted(line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]),
            "pid": os.getpid(),
            "capabilities": status["CapEff"],
            "new_privileges": status["NoNewPrivs"],
            "data_mb": resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20,
            "processes": resource.getrlimit(resource.RLIMIT_NPROC)[0],
            "cpus": len(os.sched_getaffinity(0)),
        }

    def hoard(self, megabytes: int) -> int:
        return len(bytearray(megabytes << 20))


def lend(spec: Spec, *calls: tuple[Any, ...]) -> list[Any]:
    async def main() -> list[Any]:
        async with ResourceManager(None, spec) as manager, manager.lease([spec.make], TASK, "c", WAIT_S) as lease:
            return [await lease.call(spec.make, name, *args) for name, *args in calls]

    return asyncio.run(main())


def test_a_missing_image_is_a_config_error_that_says_how_to_pull_it(tmp_path: Path) -> None:
    with (
        far_place("docker", tmp_path) as far,
        pytest.raises(ConfigError, match="Docker has no image 'other' here: docker pull other"),
    ):
        lend(far.spec(Worker, image="other"), ("read",))
    assert far.docker is not None
    assert not far.docker.containers


def test_an_engine_that_fails_is_a_world_failure_in_its_own_words(tmp_path: Path) -> None:
    with far_place("docker", tmp_path) as far:
        assert far.docker is not None
        far.docker.broken = True
        with pytest.raises(WorldError, match="Docker refused POST /containers/create: broken"):
            lend(far.spec(Worker), ("read",))


def test_a_socket_that_does_not_speak_http_is_a_docker_error(tmp_path: Path) -> None:
    async def main() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"SSH-2.0-hello\r\n\r\n")
            writer.close()

        server = await asyncio.start_unix_server(answer, str(tmp_path / "sock"))
        async with server:
            with pytest.raises(DockerError, match="Docker does not answer at .*sock"):
                await Docker(str(tmp_path / "sock")).labelled(LABEL)

    asyncio.run(main())


def test_an_enroot_container_that_does_not_exist_is_a_world_failure_in_its_own_words(tmp_path: Path) -> None:
    with (
        far_place("enroot", tmp_path) as far,
        pytest.raises(WorldError, match=r"it said: \[ERROR\] No such file or directory: other"),
    ):
        lend(far.spec(Worker, image="other"), ("read",))


def test_containers_of_dead_trainers_are_removed_before_the_first_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    place, _, began = own_label().rpartition("/")
    labels = {"dead": f"{place}/{int(began) + 1}", "alive": own_label(), "elsewhere": "another-boot/pid:[1]/1/1"}
    with FakeDocker(tmp_path) as docker:
        spec = spec_of(Worker, placement="container", image="python:3.12-slim", socket=docker.socket)

        async def leave_behind() -> None:
            client = Docker(docker.socket)
            for name, label in labels.items():
                await client.create(name, {"Image": "python:3.12-slim", "Labels": {LABEL: label}})
            await client.create("foreign", {"Image": "python:3.12-slim", "Labels": {}})

        asyncio.run(leave_behind())
        assert lend(spec, ("read",)) == [[]]
        assert set(docker.containers) == {"alive", "elsewhere", "foreign"}
        assert asyncio.run(reap(Docker(docker.socket))) == 0


def test_the_entry_point_sets_the_limits_that_enroot_does_not(tmp_path: Path) -> None:
    with far_place("enroot", tmp_path) as far:
        spec = far.spec(Prober, memory_mb=300, processes=40, cpus=0.5)
        (walls,) = lend(spec, ("walls",))
        assert walls == {
            "interfaces": ["lo"],
            "pid": 1,
            "capabilities": "0000000000000000",
            "new_privileges": "1",
            "data_mb": 300,
            "processes": 40,
            "cpus": 1,
        }
        with pytest.raises(MemoryError):
            lend(spec, ("hoard", 400))
        asked = [json.loads(line) for line in far.asked.read_text().splitlines()]
    assert not any(each["secrets"] for each in asked)


def test_a_container_that_is_removed_from_outside_is_a_world_failure_and_is_replaced(tmp_path: Path) -> None:
    with far_place("docker", tmp_path) as far:
        docker = far.docker
        assert docker is not None

        async def main() -> None:
            async with ResourceManager(None, far.spec(Worker, max=1)) as manager:
                async with manager.lease([Worker], TASK, "one", WAIT_S) as lease:
                    pids = docker.pids()
                    call = asyncio.ensure_future(lease[Worker].linger(600))
                    await asyncio.sleep(0)
                    await Docker(docker.socket).remove(next(iter(docker.containers)))
                    with pytest.raises(WorldError, match="Worker: its container ended"):
                        await call
                assert soon_gone(pids)
                async with manager.lease([Worker], TASK, "two", WAIT_S) as lease:
                    assert await lease.call(Worker, "read") == []

        asyncio.run(main())


def test_mounted_code_needs_no_package_of_the_image_and_msgpack_works_without_its_compiled_part(tmp_path: Path) -> None:
    spec = spec_of(Board, placement="container", image="img")
    bundle, options = bundle_of(spec), spec.placement_options
    assert isinstance(options, ContainerOptions)
    copy = tmp_path / "packages" / "msgpack"
    shutil.copytree(bundle.packages[0], copy, ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))
    words = main_command(options, bundle, None)
    config = json.loads(words[-1])
    assert config["packages"] == [str(Path(bundle.packages[0]).parent)]
    config["packages"] = [str(tmp_path / "packages")]
    command = [sys.executable, "-S", *words[1:-1], json.dumps(config)]  # -S: no installed package can be imported
    calls = [pack_call(1, 7, NEW, (), {}), pack_call(2, 7, "reset", (TASK,), {}), pack_call(3, 7, "write", ("a",), {})]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as container:
        assert container.stdin is not None
        assert container.stdout is not None
        container.stdin.write(pack_hello(hello_of(spec, bundle, 1)))
        container.stdin.flush()
        reader, replies = FrameReader(), []
        for call in (None, *calls):
            if call is not None:
                container.stdin.write(call)
                container.stdin.flush()
            while not (found := reader.replies(container.stdout.read1())):
                continue
            replies += found
        container.stdin.close()  # ends the container
        container.wait(60)
    assert isinstance(replies[0].value, int)
    assert [(reply.value, reply.error) for reply in replies[1:]] == [(None, None), ("board of t", None), (1, None)]
