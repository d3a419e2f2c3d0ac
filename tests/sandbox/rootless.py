"""Runs the attack table as an ordinary user: `python -m tests.sandbox.rootless` prints what got through. Imports no pytest."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
USER = 54321


def as_another_user() -> subprocess.CompletedProcess[str] | None:
    """Run this file as a user that has nothing. Returns None if that user can start no new Python or not read this file."""
    for python in (sys.executable, "/usr/bin/python3"):
        drop = f"import os; os.setgroups([]); os.setresgid(*[{USER}] * 3); os.setresuid(*[{USER}] * 3); os.execv({python!r}, "
        test = f"import sys; open({__file__!r}).close(); sys.exit(sys.version_info < (3, 11))"
        can_run = f"[{python!r}, '-c', {test!r}])"
        if subprocess.run([sys.executable, "-c", drop + can_run], capture_output=True, timeout=60).returncode == 0:
            run = drop + f"[{python!r}, '-m', 'tests.sandbox.rootless'])"
            environment = {"PYTHONPATH": f"{ROOT / 'src'}", "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
            return subprocess.run(
                [sys.executable, "-c", run], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800
            )
    return None


async def attack_all(folder: str) -> None:
    """Print the name of every attack that got through."""
    from agentfly.sandbox import SandboxServer

    from .attacks import ATTACKS, PRELUDE, SMALL

    server = await SandboxServer.start(tier="namespace", limits=SMALL)
    host = {
        "secret": f"{folder}/secret.txt", "folder": folder, "victim": os.getppid(), "tcp": 1, "unix": "/x", "abstract": "x",
        "datagram": "x", "inode": 0, "fd": -1,
    }  # fmt: skip
    for attack in ATTACKS:
        session = await server.session()
        result = await session.run(f"{PRELUDE}\nHOST = {host!r}\n{attack.code}", 20)
        if "PWNED" in result.stdout or result.timed_out:
            print(attack.name, result)
        await session.close()
    await server.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        secret = Path(place, "secret.txt")
        secret.write_text("canary-5e1f")
        asyncio.run(attack_all(place))
        if secret.read_text() != "canary-5e1f":
            print("the secret was changed")
