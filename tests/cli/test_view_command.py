"""`agentfly view` and `agentfly train --view`: addresses, the browser, and a dashboard that never harms a training."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

pytest.importorskip("starlette", reason="Starlette is not installed: pip install 'agentfly[serve]'")

from agentfly.cli import dashboard as command
from agentfly.cli import main
from agentfly.cli.dashboard import Beside, open_browser

from ..view.stored import make_run

DEADLINE_S = 120.0


class Heard:
    """Collects sentences and waits for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._new = threading.Event()

    def __call__(self, text: str) -> None:
        self.lines.append(text)
        self._new.set()

    def first(self) -> str:
        assert self._new.wait(DEADLINE_S)
        return self.lines[0]


def until_ended(process: subprocess.Popen[str]) -> int:
    return process.wait(DEADLINE_S)


def test_the_command_serves_until_it_is_stopped(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one")
    arguments = [sys.executable, "-m", "agentfly", "view", str(tmp_path / "runs"), "--no-open", "--port", "0"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = next(word for word in line.split() if word.startswith("http://"))
        parts = urlsplit(address)
        assert parts.hostname == "127.0.0.1"
        token = parse_qs(parts.query)["token"][0]
        url = f"http://127.0.0.1:{parts.port}/api/runs"
        assert httpx.get(url, trust_env=False).status_code == 401
        found = httpx.get(url, headers={"Authorization": f"Bearer {token}"}, trust_env=False).json()
        assert [run["name"] for run in found] == ["one"]
        process.terminate()
        assert until_ended(process) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_dashboard_beside_a_training_tells_its_address_and_ends_with_it(tmp_path: Path) -> None:
    heard = Heard()
    with Beside(tmp_path / "runs", heard) as beside:
        process = beside._process
        assert process is not None
        address = heard.first().removeprefix("dashboard: ")
        parts = urlsplit(address)
        token = parse_qs(parts.query)["token"][0]
        headers = {"Authorization": f"Bearer {token}"}
        url = f"http://127.0.0.1:{parts.port}/api/runs"
        assert httpx.get(url, headers=headers, trust_env=False).json() == []
        make_run(tmp_path / "runs" / "one")
        ends = time.monotonic() + DEADLINE_S
        while not httpx.get(url, headers=headers, trust_env=False).json():
            assert time.monotonic() < ends
        assert os.getsid(process.pid) != os.getsid(0)  # Ctrl-C in the terminal does not reach it
    assert process.poll() == 0
    assert len(heard.lines) == 1


def test_a_killed_training_takes_its_dashboard_along(tmp_path: Path) -> None:
    """The dashboard reads the end of a pipe that the training holds: nothing has to be done when it dies."""
    code = (
        "import sys, time; from agentfly.cli.dashboard import Beside\n"
        "with Beside(sys.argv[1], lambda text: print(text, beside._process.pid, flush=True)) as beside: time.sleep(600)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "runs")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        pid = int(training.stdout.readline().split()[-1])
        os.kill(pid, 0)
        training.kill()
    ends = time.monotonic() + DEADLINE_S
    while is_alive(pid):
        assert time.monotonic() < ends
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize("program", ["/nowhere/python", "/bin/false"])
def test_a_dashboard_that_fails_does_not_harm_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(command.sys, "executable", program)
    heard = Heard()
    with Beside(tmp_path / "runs", heard):
        assert heard.first().startswith("the dashboard did not start, the training goes on")
    (tmp_path / "file").write_text("")
    with Beside(tmp_path / "file" / "runs", heard):
        assert "goes on" in heard.lines[-1]


def test_train_view_starts_it_around_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Recorded:
        def __init__(self, folder: Path, say: Any) -> None:
            order.append(str(folder))

        def __enter__(self) -> None:
            order.append("start")

        def __exit__(self, *_: object) -> None:
            order.append("end")

    def train(*_: object, **__: object) -> None:
        order.append("train")
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "Beside", Recorded)
    monkeypatch.setattr("agentfly.api.train", train)
    assert main(["train", "quickstart", f"run.dir={tmp_path}", "--view"]) == 130
    assert order == [str(tmp_path), "start", "train", "end"]
    order.clear()
    assert main(["train", "quickstart", f"run.dir={tmp_path}"]) == 130
    assert order == ["train"]


def test_view_of_a_dry_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--view", "--dry-run"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/nowhere/runs"], "there is no folder"),
        (["--port", "70000"], "--port"),
        (["--token-env", "AGENTFLY_NO_SUCH_TOKEN"], "AGENTFLY_NO_SUCH_TOKEN"),
        (["--host", "203.0.113.1", "--port", "1"], "cannot listen"),
    ],
)
def test_a_mistake_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert main(["view", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_missing_package_names_its_cure(tmp_path: Path) -> None:
    for package in ("starlette", "uvicorn"):
        code = (
            f"import sys; sys.modules[{package!r}] = None; from agentfly.cli import main; sys.exit(main(['view', sys.argv[1]]))"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "pip install 'agentfly[view]'" in done.stderr


def test_the_browser_is_opened_only_where_there_is_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Heard()
    monkeypatch.setattr(command.webbrowser, "open", opened)
    monkeypatch.setattr(command.sys, "platform", "linux")
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    open_browser("http://one")
    monkeypatch.setenv("DISPLAY", ":0")
    open_browser("http://two")
    assert opened.first() == "http://two"


def test_a_server_on_all_addresses_is_named_by_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        url = "http://0.0.0.0:8360"
        address = "http://0.0.0.0:8360/?token=abc"

    monkeypatch.setattr(command.socket, "gethostname", lambda: "gpu-7")
    assert command.shown_address(Fake(), "0.0.0.0") == "http://gpu-7:8360/?token=abc"  # type: ignore[arg-type]
    assert command.shown_address(Fake(), "127.0.0.1") == Fake.address  # type: ignore[arg-type]


def test_the_option_for_the_training_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    with pytest.raises(SystemExit):
        parser.parse_args(["view", "--help"])
    shown = capsys.readouterr().out
    assert "--no-open" in shown
    assert "--beside" not in shown
