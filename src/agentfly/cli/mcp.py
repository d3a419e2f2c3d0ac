"""`agentfly mcp TOOLS` and `agentfly openenv TOOLS`: tools of ours, and with them an environment, for clients of others."""

from __future__ import annotations

import argparse
import sys


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options to the subparsers of the command line."""
    parser = commands.add_parser("openenv", help="serve tools and an environment to OpenEnv clients")
    _add_served(parser)
    parser.add_argument("--count", type=int, default=100, metavar="N", help="tasks of the set; a client's seed picks one")
    parser.add_argument("--port", type=int, default=8000, metavar="P", help="0: any free port")
    parser.set_defaults(run=run_openenv)

    parser = commands.add_parser("mcp", help="serve tools to MCP clients, over standard input and output or HTTP")
    _add_served(parser)
    parser.add_argument("--index", type=int, default=0, metavar="I", help="which task of the set resets the environment")
    parser.add_argument(
        "--port", type=int, metavar="P", help="serve over HTTP at /mcp (0: any free port), not over standard input"
    )
    parser.set_defaults(run=run)


def _add_served(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tools", nargs="+", metavar="TOOL", help="a name, module:name or file.py:name")
    parser.add_argument("--env", metavar="NAME", help="the environment that the tools work on, reset for a task")
    parser.add_argument("--tasks", metavar="SET", help="the tasks: a task set or a file")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond loopback a token is needed")
    parser.add_argument("--token-env", metavar="NAME", help="the variable that holds the token, which clients send as a bearer")


def run_openenv(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    import asyncio

    from ..data import load_tasks
    from ..net.guard import token_from
    from ..net.server import serve_until_stopped
    from ..outside.openenv_out import OpenEnvServer

    tasks = load_tasks(arguments.tasks, count=max(arguments.count, 1)) if arguments.tasks else []
    token = token_from(arguments.token_env, "--token-env")
    place = {"host": arguments.host, "port": arguments.port, "token": token}
    server = OpenEnvServer(arguments.tools, env=arguments.env, tasks=tasks, **place)
    opening = f"{max(len(tasks), 1)} tasks at {{url}}{' with a token' if token else ''}"
    asyncio.run(serve_until_stopped(server, lambda line: print(line, file=sys.stderr, flush=True), opening))
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Serve until the input ends, or over HTTP until SIGTERM or Ctrl-C."""
    import asyncio

    from ..data import load_tasks
    from ..errors import ConfigError
    from ..net.guard import token_from
    from ..net.server import serve_until_stopped
    from ..outside.mcp_out import PATH, ToolServer

    task = None
    if arguments.tasks:
        tasks = load_tasks(arguments.tasks, count=max(arguments.index, 0) + 1)
        if not 0 <= arguments.index < len(tasks):
            raise ConfigError(f"{arguments.tasks} has no task {arguments.index}: --index counts from 0")
        task = tasks[arguments.index]
    if arguments.port is None and (arguments.token_env or arguments.host != "127.0.0.1"):
        raise ConfigError("--host and --token-env are for HTTP: give --port too")
    server = ToolServer(arguments.tools, env=arguments.env, task=task)
    token = token_from(arguments.token_env, "--token-env")

    async def serve() -> None:
        async with server:
            if arguments.port is None:
                await server.serve_stdio()
                return
            web = server.web_server(arguments.host, arguments.port, token)
            opening = f"{len(server.tools)} tools at {{url}}{PATH}{' with a token' if token else ''}"
            await serve_until_stopped(web, lambda line: print(line, file=sys.stderr, flush=True), opening)

    asyncio.run(serve())
    return 0
