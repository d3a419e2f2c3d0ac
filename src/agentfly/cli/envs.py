"""`agentfly envs`: list the worlds, examine one, measure it, play it by hand in the terminal.

    agentfly envs [list]
    agentfly envs check NAME [--tasks FILE] [--count N]
    agentfly envs bench NAME [--instances 1,64,1024] [--seconds S] [--json PATH]
    agentfly envs play NAME [--task-set SET] [--split SPLIT] [--index I] [--seed S]
    agentfly envs serve NAME [--host H] [--port P] [--max N] [--token-env NAME] [--placement PLACE] [--option KEY=VALUE]

    agentfly check-tests DATA [--reward NAME] [--solution FIELD] [--count N] [--json]

NAME is a registered name, module:Class or file.py:Class. `envs.worlds` finds what belongs to a world.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import plugins
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..envs.worlds import World

EXAMPLE = """
    @staticmethod
    def conformance():
        return {
            "tasks": [{"seed": 1}, {"seed": 2}],                                   # rows with the fields that reset reads
            "actions": lambda rng, seen: ("open", {"number": rng.randrange(10)}),  # the next call of a random player
            "solver": lambda env, task: env.open(env.right),                       # plays a task to the full score
            "score": lambda env, task: env.score,
        }
"""
ENDED_PIPE = 141
"""The exit code that a shell reports for a program ended by SIGPIPE."""


class _Unread(Exception):
    """The output pipe is closed, as in `agentfly envs play NAME | head -3`."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `envs` and its verbs to the command line."""
    parser = commands.add_parser("envs", help="worlds: list them, check, measure or play one")
    parser.set_defaults(run=run_list, verb="list")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")

    listed = verbs.add_parser("list", help="every world: what it is, its task sets, tools and needs")
    listed.add_argument("--json", action="store_true", help="print the worlds as JSON")
    listed.set_defaults(run=run_list)

    check = _verb(verbs, "check", "examine an environment: determinism, resets, scores, leaks")
    check.add_argument(
        "--tasks", metavar="FILE", help="rows to reset it with: a file or a task set; left out: those of the class"
    )
    check.add_argument("--count", type=int, default=3, metavar="N", help="how many of these rows")
    check.set_defaults(run=run_check)

    bench = _verb(verbs, "bench", "steps per second, start-up time and memory in our pools")
    bench.add_argument("--instances", default="1,64,1024", metavar="N,N,...", help="how many are alive at once")
    bench.add_argument("--seconds", type=float, default=3.0, metavar="S", help="how long each number is measured")
    bench.add_argument("--json", metavar="PATH", help="write the figures to a file")
    bench.set_defaults(run=run_bench)

    play = _verb(verbs, "play", "play a task by hand in the terminal")
    play.add_argument("--task-set", metavar="SET", help="a task set or a file; left out: the world's own")
    play.add_argument("--split", default="train", help="split of a task set: train, validation or test")
    play.add_argument("--index", type=int, default=0, metavar="I", help="which task of it")
    play.add_argument("--seed", type=int, default=0, metavar="S", help="seed of a task set that is drawn")
    play.set_defaults(run=run_play)

    serve = _verb(verbs, "serve", "lend instances to trainers elsewhere, over HTTP")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback a token is needed")
    serve.add_argument("--port", type=int, default=8700, help="port to listen on; 0: any that is free")
    serve.add_argument("--max", type=int, default=64, metavar="N", help="instances at once")
    serve.add_argument("--token-env", metavar="NAME", help="environment variable that holds the token clients must show")
    serve.add_argument("--placement", metavar="PLACE", help="where instances live: loop, thread, process or sandbox")
    serve.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the environment; may be repeated"
    )
    serve.set_defaults(run=run_serve)


def _verb(verbs: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text)
    parser.add_argument("name", nargs="?", help="a world's name, module:Class or file.py:Class")
    return parser


def _name(arguments: argparse.Namespace) -> str:
    if arguments.name is None:
        names = ", ".join(plugins.names("envs"))
        raise ConfigError(f"agentfly envs {arguments.verb} needs a name: {names}, or module:Class")
    return str(arguments.name)


def _world(arguments: argparse.Namespace) -> World:
    from ..envs.worlds import find_world

    return find_world(_name(arguments))


def run_list(arguments: argparse.Namespace) -> int:
    from ..envs.worlds import describe_world

    worlds = [describe_world(name) for name in plugins.names("envs")]
    if getattr(arguments, "json", False):
        worlds_json = [
            {"name": w.name, "summary": w.summary, "tasks": list(w.tasks), "tools": list(w.tools), "needs": w.needs,
             "problem": w.problem}
            for w in worlds
        ]  # fmt: skip
        print(json.dumps(worlds_json, indent=1, default=str))
        return 0
    width = max((len(world.name) for world in worlds), default=0)
    for world in worlds:
        print(f"{world.name:<{width}}  {world.summary or f'({world.problem})'}")
        rows = [("tasks", ", ".join(world.tasks)), ("tools", ", ".join(world.tools)), ("needs", world.needs)]
        if world.summary and world.problem:
            rows.append(("missing", world.problem))
        for label, text in rows:
            if text:
                print(f"{'':<{width}}    {label}: {text}")
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Run `check_env`. The class may say how to play it in `conformance()`."""
    from ..data import is_file_name, load_tasks, read_rows
    from ..envs.check import check_env
    from ..envs.worlds import as_tasks, check_usable

    world = _world(arguments)
    check_usable(world)
    settings = world.conformance()
    accepted = list(inspect.signature(check_env).parameters)[1:]
    if unknown := [name for name in settings if name not in accepted]:
        raise ConfigError(
            f"{world.name}: conformance() returns {unknown[0]!r}, which check_env does not take: it takes {', '.join(accepted)}"
        )
    if arguments.tasks is not None:
        rows = read_rows(arguments.tasks)[: arguments.count] if is_file_name(arguments.tasks) else []
        bare = rows and not any({"question", "messages"} & set(row) for row in rows)  # an environment needs no question
        settings["tasks"] = as_tasks(rows) if bare else load_tasks(arguments.tasks, split="train", count=arguments.count)
    report = check_env(arguments.name, **settings)
    print(report)
    if missing := [name for name in ("tasks", "actions", "solver") if name not in settings]:
        print(
            f"\nTo check more, say {' and '.join(missing)} in a static method `conformance()` of "
            f"{world.name.rpartition(':')[2]}; it returns the arguments of `agentfly.check_env`, as in\n{EXAMPLE}"
        )
    return 0 if report.ok else 1


def run_bench(arguments: argparse.Namespace) -> int:
    from ..envs.bench import HEADER, bench_world

    world = _world(arguments)
    try:
        numbers = [int(word) for word in arguments.instances.split(",")]
    except ValueError:
        raise ConfigError(f"--instances takes whole numbers such as 1,64,1024, not {arguments.instances!r}") from None
    rows, printed = [], False
    for figures in bench_world(world.name, numbers, seconds=arguments.seconds):
        if not printed:
            print(HEADER)
            printed = True
        print(figures, flush=True)
        rows.append(figures)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([row.to_dict() for row in rows], indent=1) + "\n")
    return 1 if any(row.error for row in rows) else 0


def _task(arguments: argparse.Namespace, world: World) -> Any:
    from ..envs.task_sets import CountError
    from ..envs.worlds import check_usable, tasks_of_world

    check_usable(world)
    index: int = arguments.index
    if index < 0:
        raise ConfigError(f"--index counts from 0, not {index}")
    drawn = arguments.task_set is None or not Path(arguments.task_set).suffix
    try:
        tasks = tasks_of_world(world, arguments.task_set, arguments.split, index + 1 if drawn else None, arguments.seed)
    except CountError as error:
        raise ConfigError(f"--index {index}: there are only {error.most or 0:,} such tasks, counted from 0") from error
    if index >= len(tasks):
        raise ConfigError(f"--index {index}: there are only {len(tasks):,} such tasks, counted from 0")
    return tasks[index]


def run_play(arguments: argparse.Namespace) -> int:
    from ..envs.play import play

    def ask(prompt: str) -> str:
        try:
            return input(prompt)
        except EOFError:
            say("")  # end the line of the prompt
            raise
        except BrokenPipeError as error:
            raise _Unread from error

    def say(text: str) -> None:
        try:
            print(text, flush=True)
        except BrokenPipeError as error:
            raise _Unread from error

    world = _world(arguments)
    task = _task(arguments, world)
    try:
        play(world, task, ask, say)
    except _Unread:
        # The rest of the buffer goes to /dev/null; otherwise flushing at exit would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ENDED_PIPE
    return 0


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve one kind of environment to trainers elsewhere, until Ctrl-C."""
    import asyncio

    from ..net.guard import token_from
    from ..net.server import serve_until_stopped
    from ..resources.rpc.env_server import EnvServer

    server = EnvServer(
        _name(arguments),
        host=arguments.host,
        port=arguments.port,
        most=arguments.max,
        token=token_from(arguments.token_env, "--token-env"),
        placement=arguments.placement,
        options=read_options(arguments.option),
    )
    asyncio.run(serve_until_stopped(server, lambda text: print(text, flush=True), server.opening))
    return 0


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """`key=value` words as a dict. Values are read as in the overrides of a config."""
    from ..config import parse_override

    for word in words:
        if "=" not in word or not word.partition("=")[0].isidentifier():
            raise ConfigError(f"--option takes key=value, not {word!r}")
    return dict(map(parse_override, words))


def add_check_tests(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `check-tests` to the command line."""
    parser = commands.add_parser("check-tests", help="list the rows that their own solution does not pass, or that cheats pass")
    parser.add_argument("data", metavar="DATA", help="a file, a task set, or a file in the shape of MBPP, HumanEval or GSM8K")
    parser.add_argument(
        "--reward", metavar="NAME", help="the reward; default: unit_tests for rows with tests, else code_answer"
    )
    parser.add_argument("--solution", default="solution", metavar="FIELD", help="the field with a row's own solution")
    parser.add_argument("--count", type=int, metavar="N", help="check only the first N rows")
    parser.add_argument("--json", action="store_true", help="print the rows with a problem as JSON")
    parser.set_defaults(run=run_check_tests)


def run_check_tests(arguments: argparse.Namespace) -> int:
    """Print the rows with a problem. Returns 1 if a row cannot be scored or passed, or is paid for nothing."""
    import asyncio
    from dataclasses import asdict

    from ..envs.code.check_tests import check_rows, read_data
    from ..rewards import as_reward

    tasks = read_data(arguments.data, arguments.count)
    reward = None if arguments.reward is None else as_reward(arguments.reward)
    if reward is not None:
        reward.check({name for task in tasks for name in task.fields})
        if reward.grouped:
            raise ConfigError(f"reward {reward.name!r} compares the chains of a group, and a row is scored alone: name another")
    reports = asyncio.run(check_rows(tasks, reward, arguments.solution))
    faulty = [report for report in reports if report.lines]
    broken = sum(report.broken for report in reports)
    if arguments.json:
        print(json.dumps({"rows": len(tasks), "faulty": [asdict(report) for report in faulty]}, indent=1))
        return int(broken > 0)
    for report in faulty:
        print("\n".join(report.lines))
    unknown = sum(report.own is None and not report.error for report in reports)
    print(f"{len(tasks)} rows: {broken} broken or free, {len(faulty) - broken} with weak tests, {unknown} without a solution")
    return int(broken > 0)
