"""A page of the list begins at any row, and a question that takes too long is answered by a narrower one."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed: pip install 'agentfly[serve]'")

from agentfly.runs import query as query_module

from .stored import ask, data, make_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("far") / "runs"
    make_run(folder / "one")
    return folder


@pytest.mark.parametrize(
    "sort", ["-added", "added", "-reward", "reward", "-advantage", "-tokens", "-turns", "-seconds", "-calls"]
)
def test_a_page_begins_at_a_row(runs: Path, sort: str) -> None:
    every = data(runs, f"/api/runs/one/chains?sort={sort}")
    names = [row["id"] for row in every["rows"]]
    assert every["total"] == len(names) > 6
    for offset in (0, 3, len(names) - 2, len(names), 10**12):
        page = data(runs, f"/api/runs/one/chains?sort={sort}&offset={offset}&limit=3")
        assert [row["id"] for row in page["rows"]] == names[offset:][:3]
        assert page["total"] == len(names), "the number of all chains, not of those after the offset"
    page = data(runs, f"/api/runs/one/chains?sort={sort}&offset=3&limit=2&count=0")
    rest = data(runs, f"/api/runs/one/chains?sort={sort}&cursor={page['next']}")
    assert [row["id"] for row in rest["rows"]] == names[5:]


def test_an_offset_that_cannot_be_is_one_sentence(runs: Path) -> None:
    for query, told in (
        ("offset=-1", "offset must be an integer from 0 to"),
        ("offset=2&q=Answer&in=body", "search in whole chains"),
    ):
        response = ask(runs, f"/api/runs/one/chains?{query}")
        assert response.status_code == 400
        assert told in response.json()["error"]


def test_a_question_that_takes_too_long_names_a_narrower_one(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query_module, "NEWEST_STEPS", 1)
    monkeypatch.setattr(query_module, "_LOOK", 1)
    monkeypatch.setattr(query_module.RunReader.__init__, "__kwdefaults__", {"timeout_s": -1.0})
    response = ask(runs, "/api/runs/one/histogram")
    assert response.status_code == 503
    assert "narrow the filter, for example to the steps from 2 on (step_low=2)" in response.json()["error"]
