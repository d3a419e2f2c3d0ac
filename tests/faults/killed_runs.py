"""Trains the same miniature run twice: undisturbed, and killed again and again. Prints what happened as JSON.

Run as `python -m tests.faults.killed_runs FOLDER SEED`. One process imports everything once; each attempt is a fork of it,
which runs the command line and kills itself. The signal is sent when a phase of the run is entered for the n-th time, or a
random moment later. An attempt after the first resumes if there is a step to resume from, else it repeats the command.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import ROWS, sample_in_float64, save_tiny_model

STEPS = 48
NEVER = ("", signal.SIGKILL, 0, 0.0)
Kill = tuple[str, signal.Signals, int, float]


def phases() -> dict[str, tuple[Any, str]]:
    """Where each phase begins: the object and the name of the function to enter."""
    from agentfly.engines.local.engine import LocalEngine
    from agentfly.learn.learner import PolicyLearner
    from agentfly.runs import Recorder, RunStore
    from agentfly.runs import checkpoints as checkpoint
    from agentfly.training import saving, start
    from agentfly.training.loop import Trainer

    return {
        "rollout": (Trainer, "_collect"),
        "learn": (PolicyLearner, "update"),
        "publish": (LocalEngine, "publish"),
        "trajectories": (RunStore, "add_trajectories"),
        "metrics": (RunStore, "add_metrics"),
        "record": (Recorder, "log"),
        "validate": (Trainer, "_validate"),
        "between": (Trainer, "_step"),
        "save": (saving, "write_checkpoint"),
        "seal": (checkpoint, "_seal"),
        "rename": (checkpoint, "_put"),
        "rotate": (checkpoint, "discard"),
        "resume": (start, "resume"),
        "truncate": (RunStore, "truncate_after"),
    }


def plan(seed: int) -> list[Kill]:
    """Twenty kills: every phase at least once, both signals, some at once and some a little later."""
    draw = random.Random(seed)
    names = list(phases())
    chosen = names + draw.sample([name for name in names if name not in ("resume", "truncate")], 20 - len(names))
    draw.shuffle(chosen)
    if chosen[0] in ("resume", "rotate"):  # the first attempt has nothing to resume or rotate
        chosen.append(chosen.pop(0))
    kills = []
    for index, name in enumerate(chosen):
        number = signal.SIGTERM if index % 3 == 2 else signal.SIGKILL
        once = name in ("resume", "truncate", "validate", "rotate")
        kills.append((name, number, 1 if once else draw.randint(1, 3), draw.choice((0.0, draw.uniform(0.0, 0.03)))))
    return kills


def arm(kill: Kill) -> None:
    """Make this process send itself the signal when it comes to the phase."""
    name, number, entries, delay_s = kill
    if not name:
        return
    owner, attribute = phases()[name]
    original: Callable[..., Any] = getattr(owner, attribute)
    left = [entries]

    def entered(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            if delay_s:
                hold_next_step()
                threading.Timer(delay_s, os.kill, (os.getpid(), number)).start()
            else:
                os.kill(os.getpid(), number)
        return original(*args, **options)

    setattr(owner, attribute, entered)


def hold_next_step() -> None:
    """The chains of the next step wait for the signal: how many steps a run makes before it depends on the machine."""
    from agentfly.training.loop import Trainer

    async def wait(self: Trainer, step: int) -> Any:
        await asyncio.Event().wait()

    Trainer._collect = wait  # type: ignore[method-assign]


def attempt(config: Path, run: Path, kill: Kill, log: Path) -> int:
    """Returns the exit status of the command line in a forked process; a signal is negative."""
    from agentfly.runs import RunDirectory

    resumes = any(RunDirectory(run).saved_steps())
    command = ["train", "--resume", str(run)] if resumes else ["train", str(config), f"run.name={run.name}"]
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 99
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        import torch

        from agentfly.cli import main

        # A fork renews torch's thread pool at its first use. The threads that load a model in float64 would do it at once, and
        # fail with "Invalid thread pool!".
        torch.set_num_threads(1)
        arm(kill)
        status = main(command)
    finally:
        sys.stdout.flush()
        os._exit(status)


def main(folder: Path, seed: int) -> None:
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401 - imported once, not by every fork

    import agentfly.api  # noqa: F401
    from agentfly.runs.checkpoints import find_checkpoint

    torch.set_num_threads(1)
    sample_in_float64(pytest.MonkeyPatch())
    model = save_tiny_model(folder / "model")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    config = folder / "run.toml"
    config.write_text(
        f'[agent]\nkind = "tests.tiny:TwoTurns"\nmodel = "{model}"\ntools = ["tests.tiny:look"]\nreward = "tests.tiny:even"\n'
        f'max_turns = 2\n[sampling]\nmax_tokens = 6\n[data]\ntrain = "{folder}/rows.json"\nvalidation_count = 2\n'
        f"[rollout]\nnum_tasks = 2\nnum_chains = 2\n[train]\nsteps = {STEPS}\nlr = 1e-2\nsave_every = 2\nvalidate_every = 4\n"
        f'[run]\ndir = "{folder}"\nthreads = 1\n'
    )
    whole = attempt(config, folder / "whole", NEVER, folder / "whole.log")
    report = []
    for number, kill in enumerate(plan(seed)):
        log = folder / f"killed-{number}.log"
        status = attempt(config, folder / "killed", kill, log)
        broken = find_checkpoint(folder / "killed" / "checkpoints")[1]
        report.append([*kill, status, log.read_text(), [path.name for path in broken]])
    end = attempt(config, folder / "killed", NEVER, folder / "end.log")
    print(json.dumps({"whole": whole, "end": end, "kills": report}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
