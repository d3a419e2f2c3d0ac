"""Pages for a person in the terminal: nothing of a page is lost but the instruction, and it can be played by what is shown."""

from __future__ import annotations

from agentfly.data import load_tasks
from agentfly.envs.play import play
from agentfly.envs.webshop.catalogue.catalogue import open_catalogue
from agentfly.envs.webshop.catalogue.goals import ShopGoal
from agentfly.envs.webshop.shop.terminal import shown
from agentfly.envs.webshop.shop.visit import SEPARATOR, Visit
from agentfly.envs.webshop.tasks import webshop_tasks
from agentfly.envs.worlds import find_world

ROW = webshop_tasks("test", 1)[0]
GOAL = ShopGoal.from_dict(ROW["goal"])


def visit() -> Visit:
    return Visit(open_catalogue("generated"), GOAL)


def test_results_have_a_line_each_and_buttons_stand_last_as_they_are_written():
    there = visit()
    there.step("search[mug]")
    there.step("click[next >]")
    lines = shown(there.told).split("\n")
    assert lines[0].startswith("Page 2 (Total results: ")
    assert lines[-1] == "click[back to search]  click[< prev]  click[next >]"
    offered = there.lines()
    first = offered.index(there.results[10])
    assert lines[1] == "  ".join(offered[first : first + 3])
    assert len(lines) == 2 + len(there.results[10:20])


def test_a_page_keeps_every_text_but_the_instruction():
    there = visit()
    for action in ("search[mug]", f"click[{GOAL.asin}]", "click[zzz]"):
        there.step(action)
        text = shown(there.told).lower()
        assert GOAL.instruction.lower() not in text
        assert SEPARATOR not in text
        kept = [part for part in there.lines() if part not in ("Instruction:", GOAL.instruction)]
        assert all(part.lower() in text for part in kept)
    assert text.startswith("there is nothing called 'zzz' to click on this page.")


def test_a_person_shops_by_lines_and_rewards_see_the_original_page():
    said: list[str] = []
    given = [f"search[{GOAL.name}]", f"click[{GOAL.asin.lower()}]", "click[buy now]"]
    (task,) = load_tasks([ROW])
    record = play(find_world("webshop"), task, lambda prompt: given.pop(0), said.append)
    assert all(SEPARATOR not in text for text in said)
    assert any(text.startswith("Thank you for shopping with us!\nYour score (min 0.0, max 1.0): 0.") for text in said)
    assert SEPARATOR in record.turns[0].results[0].observation
    assert said[-2].startswith("webshop_score: ")
