"""Any world as a web page: the task, what was done and seen so far, a line for the next action, and the rewards at the end.

In: a world and a task. Out: a page on loopback where one person plays it, by the words of `agentfly envs play`: the same game,
record and rewards. The game lives in an event loop of its own; forms carry a token, so no other site can act for the player.
Every text of the world is escaped.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Callable, Coroutine
from html import escape
from typing import Any, TypeVar

from ..errors import AgentFlyError
from ..types import Task
from .pages import HOST, PageHandler, PageServer, button, listen, serve
from .play import HELP, STOP, Game
from .worlds import World, check_usable

T = TypeVar("T")


class GameServer(PageServer):
    """One game of one task at a time; `begin` starts it anew."""

    def __init__(self, world: World, task: Task, port: int = 0) -> None:
        self.world, self.task, self.title = world, task, world.name
        self.token = secrets.token_urlsafe(16)
        self.lock = threading.Lock()
        self.log: list[tuple[str, str]] = []
        """What was done (nothing at first), and what came back."""
        self.scores: list[str] = []
        self.help = ""
        self._game: Game | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="game", daemon=True)
        self._thread.start()
        super().__init__((HOST, port), _Handler)  # closes itself where it cannot listen
        try:
            self.begin()
        except BaseException:
            self.server_close()
            raise

    def begin(self) -> None:
        self._end()
        game = self._game = Game(self.world, self.task)
        self._run(game.open())
        self.log, self.scores = [("", game.opening())], []
        self.help = self._run(game.help())

    def act(self, line: str) -> None:
        """One line, as in the terminal."""
        game = self._game
        if game is None or self.scores or not line:
            return
        if line in STOP:
            self.scores = self._run(game.score())
            return
        if line not in HELP:
            self.log.append((line, self._run(game.act(line))))
        if game.over:
            self.scores = self._run(game.score())
        else:
            self.help = self._run(game.help())

    def server_close(self) -> None:
        super().server_close()
        try:
            self._end()
        finally:
            self._stop()

    def _end(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            self._run(game.close())

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """What a game does carries deadlines of its own: its tools', its rewards' and those of its pool."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class _Handler(PageHandler):
    server: GameServer

    def show(self) -> None:
        with self.server.lock:
            body = render(self.server)
        self.send_page(200, body)

    def act(self, sent: dict[str, str]) -> None:
        server = self.server
        if not secrets.compare_digest(sent.get("token", "").encode(), server.token.encode()):
            self.send_page(403, "<p>This form is not of this game. <a href='/'>Back</a></p>")
            return
        try:
            with server.lock:
                if sent.get("game") == "again":
                    server.begin()
                elif sent.get("game") == "end":
                    server.act(STOP[0])
                else:
                    server.act(sent.get("line", "").strip())
        except AgentFlyError as error:
            self.send_page(500, f"<p class=note>{escape(str(error))}</p><p><a href='/'>Back</a></p>")
            return
        self.send_back()


def open_game(world: World, task: Task, port: int | None = None, say: Callable[[str], None] = print) -> None:
    """Serve the game until Ctrl-C."""
    check_usable(world)
    with listen(lambda port: GameServer(world, task, port), port, world.name) as server:
        serve(server, world.name, say)


def render(server: GameServer) -> str:
    parts = []
    for number, (line, seen) in enumerate(server.log):
        parts.append(f"<p class=did>&gt; {escape(line)}</p>" if line else "")
        parts.append(f"<pre{'' if number else ' class=ask'}>{escape(seen)}</pre>")
    if server.scores:
        parts.append("<h2>The end</h2><ul>" + "".join(f"<li>{escape(row)}</li>" for row in server.scores) + "</ul>")
    else:
        parts.append(
            f"<form method=post><input type=hidden name=token value='{server.token}'>"
            "<input name=line maxlength=4000 placeholder='An action' required autofocus><button>Do it</button></form>"
            f"<details><summary>What is possible</summary><pre>{escape(server.help)}</pre></details>"
        )
    end = "" if server.scores else button(server.token, "game", "end", "End and score")
    parts.append(f"<hr><p>{button(server.token, 'game', 'again', 'Start again')}{end}</p>")
    return "".join(parts)
