"""Any world as a web page: a person plays it by a line at a time, sees the rewards, and cannot be made to act by others."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlencode

import pytest

from agentfly import cli
from agentfly.envs import pages
from agentfly.envs.alfworld.engine import State
from agentfly.envs.alfworld.oracle import plan
from agentfly.envs.alfworld.tasks import open_game as open_household
from agentfly.envs.game_page import GameServer, open_game
from agentfly.envs.pages import PageServer
from agentfly.envs.worlds import find_world, tasks_of_world
from agentfly.errors import ConfigError, WorldError
from tests.envs.serving import serving


@contextmanager
def served(name: str, task_set: str | None = None) -> Iterator[GameServer]:
    world = find_world(name)
    task = tasks_of_world(world, task_set, "test", 1, 0)[0]
    with serving(GameServer(world, task)) as server:
        yield server


def send(server: GameServer, form: dict[str, str] | None = None, **headers: str) -> tuple[int, str]:
    """What a browser gets, after the redirect that follows a form."""
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        body = None if form is None else urlencode(form)
        connection.request("GET" if form is None else "POST", "/", body=body, headers=headers)
        response = connection.getresponse()
        text = html.unescape(response.read().decode())
    finally:
        connection.close()
    return send(server) if response.status == 303 else (response.status, text)


def do(server: GameServer, **form: str) -> str:
    _, text = send(server)
    (token, *_) = re.findall(r"name=token value='([^']+)'", text)
    status, text = send(server, {"token": token, **form})
    assert status == 200, text
    return text


def test_a_household_is_played_to_its_end_and_begun_again() -> None:
    with served("alfworld", "easy_alfworld") as server:
        _, first = send(server)
        assert "Your task is to:" in first and "What is possible" in first
        commands = plan(State(open_household(server.task.fields)))
        assert commands
        assert "Nothing happens." in do(server, line="dance")
        for command in commands:
            seen = do(server, line=command)
            assert f"> {command}" in seen
        assert "The end" in seen and "alfworld_success: 1" in seen and "Do it" not in seen
        again = do(server, game="again")
        assert "The end" not in again and f"> {commands[0]}" not in again
        assert "alfworld_success: 0" in do(server, game="end")


@pytest.mark.parametrize(("name", "line", "seen"), [("search", "river", "["), ("guess", "guess 0", "higher")])
def test_other_worlds_have_a_page_too(name: str, line: str, seen: str) -> None:
    with served(name) as server:
        text = do(server, line=line)
        assert f"> {line}" in text and seen in text
        assert "The end" in do(server, line="quit")


def test_only_the_page_itself_can_act_and_only_for_this_machine() -> None:
    with served("guess") as server:
        before = list(server.log)
        assert send(server, {"token": "x", "line": "guess 3"})[0] == 403
        assert send(server, {"line": "guess 3"})[0] == 403
        assert send(server, None, Host="evil.example")[0] == 403
        assert send(server, {"token": server.token, "line": "x" * 10_000})[0] == 413
        assert server.log == before


def test_what_a_world_says_is_escaped() -> None:
    with served("guess") as server:
        server.log.append(("<b>x</b>", "<script>y</script>"))
        connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
        connection.request("GET", "/")
        raw = connection.getresponse().read().decode()
        connection.close()
    assert "&lt;script&gt;y" in raw and "<script>" not in raw and "<b>x" not in raw


def test_a_world_that_fails_is_told_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with served("guess") as server:

        def broken(line: str) -> None:
            raise WorldError("the world is gone")

        monkeypatch.setattr(server, "act", broken)
        status, text = send(server, {"token": server.token, "line": "guess 3"})
        assert status == 500 and "the world is gone" in text


def test_where_a_page_is_open_already_another_port_is_taken_or_the_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with served("guess") as other:
        taken = int(other.server_address[1])
        monkeypatch.setattr(pages, "PORT", taken)

        def make(port: int) -> GameServer:
            return GameServer(other.world, other.task, port)

        with pages.listen(make, None, "guess") as server:
            assert server.server_address[1] != taken
        with pytest.raises(ConfigError, match=f"guess cannot listen on 127.0.0.1:{taken}"):
            pages.listen(make, taken, "guess")


def test_open_serves_any_world_until_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PageServer, "serve_forever", interrupted)
    threads = threading.active_count()
    assert cli.main(["envs", "open", "alfworld", "--task-set", "easy_alfworld"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"alfworld is open at http://127\.0\.0\.1:\d+/ \(Ctrl-C closes it\)", said) and "is closed" in said
    world = find_world("guess")
    lines: list[str] = []
    open_game(world, tasks_of_world(world, None, "test", 1, 0)[0], port=0, say=lines.append)
    assert len(lines) == 2
    assert threading.active_count() <= threads + 1
