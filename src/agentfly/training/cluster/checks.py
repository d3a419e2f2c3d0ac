"""What must hold on the nodes of a cluster before a run trains there. Each check raises ConfigError with one sentence.

Known before the model is opened: room for all processes, the software of every node, the packages and files that the recipe's
agent, tools, reward and environment need there, and the folder of the model. When a process is placed, its node is asked
whether it reaches the trainer (`fleet.node_launcher`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ... import plugins
from ...config import Config
from ...engines import engine_options
from ...errors import ConfigError, EngineError
from ...fleet.node_launcher import NodeLauncher, check_node
from ...fleet.ray_cluster import Cluster
from ...fleet.reservation import Node, Reservation, Share

PACKAGES = {
    "agentfly.envs.scienceworld": ("scienceworld", "py4j"),
    "agentfly.rewards.math.math_verify_reward": ("math_verify",),
}
"""The packages of extras that built-in objects need where they run, by the beginning of their module's name."""


def sampler_share(config: Config, nodes: Sequence[Node]) -> Share:
    """What each replica reserves. It has a GPU if `sampler.place` is "own", or if the engine may use one and a node has one."""
    sampler = config.sampler
    device = str(engine_options(config.agent.engine).get("device") or "cuda")
    gpus = sampler.place == "own" or (device.startswith("cuda") and any(node.gpus for node in nodes))
    return Share(sampler.cpus, sampler.memory_gib, float(sampler.gpus) if gpus else 0.0)


def sampler_launcher(cluster: Cluster, config: Config, log_dir: Path) -> NodeLauncher:
    """Starts samplers on the nodes."""
    return NodeLauncher(cluster, sampler_share(config, cluster.nodes()), environ={"OMP_NUM_THREADS": None}, log_dir=log_dir)


def learner_gpus(config: Config, nodes: Sequence[Node]) -> bool:
    """Whether the trainer's own process uses a GPU, which a sampler must not be given. Ranks reserve theirs."""
    if config.learner.ranks > 1 or not config.sampler.in_processes or not sampler_share(config, nodes).gpus:
        return False
    from ...engines.local.load import count_gpus  # late: torch

    options = engine_options(config.agent.engine)
    device = str(options.get("learner_device") or options.get("device") or "cuda")
    return device.startswith("cuda") and count_gpus() > 0


def shares_of(config: Config, nodes: Sequence[Node]) -> list[tuple[str, str, Share]]:
    """Every further process of the run: its kind, the config key that says how many there are, and what it reserves."""
    cluster = config.cluster
    shares = []
    if learner_gpus(config, nodes):
        shares.append(("learners", "learner.ranks", Share(0.0, 0.0, 1.0)))
    if config.sampler.in_processes:
        shares += [("samplers", "sampler.replicas", sampler_share(config, nodes))] * config.sampler.replicas
    env_share = Share(cluster.env_cpus, cluster.env_memory_gib)
    return shares + [("environment servers", "cluster.env_hosts", env_share)] * cluster.env_hosts


def check_cluster(cluster: Cluster, config: Config, note: Callable[[str], None] = lambda _: None) -> None:
    """Check the room of the cluster, and every node on which a process of the run may be placed."""
    nodes = [node for node in cluster.nodes() if node.alive]
    shares = shares_of(config, nodes)
    check_room(nodes, shares)
    used = [node for node in nodes if any(node.fits(share) for _, _, share in shares)]
    if not used:
        return
    with ThreadPoolExecutor(len(used), "agentfly-check") as threads:
        for sentence in threads.map(lambda node: _check_node(cluster, config, node), used):
            if sentence:
                note(sentence)


def check_room(nodes: Sequence[Node], shares: Sequence[tuple[str, str, Share]]) -> None:
    """Raises ConfigError if the processes do not fit the nodes even if these were empty."""
    nodes = sorted(nodes, key=lambda node: node.name)
    free = [[node.cpus, node.memory_gib, node.gpus] for node in nodes]
    fitted: dict[str, int] = {}
    for kind, key, share in sorted(shares, key=lambda each: (-each[2].gpus, -each[2].cpus, -each[2].memory_gib)):
        needed = (share.cpus, share.memory_gib, share.gpus)
        room = next((each for each in free if all(have >= need - 1e-6 for have, need in zip(each, needed, strict=True))), None)
        if room is None:
            wanted = sum(each[0] == kind for each in shares)
            rooms = "; ".join(
                f"node {node.name} has {Share(node.cpus, round(node.memory_gib, 1), node.gpus)}" for node in nodes
            )
            raise ConfigError(
                f"{wanted} {kind} with {share} each do not fit the cluster, which has room for {fitted.get(kind, 0)} "
                f"({rooms}): lower {key} or what each reserves, or add nodes"
            )
        room[:] = [have - need for have, need in zip(room, needed, strict=True)]
        fitted[kind] = fitted.get(kind, 0) + 1


def _check_node(cluster: Cluster, config: Config, node: Node) -> str:
    """Returns a sentence about a node that does not answer: it is not used for now. Raises ConfigError."""
    try:
        reservation = cluster.reserve("check 0", Share(0.0), only=node.id, timeout_s=30.0)
    except EngineError:
        return f"node {node.name} of the cluster does not answer: the run starts without it"
    try:
        check_node(reservation)
        check_files(reservation, config)
    except EngineError as error:
        return f"node {node.name} of the cluster could not be checked: {error}"
    finally:
        reservation.close()
    return ""


def check_files(reservation: Reservation, config: Config) -> None:
    """Raises ConfigError if the node lacks a package or a file that the recipe needs there. Raises EngineError."""
    modules, files = needs(config)
    name = reservation.node.name
    if missing := reservation.ask("can_import", modules):
        package = missing[0].partition(".")[0]
        cure = f"pip install 'agentfly[{plugins.EXTRAS[package]}]'" if package in plugins.EXTRAS else "install it there"
        raise ConfigError(f"node {name} has no module {missing[0]!r}, which this recipe needs on every node: {cure}")
    for path in files:
        if not reservation.ask("sees_file", str(path)):
            raise ConfigError(f"node {name} does not see {path}, which this recipe needs on every node: copy it there")
    model = Path(config.agent.model)
    if (settings := model / "config.json").is_file():
        text = settings.read_text(encoding="utf-8")
        if not reservation.ask("sees_file", str(settings.absolute()), text):
            raise ConfigError(
                f"node {name} does not see the folder {model.absolute()} of agent.model as the trainer does: it must be on a "
                "file system that all nodes share, or be copied to every node"
            )


def needs(config: Config) -> tuple[list[str], list[Path]]:
    """The modules and files of which agent, tools, reward and environment are made."""
    agent = config.agent
    rewards = [agent.reward] if isinstance(agent.reward, str) else list(agent.reward)
    named = [("agents", agent.kind), *(("tools", each) for each in agent.tools), *(("rewards", each) for each in rewards)]
    if agent.env is not None:
        named.append(("envs", agent.env))
    modules: dict[str, None] = {}
    files: dict[Path, None] = {}
    for kind, name in named:
        module = plugins.BUILTIN.get(kind, {}).get(name, name).rpartition(":")[0]
        if module.endswith(".py"):
            files[Path(module).absolute()] = None
        elif module:
            modules[module.partition(".")[0]] = None
            for begin, packages in PACKAGES.items():
                modules |= dict.fromkeys(packages if module.startswith(begin) else ())
    return list(modules), list(files)
