"""Every page for people who use a keyboard or a screen reader: names of controls, Tab order, focus, contrast of all text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Tab
from .test_pages import PATHS, settled

NAMED_ROLES = {
    "button", "link", "textbox", "searchbox", "combobox", "checkbox", "slider", "spinbutton", "image", "img", "dialog", "list",
    "table", "navigation", "group", "meter",
}  # fmt: skip
OPTIONAL = {"list", "table", "navigation", "group", "image", "img"}
"""Roles that need a name only if they can be reached by Tab, or are pictures that mean something."""
TEXTS = """() => {
    const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const read = (colour) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
        const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
    const kept = new Map(); const rgba = (colour) => kept.get(colour) ?? kept.set(colour, read(colour)).get(colour);
    const over = (top, bottom) => [0, 1, 2].map((i) => top[i] * top[3] + bottom[i] * (1 - top[3])).concat(1);
    // [ground, opacity] of an element; no ground if a picture is behind it.
    const known = new Map(); const behind = (element) => { if (!element) return [[255, 255, 255, 1], 1];
        if (!known.has(element)) { const style = getComputedStyle(element);
            const [under, opacity] = behind(element.parentElement);
            const ground = under && style.backgroundImage === 'none' ? over(rgba(style.backgroundColor), under) : null;
            known.set(element, [ground, opacity * Number(style.opacity)]); }
        return known.get(element); };
    const light = (colour) => { const [r, g, b] = colour.slice(0, 3).map((part) => part / 255).map((part) =>
        part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const poor = new Map(); let seen = 0;
    while (walker.nextNode()) {
        const text = walker.currentNode.textContent.trim(); const element = walker.currentNode.parentElement;
        if (!text || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
        if (element.closest('noscript, [disabled], [aria-disabled=true], option, .skip, .hidden-label')) continue;
        const [ground, opacity] = behind(element); if (!ground) continue;
        const style = getComputedStyle(element); const own = rgba(style.color);
        const shown = over([...own.slice(0, 3), own[3] * opacity], ground);
        const [high, low] = [light(shown), light(ground)].sort((a, b) => b - a); const ratio = (high + 0.05) / (low + 0.05);
        const size = parseFloat(style.fontSize); const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        seen += 1;
        if (ratio < (large ? 3 : 4.5) - 0.005)
            poor.set(element.className + ' ' + element.tagName, [ratio.toFixed(2), text.slice(0, 40)]); }
    return [seen, [...poor]]; }"""
REACHABLE = """() => [...document.querySelectorAll('a[href], button, input, select, textarea, summary, [tabindex]')]
    .filter((each) => !each.disabled && each.tabIndex >= 0 && each.checkVisibility({visibilityProperty: true})
    && !(each.parentElement.closest('details:not([open])') && !each.matches('summary')))
    .map((each, index) => { each.dataset.order = index; return each.tabIndex; })"""


def named_wrong(tab: Tab) -> list[str]:
    """Controls and pictures of the accessibility tree that have no name."""
    session = tab.context.new_cdp_session(tab.page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    wrong = []
    for node in nodes:
        role, name = node.get("role", {}).get("value", ""), node.get("name", {}).get("value", "").strip()
        focusable = any(each["name"] == "focusable" and each["value"]["value"] for each in node.get("properties", ()))
        if node.get("ignored") or name or role not in NAMED_ROLES:
            continue
        if role not in OPTIONAL or (focusable and role != "image"):
            wrong.append(f"{role} {node.get('description', {}).get('value', '')}")
    return wrong


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_contrast_and_all_controls_have_names(open_tab: Callable[..., Tab], scheme: str) -> None:
    tab = open_tab(scheme=scheme)
    for path in PATHS:
        page = tab.visit(path)
        settled(page)
        seen, poor = page.evaluate(TEXTS)
        assert seen > 15, path
        assert not poor, (path, scheme, poor)
        assert scheme == "dark" or not named_wrong(tab), path  # names do not depend on colours
        assert page.locator("h1").count() == 1, path
        assert page.locator("[id]").evaluate_all("all => all.length - new Set(all.map((each) => each.id)).size") == 0, path


def test_a_page_says_in_its_title_what_it_is(tab: Tab) -> None:
    titles = []
    for path in (
        "/",
        "/run/full",
        "/run/full/chains",
        "/run/full/chain/t2-0-0",
        "/run/full/group/2/task-0",
        "/run/full/steps/2",
    ):
        settled(tab.visit(path))
        titles.append(tab.page.title())
    assert titles == [
        "Runs · AgentFly", "Overview · full · AgentFly", "Chains · full · AgentFly", "Chain t2-0-0 · full · AgentFly",
        "Group task-0 · full · AgentFly", "Step 2 · full · AgentFly",
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["/", "/run/full/chains?step=2&task=task-0", "/run/full/chain/t2-0-0", "/run/full/config"])
def test_tab_reaches_every_control_in_the_order_of_the_page(tab: Tab, path: str) -> None:
    page: Any = tab.visit(path)
    settled(page)
    page.locator("main").evaluate("() => document.activeElement.blur()")
    orders = page.evaluate(REACHABLE)
    assert set(orders) == {0}, "a tabindex above 0 breaks the order"
    reached: list[int] = []
    for _ in range(len(orders) + 3):
        page.keyboard.press("Tab")
        order = page.evaluate("() => document.activeElement.dataset.order ?? null")
        if order is None or (reached and int(order) <= reached[-1]):
            break
        reached.append(int(order))
    missed = [number for number in range(len(orders)) if number not in reached]
    names = page.evaluate(
        "all => all.map((n) => document.querySelector(`[data-order='${n}']`).outerHTML.slice(0, 120))", missed
    )
    assert not missed, names


def test_the_first_tab_skips_the_navigation_and_the_help_gives_the_focus_back(tab: Tab) -> None:
    page = tab.visit("/run/full/chains")
    settled(page)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip the navigation"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("Tab")
    assert page.evaluate("document.querySelector('main').contains(document.activeElement)")
    button = page.get_by_role("button", name="Keys")
    button.focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    for _ in range(3):
        page.keyboard.press("Tab")
        assert page.evaluate("document.querySelector('[role=dialog]').contains(document.activeElement)")
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Keys"
