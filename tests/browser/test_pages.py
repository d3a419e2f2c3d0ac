"""The pages in a real browser: open, filter, read a chain token by token, compare, on a laptop and on a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from .conftest import PHONE, Tab

PATHS = [
    "/", "/run/full", "/run/full/metrics", "/run/full/steps/2", "/run/full/chains", "/run/full/chain/t2-0-0",
    "/run/full/chain/t2-0-0?tab=tokens", "/run/full/chain/t2-0-0?tab=times", "/run/full/chain/t2-0-0?tab=raw",
    "/run/full/group/2/task-0", "/run/full/envs", "/run/full/checks", "/run/full/config", "/run/full/chat",
    "/compare?runs=full,again-seed1",
]  # fmt: skip


def settled(page: Any) -> None:
    """Wait until nothing is loading."""
    page.locator("h1").first.wait_for()
    page.locator(".loading").first.wait_for(state="detached")


def width_beyond(page: Any) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def test_the_list_of_runs_shows_states_and_results_and_finds(tab: Tab) -> None:
    page = tab.page
    page.get_by_role("link", name="full").wait_for()
    row = page.locator("tr", has=page.get_by_role("link", name="full", exact=True))
    assert "finished" in row.inner_text()
    assert "grpo" in row.inner_text()
    assert "100 %" in row.inner_text()
    assert row.locator("svg.spark polyline").count() == 1
    page.get_by_label("Search runs").fill("rloo")
    page.get_by_role("link", name="full", exact=True).wait_for(state="detached")
    assert page.locator("tbody tr").count() == 2
    assert "q=rloo" in page.url


def test_ticked_runs_are_compared_with_curves_config_and_a_paired_test(tab: Tab) -> None:
    page = tab.page
    page.get_by_label("Compare full").check()
    page.get_by_label("Compare again-seed1").check()
    page.get_by_role("link", name="Compare 2").click()
    page.get_by_role("heading", name="Compare 2 runs").wait_for()
    page.locator(".chart canvas").first.wait_for()
    difference = page.locator("section.card", has=page.get_by_role("heading", name="Config difference")).locator("tbody")
    difference.wait_for()
    assert "train.lr" in difference.inner_text()
    assert "0.0002" in difference.inner_text()
    assert "agent.max_turns" not in difference.inner_text()
    assert page.get_by_text("against").first.is_visible()


def test_curves_are_smoothed_overlaid_and_banded_and_a_point_opens_its_step(tab: Tab) -> None:
    page = tab.open("/run/full/metrics?q=reward/mean")
    card = page.locator("section.card", has=page.get_by_role("heading", name="reward/mean", exact=True))
    card.locator("canvas").wait_for()
    assert "Mean total reward" in card.inner_text()
    for name in ("again-seed1", "again-seed2"):
        page.get_by_label("Overlay a run").select_option(name)
    card.get_by_text("again-seed2").wait_for()
    page.get_by_label("Bands over seeds").check()
    card.get_by_text("again (2 seeds)").wait_for()
    page.get_by_label("Log scale").check()
    page.get_by_role("button", name="Wall time").click()
    card.locator("canvas").wait_for()
    assert all(part in page.url for part in ("bands=1", "log=1", "x=time", "with=again-seed1"))
    page = tab.open("/run/full/metrics?q=reward/mean&smooth=0.6")
    card.get_by_text("not smoothed").wait_for()
    over = card.locator(".u-over")
    box = over.bounding_box()
    over.click(position={"x": box["width"] - 2, "y": box["height"] / 2})
    page.get_by_role("heading", name="Step 3").wait_for()
    assert page.url.endswith("/run/full/steps/3")


def test_validation_is_shown_for_each_source(tab: Tab) -> None:
    page = tab.visit("/run/full")
    card = page.locator("section.card", has=page.get_by_role("heading", name="Validation by source"))
    card.locator("canvas").wait_for()
    assert "easy (2)" in card.inner_text()
    assert "hard (2)" in card.inner_text()


def test_a_step_shows_rewards_and_the_group_that_teaches_nothing(tab: Tab) -> None:
    page = tab.open("/run/full/steps/2")
    row = page.locator(".group-row", has_text="task-3")
    row.get_by_text("teaches nothing").wait_for()
    assert page.locator(".group-row", has_text="task-0").get_by_text("teaches", exact=True).count() == 1
    page.locator(".lane").first.wait_for()
    page.locator(".bar:not([disabled])").last.click()
    page.get_by_role("heading", name="Chains").wait_for()
    page.get_by_text("6 chains match the filter").wait_for()
    assert "step=2" in page.url
    assert "low=" in page.url


def test_every_filter_narrows_the_list_and_stands_in_the_address(tab: Tab) -> None:
    page = tab.open("/run/full/chains")
    page.get_by_text("61 chains").wait_for()
    page.get_by_label("Split", exact=True).select_option("train")
    page.get_by_text("49 chains match").wait_for()
    page.get_by_label("Outcome", exact=True).select_option("world_failure")
    page.get_by_text("1 chain match").wait_for()
    assert "the house fell down" in page.locator(".chain-list").inner_text()
    page.get_by_label("Outcome", exact=True).select_option("")
    page.get_by_label("Step", exact=True).fill("3")
    page.keyboard.press("Enter")
    page.get_by_text("16 chains match").wait_for()
    page.get_by_label("Text").fill("task-2")
    page.get_by_text("4 chains match").wait_for()
    page.locator(".histogram .bar:not([disabled])").last.click()
    page.get_by_text("2 chains match").wait_for()
    assert page.locator(".histogram .bar[aria-pressed=true]").count() == 1
    page.get_by_label("Sort").select_option("-tokens")
    address = page.url
    assert all(part in address for part in ("split=train", "step=3", "q=task-2", "low=", "sort=-tokens"))
    page.reload()
    page.get_by_text("2 chains match").wait_for()
    page.get_by_role("link", name="Clear filter").click()
    page.get_by_text("61 chains").wait_for()
    page.get_by_label("Tool").select_option("multiply")
    page.get_by_text("61 chains match").wait_for()


def test_the_selection_can_be_exported(tab: Tab) -> None:
    page = tab.open("/run/full/chains?step=2&task=task-1")
    page.get_by_text("4 chains match").wait_for()
    with page.expect_download() as waiting:
        page.get_by_role("link", name="Export JSONL").click()
    lines = waiting.value.path().read_text(encoding="utf-8").splitlines()
    assert len(lines) == 4
    assert all("task-1" in json.dumps(json.loads(line)) for line in lines)


def test_a_search_in_whole_chains_finds_what_was_said(tab: Tab) -> None:
    page = tab.open("/run/full/chains")
    page.get_by_text("61 chains").wait_for()
    page.get_by_label("Whole chains").check()
    page.get_by_label("Text").fill("add first")
    page.get_by_text(re.compile(r"30 chains match")).wait_for()


def test_a_chain_shows_its_conversation_and_its_chips_stay(tab: Tab) -> None:
    page = tab.open("/run/full/chains?step=2&task=task-0")
    page.locator(".chain-row", has_text="task-0").nth(1).click()
    page.get_by_text("What is 12 times 7, plus 5?").first.wait_for()
    assert page.locator("details.call summary").first.inner_text().startswith("multiply")
    assert "84" in page.locator(".observation").inner_text()
    chips = page.get_by_label("Summary of the chain")
    for name in ("Talk", "Tokens", "Times", "Raw"):
        page.locator(".tabs").get_by_role("link", name=name).click()
        page.locator(f".tabs a[aria-current=page]:has-text('{name}')").wait_for()
        shown = chips.inner_text()
        assert "finished" in shown
        assert "advantage" in shown
    page.locator("pre.raw").wait_for()


def test_tokens_are_coloured_by_what_was_recorded(tab: Tab) -> None:
    page = tab.open("/run/full/chain/t2-0-0?tab=tokens")
    page.locator(".tok.trained").first.wait_for()
    text = "".join(page.locator(".tline .tok").all_inner_texts())
    assert "What is 12 times 7, plus 5?" in text
    trained = "".join(page.locator(".tline .tok.trained").all_inner_texts())
    assert trained.startswith("Thought: multiply first")
    assert "What is" not in trained
    offered = page.get_by_role("group", name="Colour by")
    for name, kind in (("Log-prob", "seq"), ("Ratio", "div"), ("Entropy", "seq"), ("Version", "cat"), ("Advantage", "div")):
        offered.get_by_role("button", name=name).click()
        page.locator(f".tline .tok[class*={kind}]").first.wait_for()
        assert page.locator(".tline .tok[class*=ctx]").count() > 0
    page.locator(".tline .tok[class*=div]").first.hover()
    shown = page.locator(".inspector").inner_text()
    for part in ("id", "log-prob", "trainer log-prob", "entropy", "advantage", "ratio"):
        assert part in shown
    assert "colour=advantage" in page.url


def test_siblings_stand_side_by_side_with_the_first_difference_marked(tab: Tab) -> None:
    page = tab.open("/run/full/steps/2")
    page.locator(".group-row", has_text="task-0").click()
    page.locator(".sibling-head").first.wait_for()
    assert page.locator(".sibling-head").count() == 4
    assert page.locator(".adv").count() == 4
    differing = page.locator(".cell.differs")
    assert differing.count() >= 2
    assert differing.first.locator("mark").inner_text().strip() in ("add", "multiply")
    assert differing.first.locator(".equal").inner_text() == "Thought: "


def test_health_shows_the_broken_promise_and_environments_their_failures(tab: Tab) -> None:
    page = tab.open("/run/full/checks")
    row = page.locator("tr", has_text="lag").first
    row.wait_for()
    assert "1 of 3 failed" in row.inner_text()
    assert row.locator(".strip a.k-bad").count() == 1
    assert page.get_by_role("heading", name="Where the time goes").is_visible()
    page = tab.open("/run/full/envs")
    page.locator("section.card", has=page.get_by_role("heading", name="house")).locator("canvas").wait_for()
    tools = page.locator("section.card", has=page.get_by_role("heading", name="Tools")).inner_text()
    assert "multiply" in tools
    assert "the house fell down" in page.locator("main").inner_text()


def test_environments_name_the_limits_that_were_reached_and_the_nodes_of_a_cluster(tab: Tab) -> None:
    page = tab.visit("/run/full/envs")
    limits = page.locator("section.card", has=page.get_by_role("heading", name="Sandbox limits"))
    limits.wait_for()
    rows = limits.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[:4] for row in rows] == [["memory", "2", "1", "python"], ["CPU time", "1", "1", "python"]]
    nodes = page.locator("section.card", has=page.get_by_role("heading", name="Nodes"))
    assert "10.0.0.2" in nodes.inner_text()
    assert nodes.locator("svg.spark polyline").count() == 8
    assert nodes.locator("tbody tr").nth(1).locator("td").nth(3).inner_text() == "24"  # chains of the last step
    limits.get_by_role("link", name="t2-0-0").click()
    page.get_by_label("Summary of the chain").wait_for()
    tab.visit("/run/again-seed1/envs").get_by_role("heading", name="Tools").wait_for()
    assert page.get_by_role("heading", name="Nodes").count() == page.get_by_role("heading", name="Sandbox limits").count() == 0


def test_the_config_is_searched_and_compared(tab: Tab) -> None:
    page = tab.open("/run/full/config")
    page.get_by_label("Search keys").fill("lr")
    page.get_by_text("train.lr").wait_for()
    page.get_by_label("Compare with").select_option("again-seed1")
    page.locator("td.changed").first.wait_for()
    assert "rloo" in page.locator("table").inner_text()
    assert "agent.max_turns" not in page.locator("table").inner_text()


def test_words_where_there_is_nothing_or_something_is_wrong(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab()
    tab.open("/run/full/chains?q=no-such-text").get_by_text("No chain matches.").wait_for()
    tab.open("/no/such/page")
    for path, sentence in (
        ("/run/none", "there is no run"),
        ("/run/full/chain/none", "none"),
        ("/run/full/chains?sort=colour", "cannot be sorted"),
    ):
        tab.open(path).locator(".failure", has_text=sentence).wait_for()
    # The browser itself logs each refused request.
    expected = [fault for fault in tab.faults if "Failed to load resource" in fault]
    tab.faults[:] = [fault for fault in tab.faults if fault not in expected]
    assert expected


def test_no_page_scrolls_sideways_on_a_phone(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(PHONE, "dark")
    for path in PATHS:
        page = tab.visit(path)
        settled(page)
        assert width_beyond(page) <= 0, path


def test_the_theme_follows_the_system_and_the_switch_stays(open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(scheme="dark")
    page = tab.open("/run/full")
    page.locator(".chart canvas").first.wait_for()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.get_by_label("Light or dark").click()
    page.locator("html[data-theme=light]").wait_for()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
    page.reload()
    page.locator("html[data-theme=light]").wait_for()
