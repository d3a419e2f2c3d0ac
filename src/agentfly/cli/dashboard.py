"""The command line of the dashboard.

    agentfly view [RUNS_DIR] [--port P] [--host H] [--no-open] [--token-env NAME] [--device DEVICE]
    agentfly train ... --view        the same, as a child process of the training, until that ends (`Beside`)

A dashboard beside a training is another process: if it fails or is slow, the training does not notice. It loads models of
conversations on the CPU, so it takes no device memory from the training.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, MissingExtra
from ..net.address import url_of
from ..net.guard import token_from

if TYPE_CHECKING:
    from ..view.app import Dashboard

START_S = 60.0
"""Seconds that a dashboard beside a training may take to start."""
STOP_S = 10.0
WILDCARDS = ("0.0.0.0", "::")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `view` to the command line."""
    view = commands.add_parser("view", help="look at runs in the browser, live while they train")
    view.add_argument("folder", metavar="RUNS_DIR", nargs="?", default="runs", help="the folder of the runs (default: runs)")
    view.add_argument("--port", type=int, help="port to listen on (default: 8360, or a free one if that is in use)")
    view.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    view.add_argument("--no-open", action="store_true", help="print the address and do not open a browser")
    view.add_argument("--token-env", metavar="NAME", help="environment variable that holds the token (default: a random one)")
    view.add_argument(
        "--device", help="device of conversations (default: the CPU while a run trains, else the engine's choice)"
    )
    view.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    view.set_defaults(run=run_view)


def run_view(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    if arguments.port is not None and not 0 <= arguments.port < 1 << 16:
        raise ConfigError(f"--port is a number from 0 to 65535, not {arguments.port}")
    dashboard = make_dashboard(
        arguments.folder,
        host=arguments.host,
        port=arguments.port,
        token=token_from(arguments.token_env, "--token-env"),
        device=arguments.device,
    )
    asyncio.run(_serve(dashboard, arguments))
    return 0


def make_dashboard(folder: str | Path, **options: Any) -> Dashboard:
    """A dashboard that does not listen yet. Raises MissingExtra without starlette and uvicorn."""
    try:
        import uvicorn  # noqa: F401  the server imports it when it starts

        from ..view.app import Dashboard
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        raise MissingExtra(f"the dashboard needs {error.name!r}: pip install 'agentfly[view]'") from error
    return Dashboard(folder, **options)


async def _serve(dashboard: Dashboard, arguments: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with dashboard:
        address = shown_address(dashboard, arguments.host)
        # Of a dashboard beside a training, the training's terminal sends Ctrl-C to the trainer alone.
        signals = (signal.SIGTERM,) if arguments.beside else (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, stop.set)
        try:
            if arguments.beside:
                os.nice(5)  # the training goes first
                threading.Thread(target=_wait_for_end, args=(loop, stop), daemon=True).start()
                print(address, flush=True)
            else:
                print(f"the runs in {arguments.folder} are shown at {address} (Ctrl-C ends it)", flush=True)
                if not arguments.no_open:
                    open_browser(address)
            await stop.wait()  # the dashboard's whole life
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def _wait_for_end(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """The training holds the other end of stdin: it is closed however the training ends."""
    with contextlib.suppress(OSError, ValueError):
        while sys.stdin.buffer.read(4096):
            pass
    with contextlib.suppress(RuntimeError):  # the event loop is closed already
        loop.call_soon_threadsafe(stop.set)


def shown_address(dashboard: Dashboard, host: str) -> str:
    """The address to open. A server on all addresses is named by the machine's name."""
    if host not in WILDCARDS:
        return dashboard.address
    port = int(dashboard.url.rpartition(":")[2])
    return dashboard.address.replace(dashboard.url, url_of("http", socket.gethostname(), port), 1)


def open_browser(address: str) -> None:
    """Open the address in a graphical browser, if this session has a screen. A text browser would take the terminal."""
    has_screen = sys.platform in ("darwin", "win32") or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_screen:
        threading.Thread(target=_open, args=(address,), daemon=True).start()


def _open(address: str) -> None:
    with contextlib.suppress(webbrowser.Error, OSError):
        webbrowser.open(address)


class Beside:
    """A dashboard as a child process: `with Beside(folder, say): train()`. It never raises; `say` hears what went wrong."""

    def __init__(self, folder: str | Path, say: Callable[[str], None]) -> None:
        self._folder, self._say = Path(folder), say
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Beside:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "agentfly", "view", str(self._folder), "--beside", "--device", "cpu"]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            threading.Thread(target=self._report, args=(self._process,), daemon=True).start()
        except (OSError, RuntimeError) as error:
            self._say(f"the dashboard did not start, the training goes on: {error}")
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError, ValueError):
            if process.stdin is not None:
                process.stdin.close()  # asks it to end
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)

    def _report(self, process: subprocess.Popen[str]) -> None:
        """In a thread: tell the address, or why there is none; then read the pipes, which would fill otherwise."""
        assert process.stdout is not None
        assert process.stderr is not None
        late = threading.Timer(START_S, process.kill)
        late.daemon = True
        late.start()
        with contextlib.suppress(OSError, ValueError):
            address = process.stdout.readline().strip()
            late.cancel()
            if address:
                self._say(f"dashboard: {address}")
                for _ in process.stderr:
                    pass
                return
            lines = [line.strip() for line in process.stderr if line.strip()]
            if self._process is not None:  # else the training has ended first
                why = lines[-1].removeprefix("error: ") if lines else f"it ended with status {process.wait(STOP_S)}"
                self._say(f"the dashboard did not start, the training goes on: {why}")
