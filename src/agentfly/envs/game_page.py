"""Any world as a web page: the task, the actions and observations so far, a line for the next action, the rewards at the end.

The page plays the same `TextGame` as `agentfly envs play`, on the event loop of the server. Forms carry a token, so a page of
another site cannot act for the player. Every text of the world is escaped.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from html import escape

from ..errors import AgentFlyError
from ..types import Task
from .pages import PageAnswer, WebPage, button, open_in_browser
from .play import HELP, STOP, TextGame
from .worlds import World, check_usable


class GamePage(WebPage):
    """One game of one task at a time; `begin` starts it anew."""

    def __init__(self, world: World, task: Task) -> None:
        self.world, self.task, self.title = world, task, world.name
        self.token = secrets.token_urlsafe(16)
        self.log: list[tuple[str, str]] = []
        """Pairs of action (empty for the opening) and observation."""
        self.scores: list[str] = []
        self.help = ""
        self._lock = asyncio.Lock()  # two requests of one browser must not play at the same time
        self._game: TextGame | None = None

    async def start(self) -> None:
        await self.begin()

    async def close(self) -> None:
        game, self._game = self._game, None
        if game is not None:
            await game.close()

    async def begin(self) -> None:
        await self.close()
        game = self._game = TextGame(self.world, self.task)
        await game.open()
        self.log, self.scores = [("", game.opening())], []
        self.help = await game.help()

    async def play_line(self, line: str) -> None:
        """Play one line, with the same words as in the terminal."""
        game = self._game
        if game is None or self.scores or not line:
            return
        if line in STOP:
            self.scores = await game.score()
            return
        if line not in HELP:
            self.log.append((line, await game.act(line)))
        if game.over:
            self.scores = await game.score()
        else:
            self.help = await game.help()

    async def show(self, cookie: str) -> PageAnswer:
        async with self._lock:
            return PageAnswer(render(self))

    async def act(self, cookie: str, form: dict[str, str]) -> PageAnswer:
        if not secrets.compare_digest(form.get("token", "").encode(), self.token.encode()):
            return PageAnswer("<p>This form is not of this game. <a href='/'>Back</a></p>", 403)
        try:
            async with self._lock:
                if form.get("game") == "again":
                    await self.begin()
                elif form.get("game") == "end":
                    await self.play_line(STOP[0])
                else:
                    await self.play_line(form.get("line", "").strip())
        except AgentFlyError as error:
            return PageAnswer(f"<p class=note>{escape(str(error))}</p><p><a href='/'>Back</a></p>", 500)
        return PageAnswer()


def open_game(world: World, task: Task, port: int | None = None, say: Callable[[str], None] = print) -> None:
    """Serve the game until Ctrl-C."""
    check_usable(world)
    open_in_browser(GamePage(world, task), world.name, port, say)


def render(page: GamePage) -> str:
    parts = []
    for number, (line, seen) in enumerate(page.log):
        parts.append(f"<p class=did>&gt; {escape(line)}</p>" if line else "")
        parts.append(f"<pre{'' if number else ' class=ask'}>{escape(seen)}</pre>")
    if page.scores:
        parts.append("<h2>The end</h2><ul>" + "".join(f"<li>{escape(row)}</li>" for row in page.scores) + "</ul>")
    else:
        parts.append(
            f"<form method=post><input type=hidden name=token value='{page.token}'>"
            "<input name=line maxlength=4000 placeholder='An action' required autofocus><button>Do it</button></form>"
            f"<details><summary>What is possible</summary><pre>{escape(page.help)}</pre></details>"
        )
    end = "" if page.scores else button(page.token, "game", "end", "End and score")
    parts.append(f"<hr><p>{button(page.token, 'game', 'again', 'Start again')}{end}</p>")
    return "".join(parts)
