"""The table of clients in docs/bring-your-own.md is what their recorded requests give in the tree of a chain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .test_dialects import RECORDED, REWRITES, exchange
from .test_lineage import Session

PAGE = Path(__file__).resolve().parents[2] / "docs/bring-your-own.md"
CLIENTS = {
    "openai, Chat Completions": ("openai_chat", "openai_chat_stream"),
    "openai, Responses": ("openai_responses", "openai_responses_stream"),
    "anthropic": ("anthropic", "anthropic_stream"),
    "LangGraph, ChatOpenAI": ("langgraph", "langgraph_stream"),
    "LangGraph, `use_responses_api=True`": ("langgraph_responses",),
    "openai-agents, Responses": ("openai_agents", "openai_agents_stream"),
    "openai-agents, Chat Completions": ("openai_agents_chat",),
    "pydantic-ai, all three": ("pydantic", "pydantic_chat", "pydantic_messages"),
    "smolagents": REWRITES,
    "Codex": ("codex",),
    "Claude Code": ("claude_code",),
}


THOUGHTS = {
    client: "hm" if client in ("codex", "claude_code") else "I should add." for client in RECORDED if client not in REWRITES
}


def reasons(client: str, **options: Any) -> str:
    """Why rows of the recorded chain begin after its first; the first reply has a thought."""
    session, recorded = Session(**options), RECORDED[client]
    requests = [exchange(each["path"], each["body"]).call for each in recorded["requests"]]
    for number, call in enumerate(requests):
        if number == 0:
            place = session.asks(*call.messages, tools=call.tools)
        else:
            place = session.asks(*call.messages, tools=call.tools, thinking=dict(call.thinking))
        text, calls = recorded["replies"][number] if number < len(recorded["replies"]) else ("Done.", [])
        made = "".join(
            f'\n<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given)}}}\n</tool_call>' for name, given in calls
        )
        thought = "<think>\n" + THOUGHTS[client] + "\n</think>\n\n" if number == 0 and client in THOUGHTS else ""
        session.gets(place, thought + text + made)
    whys = [turn.why for turn in session.trajectory.turns[1:] if turn.why]
    return ", ".join(sorted(set(whys))) or "none"


@pytest.mark.parametrize("name", CLIENTS)
def test_a_row_of_the_table_is_so(name: str) -> None:
    found = {(reasons(client), reasons(client, keeps_thinking=True)) for client in CLIENTS[name]}
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} |")]
    assert found == {tuple(cell.strip() for cell in row.strip("|").split("|")[1:])}


def test_every_recorded_client_stands_in_the_table() -> None:
    alone = {"openai_responses_previous"}  # previous_response_id: the history is ours
    assert {client for clients in CLIENTS.values() for client in clients} == set(RECORDED) - alone
