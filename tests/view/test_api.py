"""What the pages ask for: every route over a stored run, and what it says about old, running and broken runs."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytest.importorskip("starlette", reason="Starlette is not installed: pip install 'agentfly[serve]'")

from agentfly.runs import RunStore, decode, encode
from agentfly.runs.codec import from_json
from agentfly.runs.recorder import Recorder
from agentfly.runs.writer import StoreWriter
from agentfly.training import ledger
from agentfly.types import Outcome, SandboxLimit, Task, ToolCall, ToolResult, Trajectory
from agentfly.view.answers import dumps, plain
from agentfly.view.health import PROMISES

from .stored import ask, data, make_chain, make_run, open_client


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "runs"
    failed = make_chain("t3-9-0", task="9", reward=None, outcome=Outcome.WORLD_FAILURE, error="WorldError: killed after 3.2 s")
    again = make_chain(
        "t3-9-1", task="9", chain=1, reward=None, outcome=Outcome.WORLD_FAILURE, error="WorldError: killed after 4 s"
    )
    make_run(folder / "one", chains=[failed, again])
    make_run(folder / "nested" / "two", lr="3e-4", steps=2)
    return folder


def test_the_list_has_every_run_and_no_path_of_the_machine(runs: Path) -> None:
    response = ask(runs, "/api/runs")
    found = {run["name"]: run for run in response.json()}
    assert set(found) == {"one", "nested/two"}
    one = found["one"]
    assert (one["state"], one["model"], one["world"], one["algorithm"]) == ("finished", "pocket", "arithmetic", "grpo")
    assert (one["step"], one["total_steps"], one["spark"], one["best_validation"]) == (3, 3, [0.25, 0.5, 0.75], 0.5)
    assert str(runs) not in response.text


def test_a_run_says_what_its_pages_need(runs: Path) -> None:
    one = data(runs, "/api/runs/one")
    assert one["config"]["train"]["lr"] == 1e-4
    assert (one["splits"], one["tools"]) == (["train", "validation"], ["add"])
    assert set(one["outcomes"]) == {"finished", "world_failure"}
    assert one["chains_per_step"] == 4
    metric = next(each for each in one["metrics"] if each["name"] == "reward/mean")
    assert metric["group"] == "reward"
    assert metric["description"].startswith("Mean total reward")
    assert data(runs, "/api/runs/nested%2Ftwo")["name"] == "nested/two"
    assert ask(runs, "/api/runs/three").status_code == 404


def test_series_go_on_after_a_step(runs: Path) -> None:
    found = data(runs, "/api/runs/one/series?names=reward/mean,nothing&after=1")
    assert [(step, value) for step, _, value in found["reward/mean"]] == [(2, 0.5), (3, 0.75)]
    assert found["nothing"] == []


def test_chains_are_filtered_sorted_and_paged(runs: Path) -> None:
    best = data(runs, "/api/runs/one/chains?step=2&low=1&sort=-reward")
    assert {row["id"] for row in best["rows"]} == {"t2-0-1", "t2-1-1"}
    assert (best["total"], best["exact"], best["next"]) == (2, True, None)
    page: dict[str, Any] = {"next": ""}
    seen: list[str] = []
    while page["next"] is not None:
        page = data(runs, f"/api/runs/one/chains?split=train&limit=3&count=0&sort=added&cursor={page['next']}")
        assert page["total"] is None
        seen += [row["id"] for row in page["rows"]]
    assert len(seen) == len(set(seen)) == 14
    assert data(runs, "/api/runs/one/chains?outcome=world_failure")["total"] == 2
    assert data(runs, "/api/runs/one/chains?tool=add")["total"] == 16
    assert data(runs, "/api/runs/one/chains?tool=nothing")["total"] == 0
    assert data(runs, "/api/runs/one/chains?q=killed+after&failed=1")["total"] == 2
    assert data(runs, "/api/runs/one/chains?q=Observation&in=body&limit=2")["rows"]
    assert data(runs, "/api/runs/one/chains?q=100%25")["total"] == 0


@pytest.mark.parametrize("sort", ["-added", "added", "-reward", "reward", "advantage", "-tokens"])
@pytest.mark.parametrize("chosen", ["", "&split=train", "&outcome=finished&split=train", "&q=t", "&task=0"])
def test_a_list_starts_at_any_row_and_at_any_chain(runs: Path, sort: str, chosen: str) -> None:
    path = f"/api/runs/one/chains?sort={sort}{chosen}&limit=3"
    whole = data(runs, path.replace("limit=3", "limit=1000"))["rows"]
    assert len(whole) > 4
    for offset in (0, 1, 4, len(whole) - 1):
        found = data(runs, f"{path}&offset={offset}")
        assert (found["first"], found["rows"]) == (offset, whole[offset : offset + 3])
        assert found["total"] == len(whole)
        following = found["next"] and data(runs, f"{path}&cursor={quote(found['next'])}")
        assert not following or following["rows"] == whole[offset + 3 : offset + 6]
        placed = data(runs, f"{path}&at={quote(whole[offset]['id'])}")
        assert (placed["first"], placed["rows"]) == (offset, whole[offset : offset + 3])
    assert data(runs, f"{path}&offset={len(whole)}")["rows"] == []


def test_a_chain_that_the_list_does_not_have_is_said(runs: Path) -> None:
    refused = ask(runs, "/api/runs/one/chains?split=validation&at=t1-0-0")
    assert (refused.status_code, "leaves out" in refused.json()["error"]) == (404, True)
    assert ask(runs, "/api/runs/one/chains?at=none").status_code == 404
    assert ask(runs, "/api/runs/one/chains?at=t1-0-0&offset=3").status_code == 400
    assert ask(runs, "/api/runs/one/chains?offset=-1").status_code == 400
    assert "page by page" in ask(runs, "/api/runs/one/chains?offset=3&q=a&in=body").json()["error"]


def test_an_unknown_parameter_is_named(runs: Path) -> None:
    response = ask(runs, "/api/runs/one/chains?outcom=finished")
    assert response.status_code == 400
    assert "'outcom'" in response.json()["error"]
    assert "outcome" in response.json()["error"]


def test_bars_of_the_histogram_select_their_chains(runs: Path) -> None:
    found = data(runs, "/api/runs/one/histogram?split=train&bins=2")
    low, middle, high = found["edges"]
    assert found["counts"] == [6, 6]
    assert data(runs, f"/api/runs/one/chains?split=train&low={low}&below={middle}")["total"] == 6
    assert data(runs, f"/api/runs/one/chains?split=train&low={middle}&high={high}")["total"] == 6


def test_steps_and_groups(runs: Path) -> None:
    found = data(runs, "/api/runs/one/steps?after=2")
    assert [(row["step"], row["split"]) for row in found["steps"]] == [(3, "train"), (3, "validation")]
    assert found["steps"][0]["outcomes"] == {"finished": 4, "world_failure": 2}
    groups = data(runs, "/api/runs/one/groups?step=2")
    assert [(group["task_id"], group["chains"], group["spread"], group["teaches"]) for group in groups] == [
        ("0", 2, 0.5, True),
        ("1", 2, 0.5, True),
    ]
    assert ask(runs, "/api/runs/one/groups").status_code == 400


def test_a_group_is_aligned_and_its_first_difference_is_found(runs: Path) -> None:
    group = data(runs, "/api/runs/one/group?step=1&task=0")
    assert [row["id"] for row in group["siblings"]] == ["t1-0-0", "t1-0-1"]
    assert [[turn["text"] for turn in turns] for turns in group["turns"]] == [["Action: add"] * 2, ["Answer: 4", "Answer: 5"]]
    assert group["differences"] == [
        None,
        {"turn": 1, "part": "reply", "token": 1, "char": 8, "ids": [32, 33], "pieces": ["4", "5"]},
    ]
    assert ask(runs, "/api/runs/one/group?step=1&task=none").status_code == 404


def test_a_chain_is_a_conversation_with_times_and_rewards(runs: Path) -> None:
    found = data(runs, "/api/runs/one/chain/t1-0-1")
    assert found["summary"]["score"] == 1.0
    assert [message["role"] for message in found["messages"]] == ["user", "assistant", "user", "assistant"]
    assert [turn["message"] for turn in found["turns"]] == [1, 3]
    assert found["turns"][0]["calls"] == [{"name": "add", "arguments": {"a": 2, "b": 3}, "id": "", "error": None}]
    assert found["turns"][0]["results"][0]["observation"] == "5"
    assert (found["turns"][0]["generate_s"], found["turns"][0]["tools_s"]) == (0.5, 0.1)
    assert found["turns"][1]["versions"] == [1, 1]
    assert [each["id"] for each in found["siblings"]] == ["t1-0-0", "t1-0-1"]
    assert found["untrained"] is None
    assert "world_failure" in data(runs, "/api/runs/one/chain/t3-9-0")["untrained"]
    assert data(runs, "/api/runs/one/chain/v3-0-0")["untrained"] == "a held-out task"
    assert ask(runs, "/api/runs/one/chain/nothing").status_code == 404


def test_failures_are_counted_by_their_reason(runs: Path) -> None:
    failures = data(runs, "/api/runs/one/envs")["failures"]
    assert [(each["count"], each["outcome"], each["chain"]) for each in failures] == [(2, "world_failure", "t3-9-1")]
    assert failures[0]["error"].startswith("WorldError: killed")


def test_pools_leases_and_events_are_those_that_were_recorded(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    with RunStore(folder / "run.db") as store:
        store.add_gauges(10.0, {"resources/shop/allocated": 3.0, "chains/sampling": 2.0, "nodes/alive": 2.0})
        store.add_gauges(11.0, {"resources/shop/allocated": 4.0})
        store.set_live(
            "chains", 11.0, [{"id": "t4-0-0", "task": "0", "turn": 1, "phase": "tools", "tools": ["add"], "seconds": 2}]
        )
        store.set_live("leases", 11.0, [{"chain": "t4-0-0", "kinds": ["shop", "python"]}])
        store.add_event(11.0, 4, "environment_failed", "shop", {"count": 1})
        store.add_event(11.5, 4, "chain_started", "t4-0-1", {})
    envs = data(tmp_path / "runs", "/api/runs/one/envs")
    assert envs["pools"] == {"shop": {"allocated": [[10.0, 3.0], [11.0, 4.0]]}}
    assert (envs["chains"], envs["others"]) == ({"sampling": [[10.0, 2.0]]}, {"nodes/alive": [[10.0, 2.0]]})
    held = {"chain": "t4-0-0", "task": "0", "turn": 1, "phase": "tools"}
    assert envs["live"]["leases"]["data"] == [{**held, "kind": "shop"}, {**held, "kind": "python"}]
    assert [event["kind"] for event in envs["events"]] == ["environment_failed"]
    assert [tool["name"] for tool in envs["tools"]] == ["add"]
    assert [each["kind"] for each in data(tmp_path / "runs", "/api/runs/one/events")] == ["environment_failed", "chain_started"]


def test_limits_of_sandboxes_are_counted_from_what_a_run_records(tmp_path: Path) -> None:
    def chain(name: str, *limits: SandboxLimit | None) -> Trajectory:
        made = make_chain(name)
        made.turns[0].calls = tuple(ToolCall("python") for _ in limits)
        made.turns[0].results = tuple(ToolResult(observation="", limit=limit) for limit in limits)
        return made

    folder = make_run(tmp_path / "runs" / "one")
    assert data(tmp_path / "runs", "/api/runs/one/envs")["limits"] == []
    chains = {4: chain("t4-0-0", "memory", None, "memory"), 5: chain("t5-0-0", "time", "memory")}
    with RunStore(folder / "run.db") as store:
        for step, each in chains.items():
            store.add_trajectories(step, "train", [each])
        with StoreWriter(store) as writer:
            recorder = Recorder(writer)
            for recorder.step, each in chains.items():
                recorder.chain(each, ended=True)
            recorder.flush()
    assert data(tmp_path / "runs", "/api/runs/one/envs")["limits"] == [
        {
            "limit": "memory", "count": 3, "chains": 2, "tools": ["python"], "newest": ["t5-0-0", "t4-0-0"], "step": 5,
            "since": None,
        },
        {"limit": "time", "count": 1, "chains": 1, "tools": ["python"], "newest": ["t5-0-0"], "step": 5, "since": None},
    ]  # fmt: skip
    turn = data(tmp_path / "runs", "/api/runs/one/chain/t4-0-0")["turns"][0]
    assert [result["limit"] for result in turn["results"]] == ["memory", None, "memory"]


def test_nodes_of_a_cluster_are_listed_where_there_are_several(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    assert data(tmp_path / "runs", "/api/runs/one/envs")["nodes"] == []
    with RunStore(folder / "run.db") as store:
        for step in (1, 2):
            figures = {
                f"cluster/10.0.0.{node}/{name}": float(step * node) for node in (1, 2) for name in ("samplers", "chains")
            }
            store.add_metrics(step, {**figures, "cluster/10.0.0.1/other": 1.0, "cluster/nodes": 2.0})
    assert data(tmp_path / "runs", "/api/runs/one/envs")["nodes"] == [
        {"node": f"10.0.0.{node}", "figures": {key: [[1, 1.0 * node], [2, 2.0 * node]] for key in ("chains", "samplers")}}
        for node in (1, 2)
    ]


def test_checks_are_green_or_red_with_their_evidence(runs: Path) -> None:
    health = data(runs, "/api/runs/one/checks")
    checks = {check["name"]: check for check in health["checks"]}
    assert (checks["logprob_gap"]["ok"], checks["logprob_gap"]["value"], checks["logprob_gap"]["bound"]) == (True, 1e-6, 0.05)
    assert (checks["lag"]["ok"], checks["lag"]["failed"], checks["lag"]["steps"]) == (False, 1, 3)
    assert [row[:2] for row in checks["lag"]["history"]] == [[1, True], [2, False], [3, True]]
    assert all(check["promise"] for check in health["checks"])
    time = health["time"]
    assert (time["steps"], time["total_s"]) == (3, 6.0)
    assert [(part["name"], part["share"]) for part in time["parts"]] == [("time/decode_s", 0.75), ("time/learn_s", 0.25)]
    assert time["by_step"][0][1]["time/decode_s"] == 1.5


def test_every_check_of_the_ledger_has_a_promise() -> None:
    names = set(re.findall(r'_note\(\s*"(\w+)"', Path(ledger.__file__).read_text()))
    assert names
    assert names <= set(PROMISES)


def test_a_run_without_stored_checks_gets_those_that_its_metrics_prove(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    with RunStore(folder / "run.db") as store:
        books = {
            "ledger/drawn": 4.0,
            "ledger/trained": 2.0,
            "ledger/filtered": 1.0,
            "ledger/failed": 0.0,
            "ledger/in_flight": 0.0,
        }
        store.add_metrics(1, {"train/logprob_gap": 0.2, "rollout/chains": 8.0, "rollout/trainable": 8.0, **books})
    checks = {check["name"]: check for check in data(tmp_path / "runs", "/api/runs/old/checks")["checks"]}
    assert {name: check["ok"] for name, check in checks.items()} == {
        "logprob_gap": False,
        "tasks_accounted": False,
        "failed_share": True,
    }


def test_a_killed_run_is_told(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    with RunStore(folder / "run.db") as store:
        store.set_meta({"status": "running", "pid": 999_999_999, "process": "gone", "heartbeat": 1.0, "host": "nowhere"})
    health = data(tmp_path / "runs", "/api/runs/one/checks")
    assert health["state"] == "dead"
    assert "--resume" in health["warnings"][0]["tips"][0]


def test_config_and_comparison(runs: Path) -> None:
    config = data(runs, "/api/runs/one/config")
    assert 'model = "pocket"' in config["text"]
    assert config["config"]["agent"]["tools"] == ["add"]
    found = data(runs, "/api/compare?runs=one,nested%252Ftwo")
    assert [run["name"] for run in found["runs"]] == ["one", "nested/two"]
    assert found["config"] == [{"key": "train.lr", "values": [1e-4, 3e-4]}]
    assert {"metric": "validation/success", "values": [0.5, 0.5]} in found["results"]
    pair = found["pairs"][0]
    # The two held-out rows are the same row under two ids, so they are one task of the test.
    assert (pair["a"], pair["b"], pair["tasks"], pair["ties"], pair["difference"]) == ("one", "nested/two", 1, 1, 0.0)
    assert "no difference" in pair["verdict"]
    assert {row["task_id"] for row in found["tasks"]} == {"held-0", "held-1"}
    assert ask(runs, "/api/compare?runs=one").status_code == 400
    assert ask(runs, "/api/compare?runs=one,three").status_code == 404


def test_an_export_holds_exactly_what_is_selected(runs: Path) -> None:
    response = ask(runs, "/api/runs/one/export?split=train&step=2&format=jsonl")
    assert response.headers["content-disposition"] == 'attachment; filename="one.jsonl"'
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert [line["id"] for line in lines] == ["t2-0-0", "t2-0-1", "t2-1-0", "t2-1-1"]
    with RunStore(runs / "one" / "run.db", readonly=True) as store:
        assert from_json(lines[1]) == store.trajectory("t2-0-1")
    assert ask(runs, "/api/runs/one/export?format=csv").status_code == 400


def test_a_run_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "good")
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "run.db").write_bytes(b"not a database" * 100)
    found = {run["name"]: run["problem"] for run in data(tmp_path / "runs", "/api/runs")}
    assert found["good"] is None
    assert found["bad"]
    assert ask(tmp_path / "runs", "/api/runs/bad").status_code == 400


def test_a_run_that_was_made_again_is_read_anew(tmp_path: Path) -> None:
    async def work() -> list[int]:
        async with open_client(tmp_path / "runs") as client:
            make_run(tmp_path / "runs" / "one", steps=3)
            first = (await client.get("/api/runs/one")).json()["step"]
            shutil.rmtree(tmp_path / "runs" / "one")
            make_run(tmp_path / "runs" / "one", steps=1)
            return [first, (await client.get("/api/runs/one")).json()["step"]]

    (tmp_path / "runs").mkdir()
    assert asyncio.run(work()) == [3, 1]


def test_the_folder_of_one_run_is_a_folder_of_runs(tmp_path: Path) -> None:
    make_run(tmp_path / "alone")
    assert [run["name"] for run in data(tmp_path / "alone", "/api/runs")] == ["alone"]
    assert data(tmp_path / "alone", "/api/runs/alone")["step"] == 3


def test_values_that_json_does_not_have() -> None:
    found = json.loads(dumps({"a": math.nan, "b": [math.inf, 1], "c": 1 << 60, ("t", 1): {2: "x"}, "d": "\ud800", "e": {1, 2}}))
    assert found["a"] is None
    assert found["b"] == [None, 1]
    assert found["c"] == str(1 << 60)
    assert found["['t', 1]"] == {"2": "x"}
    assert found["d"] == "\ud800"
    assert plain(True) is True
    stored = decode(encode(replace(make_chain(), task=Task("7", (), {"image": object()}))))
    assert plain(stored.task)["fields"]["image"]["not_stored"] == "object"


def test_large_answers_are_compressed_and_never_cached(runs: Path) -> None:
    response = ask(runs, "/api/runs/one", headers={"Authorization": "Bearer a-token-for-tests", "Accept-Encoding": "gzip"})
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["cache-control"] == "no-store"


def test_a_run_that_has_just_begun_has_every_page(tmp_path: Path) -> None:
    """No step, no chain, no config: nothing is there yet, and nothing fails."""
    (tmp_path / "runs" / "new").mkdir(parents=True)
    RunStore(tmp_path / "runs" / "new" / "run.db").close()
    parts = [
        "",
        "/series?names=a",
        "/steps",
        "/chains",
        "/histogram",
        "/groups?step=1",
        "/envs",
        "/events",
        "/checks",
        "/config",
    ]
    for part, response in zip(parts, ask(tmp_path / "runs", *(f"/api/runs/new{part}" for part in parts)), strict=True):
        assert response.status_code == 200, (part, response.text)
    assert data(tmp_path / "runs", "/api/runs/new/chains") == {"rows": [], "first": 0, "next": None, "total": 0, "exact": True}
    assert data(tmp_path / "runs", "/api/runs/new/checks")["time"] is None
    assert ask(tmp_path / "runs", "/api/runs/new/export").text == ""


@pytest.mark.parametrize("name", ["a b", "50%", "x#y?z&", "é漢", "quote'\"<i>", "a,b", "do.ts", "series"])
def test_a_run_may_have_any_name_that_a_folder_may_have(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "runs" / name, steps=1)
    make_run(tmp_path / "runs" / "other", steps=1)
    assert {run["name"] for run in data(tmp_path / "runs", "/api/runs")} == {name, "other"}
    assert data(tmp_path / "runs", f"/api/runs/{quote(name, safe='')}")["name"] == name
    assert data(tmp_path / "runs", f"/api/runs/{quote(name, safe='')}/chains")["total"] == 6
    names = quote(f"{quote(name, safe='')},other", safe="")
    assert data(tmp_path / "runs", f"/api/compare?runs={names}")["runs"][0]["name"] == name


def test_a_chain_that_failed_before_its_first_reply_is_shown(tmp_path: Path) -> None:
    lost = make_chain("t3-5-0", task="5", reward=None, outcome=Outcome.WORLD_FAILURE, error="WorldError: no environment")
    lost.turns.clear()
    del lost.messages[1:]
    make_run(tmp_path / "runs" / "one", chains=[lost, make_chain("t3-5-1", task="5", chain=1)])
    found = data(tmp_path / "runs", "/api/runs/one/chain/t3-5-0")
    assert (found["turns"], found["summary"]["error"]) == ([], "WorldError: no environment")
    assert data(tmp_path / "runs", "/api/runs/one/chain/t3-5-0/tokens")["rows"] == []
    group = data(tmp_path / "runs", "/api/runs/one/group?step=3&task=5")
    assert [turns[0] for turns in group["turns"]] == [None, None]
    assert group["differences"][1]["turn"] == 0


def test_a_broken_config_hides_nothing_else(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    (folder / "config.toml").write_bytes(b"[agent\n\xff")
    assert data(tmp_path / "runs", "/api/runs/one")["config"] == {}
    assert data(tmp_path / "runs", "/api/runs/one/config")["text"].startswith("[agent")
    assert data(tmp_path / "runs", "/api/runs/one/checks")["checks"]
    assert data(tmp_path / "runs", "/api/runs")[0]["problem"] is None


def test_a_run_that_was_deleted_is_gone(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")

    async def work() -> list[int]:
        async with open_client(tmp_path / "runs") as client:
            first = await client.get("/api/runs/one")
            shutil.rmtree(folder)
            while (
                second := await client.get("/api/runs/one")
            ).status_code == 200:  # the list of folders is used for two seconds
                await asyncio.sleep(0.05)
            return [first.status_code, second.status_code]

    assert asyncio.run(work()) == [200, 404]


def test_validation_is_divided_by_a_field_of_the_tasks(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    with RunStore(folder / "run.db") as store:
        for step in (4, 8):
            chains = []
            for task in range(6):
                fields = {"level": task % 2, "question": f"q{task}", "same": "x", "source": "web" if task < 4 else "book"}
                chain = make_chain(f"v{step}-{task}-0", task=str(task), reward=float(task % 2) * step)
                chains.append(replace(chain, task=Task(str(task), (), fields)))
            store.add_trajectories(step, "validation", chains)
    found = data(tmp_path / "runs", "/api/runs/one/sources?field=level")
    assert found["fields"] == ["source", "level"]
    assert found["sources"] == [
        {"value": "0", "tasks": 3, "points": [[4, 0.0, 3, 3], [8, 0.0, 3, 3]]},
        {"value": "1", "tasks": 3, "points": [[4, 4.0, 3, 3], [8, 8.0, 3, 3]]},
    ]
    first = data(tmp_path / "runs", "/api/runs/one/sources")
    assert (first["field"], [(each["value"], each["tasks"]) for each in first["sources"]]) == (
        "source",
        [("book", 2), ("web", 4)],
    )


def test_without_such_a_field_there_are_no_sources(runs: Path) -> None:
    assert data(runs, "/api/runs/one/sources") == {"fields": [], "field": None, "whole": True, "sources": []}


def test_many_requests_at_once_while_the_run_writes(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one")
    parts = [
        "",
        "/steps",
        "/chains?limit=5&sort=-reward",
        "/histogram",
        "/groups?step=1",
        "/chain/t1-0-1/tokens",
        "/checks",
        "/envs",
    ]

    async def work() -> list[int]:
        async with open_client(tmp_path / "runs") as client:
            with RunStore(folder / "run.db") as store:
                found = []
                for step in range(10, 15):
                    asked = [client.get(f"/api/runs/one{part}") for part in parts * 3]
                    chain = make_chain(f"t{step}-0-0", task="0")
                    written = asyncio.create_task(asyncio.to_thread(store.add_trajectories, step, "train", [chain]))
                    found += [each.status_code for each in await asyncio.gather(*asked)]
                    await written
            last = (await client.get("/api/runs/one/steps?after=9")).json()["steps"]
            assert [row["step"] for row in last] == [10, 11, 12, 13, 14]
            return found

    assert set(asyncio.run(work())) == {200}


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_a_number_that_no_column_holds_is_refused(runs: Path, digits: int) -> None:
    """Every number that a query takes, with as many digits as an address may have."""
    number = "9" * digits
    asked = [
        *(f"chains?{name}={sign}{number}" for name in ("step", "step_low", "step_high", "draw", "min_tokens", "max_tokens",
          "min_turns", "max_turns", "offset", "limit") for sign in ("", "-")),
        f"chains?cursor=[{number},{number}]",
        f"chains?cursor=[1,{number}]",
        f"series?names=reward/mean&after={number}",
        f"steps?after={number}",
        f"histogram?step={number}",
        f"groups?step={number}",
        f"group?step={number}&task=1",
        f"group?step=1&task=1&draw={number}",
        f"events?after={number}",
    ]  # fmt: skip
    for path in asked:
        response = ask(runs, f"/api/runs/one/{path}")
        assert response.status_code == 400, (path[:60], response.status_code, response.text[:200])
