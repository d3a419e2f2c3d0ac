"""Environments on the nodes of a Ray cluster: a training survives the loss of nodes, and its books balance."""

from __future__ import annotations

import pytest

from tests.scale.ray_local import inside

pytestmark = pytest.mark.timeout(1900)


@pytest.fixture(scope="module")
def told() -> dict[str, str]:
    found: dict[str, str] = inside("tests.scale.ray_env_cases:scenarios")
    return found


@pytest.mark.parametrize(
    ("scenario", "sentence"),
    [
        ("samplers_hear_of_a_new_server", "sampler processes use the server that takes the place of one that was killed"),
        ("nodes_killed_and_frozen", "killed and frozen nodes are noticed within ten seconds, and the training goes on"),
    ],
)
def test_environment_servers(told: dict[str, str], scenario: str, sentence: str) -> None:
    assert told[scenario] == "", sentence
