"""The mean and the maximum of a count over a window, to the instant."""

from __future__ import annotations

import pytest

from agentfly.resources import gauge
from agentfly.resources.gauge import Gauge


def test_the_mean_is_weighted_by_time_and_the_maximum_is_joint(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(gauge.time, "monotonic", lambda: now[0])
    total = Gauge()
    first, second = Gauge(total), Gauge(total)
    assert first.mean == 0.0
    first.add(1)
    first.add(1)
    now[0] += 3.0  # two for three seconds
    first.add(-2)
    second.add(1)
    now[0] += 1.0  # none, and one of the other kind, for one second
    assert (first.mean, second.mean, total.mean) == (6 / 4, 1 / 4, 7 / 4)
    assert (first.most, second.most, total.most) == (2, 1, 2)  # not 3: they were not held at the same time
    for each in (first, second, total):
        each.mark()
    now[0] += 2.0
    assert (first.mean, second.mean, total.mean) == (0.0, 1.0, 1.0)
    assert (first.most, second.most, total.most) == (0, 1, 1)
