"""Trainings whose samplers run on the nodes of a Ray cluster: whatever dies, the books balance and nothing is left behind."""

from __future__ import annotations

import pytest

from tests.scale.ray_local import inside

pytestmark = pytest.mark.timeout(1900)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found: dict[str, str] = inside("tests.scale.ray_training:scenarios", str(tmp_path_factory.mktemp("ray")))
    return found


@pytest.mark.parametrize(
    ("scenario", "sentence"),
    [
        ("sentences", "what is wrong with a cluster is said before a run trains"),
        ("driver_killed", "a trainer that is killed leaves nothing on the nodes, and its run resumes"),
        ("evaluation", "an evaluation uses the samplers of the cluster"),
        ("nodes_die", "a run goes on when a node is killed and another is frozen, and its books balance"),
    ],
)
def test_trainings(told: dict[str, str], scenario: str, sentence: str) -> None:
    assert told[scenario] == "", sentence
