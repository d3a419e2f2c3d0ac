"""Any world as a web page: a person plays it by a line at a time, sees the rewards, and cannot be made to act by others."""

from __future__ import annotations

import html
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from urllib.parse import urlencode

import pytest

from agentfly.envs import pages
from agentfly.envs.alfworld.engine import State
from agentfly.envs.alfworld.oracle import plan
from agentfly.envs.alfworld.tasks import open_game as open_household
from agentfly.envs.game_page import GamePage, open_game
from agentfly.envs.worlds import find_world, tasks_of_world
from agentfly.errors import ConfigError, MissingExtra, WorldError
from tests.envs.serving import Interrupting, Served, serving


@contextmanager
def served(name: str, task_set: str | None = None) -> Iterator[Served[GamePage]]:
    world = find_world(name)
    task = tasks_of_world(world, task_set, "test", 1, 0)[0]
    with serving(lambda: GamePage(world, task)) as server:
        yield server


def send(server: Served[GamePage], form: dict[str, str] | None = None, **headers: str) -> tuple[int, str]:
    """What a browser gets, after the redirect that follows a form."""
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        body = None if form is None else urlencode(form)
        connection.request("GET" if form is None else "POST", "/", body=body, headers=headers)
        response = connection.getresponse()
        text = html.unescape(response.read().decode())
    finally:
        connection.close()
    return send(server) if response.status == 303 else (response.status, text)


def do(server: Served[GamePage], **form: str) -> str:
    _, text = send(server)
    (token, *_) = re.findall(r"name=token value='([^']+)'", text)
    status, text = send(server, {"token": token, **form})
    assert status == 200, text
    return text


def test_a_household_is_played_to_its_end_and_begun_again() -> None:
    with served("alfworld", "easy_alfworld") as server:
        _, first = send(server)
        assert "Your task is to:" in first and "What is possible" in first
        commands = plan(State(open_household(server.page.task.fields)))
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
        before = list(server.page.log)
        assert send(server, {"token": "x", "line": "guess 3"})[0] == 403
        assert send(server, {"line": "guess 3"})[0] == 403
        assert send(server, None, Host="evil.example")[0] == 403
        assert send(server, {"token": server.page.token, "line": "x" * 10_000})[0] == 413
        assert server.page.log == before


def test_what_a_world_says_is_escaped() -> None:
    with served("guess") as server:
        server.page.log.append(("<b>x</b>", "<script>y</script>"))
        connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("GET", "/")
        raw = connection.getresponse().read().decode()
        connection.close()
    assert "&lt;script&gt;y" in raw and "<script>" not in raw and "<b>x" not in raw


def test_a_world_that_fails_is_told_on_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with served("guess") as server:

        async def broken(line: str) -> None:
            raise WorldError("the world is gone")

        monkeypatch.setattr(server.page, "play_line", broken)
        status, text = send(server, {"token": server.page.token, "line": "guess 3"})
        assert status == 500 and "the world is gone" in text


def test_where_a_page_is_open_already_another_port_is_taken_or_the_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with served("guess") as other:
        monkeypatch.setattr(pages, "PORT", other.port)
        said = Interrupting()
        open_game(other.page.world, other.page.task, say=said)
        (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/ ", said[0])
        assert int(port) != other.port
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{other.port}"):
            open_game(other.page.world, other.page.task, port=other.port, say=said)


def test_the_pages_own_form_may_post_and_a_form_of_another_origin_may_not() -> None:
    with served("guess") as server:
        form = {"token": server.page.token, "line": "guess 0"}
        own = f"http://127.0.0.1:{server.port}"
        assert send(server, form, Origin="http://evil.example")[0] == 403
        assert send(server, form, Origin="null")[0] == 403
        assert send(server, form, Origin=own)[0] == 200
        assert [line for line, _ in server.page.log] == ["", "guess 0"]
    # With "no-referrer" browsers send "Origin: null" even for the page's own forms.
    assert pages.HEADERS["Referrer-Policy"] == "same-origin"


def test_open_game_serves_until_interrupted() -> None:
    world, said = find_world("guess"), Interrupting()
    threads = threading.active_count()
    open_game(world, tasks_of_world(world, None, "test", 1, 0)[0], port=0, say=said)
    assert said[-1] == "guess is closed" and len(said) == 2
    assert threading.active_count() <= threads + 1


def test_the_command_opens_a_page_for_any_world_and_ctrl_c_closes_it() -> None:
    command = [sys.executable, "-m", "agentfly", "envs", "open", "alfworld", "--task-set", "easy_alfworld"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, problems = process.communicate(timeout=60)
    assert re.search(r"alfworld is open at http://127\.0\.0\.1:\d+/ \(Ctrl-C closes it\)", said), problems
    assert "alfworld is closed" in rest
    assert process.returncode == 0


def test_a_missing_web_server_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    world = find_world("guess")
    with pytest.raises(MissingExtra, match=r"agentfly\[serve\]"):
        open_game(world, tasks_of_world(world, None, "test", 1, 0)[0], say=Interrupting())
