"""Learner ranks over the nodes of a Ray cluster: equal to one process, through the loss of nodes and of the driver."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentfly.cli import main
from agentfly.config import Config
from agentfly.errors import ConfigError
from agentfly.fleet.link import LinkMessage
from agentfly.fleet.reservation import Node, Share
from agentfly.runs import RunDirectory, RunStore
from agentfly.runs.checkpoints import latest_checkpoint
from agentfly.training.ranks.cluster_ranks import (
    RankMember,
    RankRole,
    RemoteRank,
    check_folders,
    check_ranks,
    resumed_folder,
    variables_of,
)
from agentfly.training.ranks.roles import TORCHRUN, find_rank
from tests.close import ROUNDING, assert_close_to_norm
from tests.scale.ray_local import inside
from tests.tiny import ROWS, save_tiny_model

STEPS = 8
pytestmark = pytest.mark.timeout(1900)


# ---- runs on a cluster -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and the run of one process."""
    folder = tmp_path_factory.mktemp("runs")
    model = save_tiny_model(folder / "model")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    (folder / "run.toml").write_text(
        f'[agent]\nkind = "tests.tiny:TwoTurns"\nmodel = "{model}"\ntools = ["tests.scale.held:look"]\n'
        f'reward = "tests.tiny:even"\nmax_turns = 2\n[sampling]\nmax_tokens = 6\n'
        f'[data]\ntrain = "{folder}/rows.json"\nvalidation_count = 2\n'
        f"[rollout]\nnum_tasks = 2\nnum_chains = 2\n[train]\nsteps = {STEPS}\nlr = 1e-3\nsave_every = 1\n"
        "keep_checkpoints = 99\nvalidate_every = 0\n"
        f'[run]\ndir = "{folder}"\nthreads = 1\n'
    )
    return folder


@pytest.fixture(scope="module")
def told(runs: Path) -> dict[str, str]:
    seed = random.randrange(1 << 16)
    print(f"seed {seed}")
    found: dict[str, str] = inside("tests.scale.ray_rank_cases:scenarios", str(runs), seed)
    return found


@pytest.mark.parametrize(
    ("scenario", "sentence"),
    [
        ("too_many_ranks", "more ranks than the cluster holds are refused with one sentence"),
        ("folder_not_shared", "a run folder that a node does not share is refused with one sentence"),
        ("node_killed", "a killed node with a rank restarts all ranks"),
        ("node_frozen", "a frozen node with a rank is noticed, and the ranks go elsewhere"),
        ("driver_killed", "nothing is left when the driver is killed, also on a node that was frozen"),
        ("resumed", "the run can be resumed"),
    ],
)
def test_ranks_over_nodes(told: dict[str, str], scenario: str, sentence: str) -> None:
    assert told[scenario] == "", sentence


def test_a_run_that_lost_two_nodes_and_its_driver_equals_one_process(
    told: dict[str, str], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(runs / "run.toml"), "run.name=alone"]) == 0
    (losses, weights), (same_losses, same_weights) = outcome(runs / "alone"), outcome(runs / "lost")
    assert len(losses) == STEPS == len(same_losses)
    assert same_losses == pytest.approx(losses, rel=ROUNDING, abs=ROUNDING)
    assert weights.keys() == same_weights.keys()
    for name, tensor in weights.items():
        assert_close_to_norm(same_weights[name], tensor, of=name)
    capsys.readouterr()
    assert main(["doctor", str(runs / "lost")]) == 0, capsys.readouterr().out
    assert not list((runs / "lost" / "checkpoints").glob(".*"))
    assert not list((runs / "lost").glob(".shared-*"))


def outcome(run: Path) -> tuple[dict[int, float], dict[str, Any]]:
    """The loss of each step, and the weights of the last checkpoint."""
    from safetensors.torch import load_file

    with RunStore(RunDirectory(run).database, readonly=True) as store:
        losses = [(row.step, row.value) for row in store.metrics() if row.name == "train/loss"]
    assert len(losses) == len(dict(losses)), "a step was trained twice"
    weights: dict[str, Any] = {}
    for path in latest_checkpoint(run).glob("*.safetensors"):
        weights |= load_file(path)
    return dict(losses), weights


# ---- parts, without a cluster ----------------------------------------------------------------------------------------------


def node(name: str, cpus: float = 4.0, memory_gib: float = 16.0, gpus: float = 0.0, alive: bool = True) -> Node:
    return Node(name, name, "127.0.0.1", alive, cpus, memory_gib, gpus, cpus, memory_gib, gpus)


class FakeReservation:
    """A reservation on a node that sees the folders of `sees`; None: all."""

    def __init__(self, name: str, gpus: tuple[str, ...] = (), sees: set[str] | None = None) -> None:
        self.node, self.about, self.lost, self._sees = node(name), {"gpus": list(gpus)}, None, sees

    def ask(self, what: str, path: str, text: str | None = None) -> bool:
        assert what == "sees_file"
        if self._sees is not None and not any(path.startswith(each) for each in self._sees):
            return False
        return Path(path).exists() if text is None else Path(path).read_text() == text


def test_ranks_and_samplers_must_fit_the_cluster_together() -> None:
    nodes = [node("a", gpus=2), node("b", gpus=8)]
    share = Share(1.0, 4.0, 1.0)

    def config(ranks: int, *words: str) -> Config:
        return Config.load(None, ["cluster.address=auto", f"learner.ranks={ranks}", *words])

    check_ranks(nodes, nodes[0], share, config(6))  # two on a by its GPUs, four on b by its CPUs and memory
    with pytest.raises(ConfigError, match="7 learner ranks with 1 CPU and 4 GiB and 1 GPU each do not fit .* has room for 6"):
        check_ranks(nodes, nodes[0], share, config(7))
    with pytest.raises(ConfigError, match="3 samplers with 1 CPU and 1 GPU each do not fit"):
        check_ranks(nodes, nodes[0], share, config(6, "sampler.replicas=3", "sampler.place=own"))
    with pytest.raises(ConfigError, match="rank 0 runs on the node of this process, a, which has no 1 CPU and 4 GPUs: start"):
        check_ranks(nodes, nodes[0], Share(1.0, gpus=4.0), config(2))


def test_the_ranks_of_a_node_see_the_gpus_of_all_of_them() -> None:
    reservations: list[Any] = [
        FakeReservation("a", ("2",)),
        FakeReservation("a", ("0",)),
        FakeReservation("b", ("5",)),
        FakeReservation("c"),
    ]
    assert variables_of(reservations) == [
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "2,0"},
        {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "CUDA_VISIBLE_DEVICES": "2,0"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "5"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""},
    ]


def test_what_ranks_share_must_be_the_same_on_every_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, shared, recipe = tmp_path / "work", tmp_path / "runs", tmp_path / "run.toml"
    work.mkdir()
    recipe.write_text("")
    monkeypatch.chdir(work)
    config = Config.load(None, [f"run.dir={shared}"])
    words = ["train", str(recipe), "train.steps=3"]
    every = {str(work), str(shared), str(recipe)}

    def check(sees: set[str], arguments: list[str] = words) -> None:
        reservations: list[Any] = [FakeReservation("a"), FakeReservation("b", sees=sees)]
        check_folders(reservations, arguments, config)

    check(every)
    with pytest.raises(ConfigError, match=f"folder {work} does not exist on node b: start the run in a folder"):
        check(every - {str(work)})
    with pytest.raises(
        ConfigError, match=f"folder {shared} is not the same folder on node b: put run.dir on a shared file system"
    ):
        check(every - {str(shared)})
    with pytest.raises(ConfigError, match=f"{recipe} is not the same file on node b"):
        check(every - {str(recipe)})
    (tmp_path / "old").mkdir()
    with pytest.raises(ConfigError, match=r"folder .*/old is not the same folder on node b"):
        check(every, ["train", "--resume", str(tmp_path / "old")])
    assert not list(shared.iterdir())


def test_under_torchrun_an_address_without_effect_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    words = ["learner.ranks=2", "cluster.address=head:6379"]
    assert find_rank(Config.load(None, words)) is not None  # started by the supervisor
    monkeypatch.setenv(TORCHRUN, "run")
    assert find_rank(Config.load(None, [*words, "sampler.replicas=2"])) is not None
    with pytest.raises(ConfigError, match=r"cluster\.address has no effect on ranks that torchrun has started"):
        find_rank(Config.load(None, words))


def test_the_folder_of_a_resumed_run_is_found() -> None:
    assert resumed_folder(["train", "--resume", "a/b", "x=1"]) == Path("a/b")
    assert resumed_folder(["train", "--resume=a/b"]) == Path("a/b")
    assert resumed_folder(["train", "run.toml"]) is None


@pytest.fixture
def remote() -> Any:
    """A rank on node b, whose parent says what a test wants."""
    loop = asyncio.new_event_loop()

    async def made() -> RankMember:
        return RankMember(1, 0)

    member = loop.run_until_complete(made())
    process: Any = SimpleNamespace(node="b")
    member.process = process
    role = RankRole([])

    def say(kind: str, value: Any) -> None:
        role.hear(member, LinkMessage(kind, 0, value))

    yield SimpleNamespace(rank=RemoteRank(member, lambda: None), say=say, lose=member.lose)
    loop.close()


def test_a_rank_on_another_node_is_lost_by_what_its_parent_tells(remote: Any) -> None:
    assert remote.rank.number == 2
    remote.say("status", {"frozen": False})
    assert remote.rank.why_lost() is None
    remote.say("status", {"frozen": True})
    assert remote.rank.why_lost() == "on node b is frozen"
    remote.say("status", {"frozen": False})
    assert remote.rank.why_lost() is None
    remote.say("ended", -9)
    assert (remote.rank.status, remote.rank.why_lost()) == (-9, "on node b was killed by SIGKILL")


def test_a_mistake_on_another_node_is_no_loss_and_its_words_are_shown(remote: Any, capsys: pytest.CaptureFixture[str]) -> None:
    remote.say("said", "error: no such")
    remote.say("said", " file\nthe")
    remote.say("ended", 2)
    assert (remote.rank.status, remote.rank.why_lost()) == (2, None)
    assert capsys.readouterr().err == "[rank 2, node b] error: no such file\n[rank 2, node b] the\n"


@pytest.mark.parametrize(
    ("why", "sentence"),
    [
        ("closed its connection", "was lost on node b: its connection was closed"),
        ("ended with its node b (the node died)", "was lost with its node b (the node died)"),
        ("was silent for 6.2 s", "on node b was silent for 6.2 s"),
    ],
)
def test_a_rank_is_lost_with_its_parent(remote: Any, why: str, sentence: str) -> None:
    remote.lose(why)
    assert remote.rank.why_lost() == sentence
