"""What moves: a run that writes, the keyboard, a conversation with a model; and texts that try to run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from . import stored
from .conftest import PHONE, WIDE, Site, Tab, until
from .test_pages import settled

HOSTILE = [
    "", "/metrics", "/steps/1", "/chains", "/envs", "/checks", "/config", "/chat",
]  # fmt: skip


def test_a_page_grows_while_the_run_writes(tab: Tab, site: Site) -> None:
    store = stored.make_growing_run(site.folder / "growing")
    try:
        page = tab.open("/run/growing")
        page.locator(".side .dot.running").wait_for()
        step = page.locator(".stat", has_text="Step").first.locator(".stat-value")
        page.locator(".stat-value", has_text="0.2").first.wait_for()
        assert step.inner_text() == "1"
        stored.add_step(store, 2)
        page.locator(".stat-value", has_text="0.4").first.wait_for()
        assert step.inner_text() == "2"
        page.keyboard.press("f")
        page.get_by_text("Paused").wait_for()
        known = page.evaluate("async () => (await import('/static/js/api.js')).versions.value.growing")
        stored.add_step(store, 3)
        until(page, f"async () => (await import('/static/js/api.js')).versions.value.growing > {known}")  # the page knows of it
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert step.inner_text() == "2"
        page.keyboard.press("f")
        page.locator(".stat-value", has_text="0.6").first.wait_for()
        tab.visit("/run/growing/steps/latest").get_by_role("heading", name="Step 3").wait_for()
        stored.add_step(store, 4)
        page.get_by_role("heading", name="Step 4").wait_for()
        tab.visit("/run/growing/chains").get_by_text("64 chains").wait_for()
        stored.add_step(store, 5)
        page.get_by_text("80 chains").wait_for()
        store.set_meta({"status": "finished"})
        page.locator(".side .dot.finished").wait_for()
    finally:
        store.close()


def test_news_that_come_faster_than_answers_do_not_keep_a_page_empty(open_tab: Callable[..., Tab], site: Site) -> None:
    tab = open_tab()
    told = iter(range(10_000))

    def tell(route: Any) -> None:
        news = "".join(f'data: {{"run": "full", "version": {next(told)}}}\n\n' for _ in range(3))
        route.fulfill(status=200, content_type="text/event-stream", body=f"retry: 100\n\n{news}")

    tab.context.route("**/api/changes", tell)
    tab.before_load(
        """const ask = window.fetch; window.fetch = async (...given) => { const answer = await ask(...given);
        await new Promise((done) => setTimeout(done, 700));
        if (given[1]?.signal?.aborted) throw new DOMException('given up', 'AbortError'); return answer; };"""
    )
    page = tab.open("/run/full/checks")
    page.get_by_role("heading", name="Where the time goes").wait_for()
    tab.visit("/compare?runs=full,again-seed1").get_by_role("heading", name="Config difference").wait_for()
    tab.visit("/run/full/chains").get_by_text("61 chains").wait_for()
    assert next(told) > 3
    tab.context.unroute_all(behavior="ignoreErrors")


def test_everything_can_be_reached_with_keys(tab: Tab) -> None:
    page = tab.page
    settled(page)
    page.keyboard.press("/")
    page.keyboard.type("full")
    page.locator("tbody tr").nth(1).wait_for(state="detached")
    page.keyboard.press("Escape")
    page.keyboard.press("j")
    page.locator("tr[aria-selected=true]").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="full").wait_for()
    tab.visit("/run/full/steps/2").get_by_role("heading", name="Step 2").wait_for()
    page.keyboard.press(".")
    page.get_by_role("heading", name="Step 3").wait_for()
    page.keyboard.press(",")
    page.get_by_role("heading", name="Step 2").wait_for()
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Chains", exact=True).wait_for()
    page.locator(".chain-list .vrow").first.wait_for()
    for key in "jjk":
        page.keyboard.press(key)
    chosen = page.locator(".chain-row.chosen")
    chosen.wait_for()
    page.keyboard.press("Enter")
    page.get_by_label("Summary of the chain").wait_for()
    before = page.url
    page.keyboard.press("[")
    page.wait_for_url(lambda address: address != before)
    page.keyboard.press("]")
    page.wait_for_url(before)
    page.keyboard.press("2")
    page.locator(".tok.trained").first.wait_for()
    page.keyboard.press("t")
    page.locator(".tline .tok[class*=seq]").first.wait_for()
    page.keyboard.press("4")
    page.locator("pre.raw").wait_for()
    theme = page.locator("html").get_attribute("data-theme")
    page.keyboard.press("d")
    page.locator(f"html:not([data-theme={theme}])").wait_for()
    page.keyboard.press("?")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    page.keyboard.press("Escape")
    page.get_by_role("heading", name="Chains", exact=True).wait_for()


def test_sibling_keys_that_are_pressed_before_the_chain_is_loaded_are_not_lost(tab: Tab, site: Site) -> None:
    tab.before_load(
        """const ask = window.fetch; window.gate = Promise.resolve(); window.hold = () => {
        window.gate = new Promise((done) => { window.release = done; }); }; window.hold();
        window.fetch = async (...given) => { if (String(given[0]).includes('/chain/')) await window.gate;
            return ask(...given); };"""
    )
    page = tab.open("/run/full/chain/t2-0-1")
    page.locator(".loading .bone").nth(7).wait_for()  # the page of the chain is drawn, and its group is not known
    press = """async keys => { for (let i = 0; i < 2; i++) await new Promise(requestAnimationFrame);
        keys.forEach((key) => document.body.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}))); }"""
    page.evaluate(press, ["]", "]", "["])
    page.evaluate("window.release()")
    page.wait_for_url("**/chain/t2-0-2")
    page.locator("h1", has_text="chain 2").wait_for()
    page.evaluate("window.hold()")
    page.evaluate(press, ["[", "]", "]"])  # faster than a page is drawn
    page.wait_for_url("**/chain/t2-0-3")
    page.evaluate(press, ["[", "["])  # while the chain is loading
    page.wait_for_url("**/chain/t2-0-1")
    page.evaluate("window.release()")
    page.locator("h1", has_text="chain 1").wait_for()


def test_a_conversation_streams_tokens_and_a_stored_chain_is_forked(tab: Tab) -> None:
    page = tab.visit("/run/full/chat")
    page.get_by_role("button", name="Start").click()
    message = page.get_by_label("Message")
    message.wait_for(timeout=120_000)
    message.fill("What is 12 times 7, plus 5?")
    page.keyboard.press("Enter")
    page.locator("article.assistant").first.wait_for()
    page.get_by_text(re.compile(r"\d+ turns? · \d+ tokens?")).wait_for(timeout=120_000)
    page.get_by_role("button", name="Tokens").first.click()
    assert page.locator("article.assistant .tok").count() > 3
    assert "session=" in page.url
    page.get_by_role("button", name="End conversation").click()
    page.get_by_role("button", name="Start").wait_for()
    tab.visit("/run/full/chain/t2-0-0").get_by_role("link", name="Fork").last.click()
    page.get_by_role("button", name="Fork").click()
    page.get_by_text("Forked from").wait_for(timeout=120_000)
    page.get_by_role("button", name="Go on").click()
    page.get_by_text(re.compile(r"\d+ turns? · \d+ tokens?")).wait_for(timeout=120_000)
    page.get_by_role("button", name="End conversation").click()
    page.get_by_role("button", name="Start").wait_for()


def unharmed(page: Any) -> None:
    """No payload ran, and none became an element."""
    assert page.evaluate("window.pwned") is None
    assert page.locator("#app script, #app iframe, #app link, #app img[src=x], #app svg[onload], #app [onerror]").count() == 0
    assert page.locator("#app a:not([href^='/'])").count() == page.locator("#app a:not([href])").count()


def test_texts_of_models_and_tools_are_shown_and_never_run(open_tab: Callable[..., Tab], site: Site) -> None:
    tab = open_tab()
    page = tab.page
    page.get_by_text("<img src=x onerror=").first.wait_for()
    unharmed(page)
    for path in HOSTILE:
        settled(tab.visit(f"/run/hostile{path}"))
        unharmed(page)
    tab.visit("/run/hostile/chains").locator(".vrow a").first.click()
    page.get_by_label("Summary of the chain").wait_for()
    chain = page.url.removeprefix(site.url)
    for part in ("talk", "tokens", "times", "raw"):
        settled(tab.visit(f"{chain}?tab={part}"))
        unharmed(page)
    shown = tab.visit(chain).locator(".talk").inner_text()
    assert "</script><script>window.pwned='script'</script>" in shown
    assert "\u241b[31mred" in shown
    assert "⟨U+202E⟩" in shown
    assert "\x1b" not in shown
    tab.visit("/run/hostile/steps/1").locator(".group-row").first.click()
    page.locator(".sibling-head").first.wait_for()
    page.locator("mark").first.wait_for()
    unharmed(page)
    settled(tab.visit("/compare?runs=hostile,full"))
    unharmed(page)


def test_the_policy_stops_inline_script_and_style(tab: Tab) -> None:
    """What a fault in a page would let in, the browser refuses."""
    page = tab.page
    settled(page)
    page.evaluate(
        """() => {
            window.refused = 0;
            document.addEventListener('securitypolicyviolation', () => { window.refused += 1; });
            const box = document.createElement('div');
            box.innerHTML = '<img src=x onerror="window.pwned=1"><b style="color:red">b</b>';
            const code = document.createElement('script');
            code.textContent = 'window.pwned=2';
            document.body.append(box, code);
        }"""
    )
    until(page, "() => window.refused >= 2")
    assert page.evaluate("window.pwned") is None
    refused = [fault for fault in tab.faults if "Content Security Policy" in fault]
    assert len(refused) >= 2
    tab.faults.clear()


def test_without_the_token_there_is_nothing_to_see(browser: Any, site: Site) -> None:
    context = browser.new_context()
    answer = context.new_page().goto(site.url + "/run/full")
    assert answer.status in (401, 403)
    assert "full" not in answer.text()
    context.close()


@pytest.fixture(scope="module")
def long_run(site: Site) -> str:
    """A run with a chain of more than 9,000 tokens and 600 more chains."""
    folder = site.folder / "long"
    stored.make_run(folder, steps=1)
    long = stored.make_chain("long-chain", "long", 0, 1.0, words=9000)
    with stored.RunStore(folder / "run.db") as store:
        store.add_trajectories(1, "train", [long])
        store.add_trajectories(1, "train", [stored.make_chain(f"m-{i}", f"many-{i}", 0, 0.5) for i in range(600)])
    assert long.num_sampled > 9000
    return "long"


def test_one_goes_to_any_row_by_its_number_or_its_chain(tab: Tab, long_run: str) -> None:
    page = tab.open("/run/long/chains?sort=added")
    page.get_by_text("622 chains").wait_for()
    row = page.get_by_label("Row number or chain id")
    chosen = page.locator(".chain-row.chosen")
    assert "of 622" in page.locator(".jump").inner_text()
    row.fill("500")
    row.press("Enter")
    chosen.filter(has_text="many-477").wait_for()  # 22 chains come before those
    assert "row=500" in page.url
    page.locator(".vrow", has_text="many-470").wait_for(state="attached")  # what comes before is loaded too
    assert row.input_value() == "500"
    page.locator(".chain-list").evaluate("list => { list.scrollTop = 0; }")
    page.locator(".vrow", has_text="many-371").first.wait_for(state="attached")
    page.reload()
    chosen.filter(has_text="many-477").wait_for()
    page.keyboard.press("g")
    page.keyboard.type("m-123")
    page.keyboard.press("Enter")
    chosen.filter(has_text="many-123").wait_for()
    assert "at=m-123" in page.url
    page.keyboard.press("Escape")
    page.keyboard.press("Shift+G")
    chosen.filter(has_text="many-599").wait_for()
    assert "row=622" in page.url
    page.keyboard.press("Enter")
    page.get_by_label("Summary of the chain").wait_for()
    page.go_back()
    chosen.filter(has_text="many-599").wait_for()
    page.get_by_label("Split", exact=True).select_option("validation")
    page.get_by_text("4 chains match").wait_for()
    assert "row=" not in page.url
    assert page.locator(".vrow").count() == 4
    tab.visit("/run/long/chains?row=9999").get_by_text("There is no row 9,999.").wait_for()
    page.get_by_text("The list has 622 rows.").wait_for()


def test_a_long_chain_keeps_few_nodes_in_the_page(open_tab: Callable[..., Tab], long_run: str) -> None:
    for viewport in (WIDE, PHONE):
        page = open_tab(viewport).open("/run/long/chain/long-chain?tab=tokens")
        page.locator(".tok.trained").first.wait_for()
        assert page.evaluate("document.querySelectorAll('*').length") < 3000
        page.locator(".token-list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
        page.locator(".tline", has_text="Answer: 89").wait_for()
        assert page.evaluate("document.querySelectorAll('*').length") < 3000
    page = open_tab().open("/run/long/chains")
    page.get_by_text("622 chains").wait_for()
    before = page.locator(".vspace").evaluate("space => space.clientHeight")
    page.locator(".chain-list").evaluate("list => { list.scrollTop = list.scrollHeight; }")
    page.locator(".vrow", has_text="many-").first.wait_for()
    until(page, f"() => document.querySelector('.vspace').clientHeight > {before}")
    assert page.locator(".vrow").count() < 60
