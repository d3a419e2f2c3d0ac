"""The actor of a node is sent by value, so it works where AgentFly cannot be imported. Nothing of Ray is started here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentfly.fleet import bare, ray_actor

ON_A_NODE = """
import importlib.abc, sys, threading, os

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("agentfly"):
            raise ImportError(name)

sys.meta_path.insert(0, Missing())
import ray.cloudpickle

kind = ray.cloudpickle.loads(open(sys.argv[1], "rb").read())
actor = kind.__new__(kind)  # what __init__ does needs a running Ray
actor.started, actor.ended, actor.changed, actor.life = {}, {}, threading.Condition(), os.pipe()
actor.folder = actor.cwd = os.path.dirname(sys.argv[1])
child = "import sys; print(sys.stdin.read(), 'world'); sys.exit(3)"
actor.start(1, [sys.executable, "-c", child], {}, b"hello", "child.log")
print(actor.beat(0, 60.0)[1], actor.ask_tail("child.log"), sep="|", end="")
"""


def test_the_actor_works_on_a_node_without_agentfly(tmp_path: Path) -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle", reason="pip install 'agentfly[ray]'")
    modules = (bare, ray_actor)
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        (tmp_path / "actor.pkl").write_bytes(cloudpickle.dumps(ray_actor.NodeActor))
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)
    words = [sys.executable, "-c", ON_A_NODE, str(tmp_path / "actor.pkl")]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    assert printed == "(exit code 3); it said: hello world|hello world"
