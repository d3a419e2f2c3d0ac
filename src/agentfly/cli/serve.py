"""`agentfly serve`: a model, or a trained agent with its tools, behind the protocols of OpenAI and Anthropic.

    agentfly serve CHECKPOINT|RUN|MODEL [key=value ...] [--agent] [--recipe R] [--name NAME] [--key KEY] [--host H] [--port P]

Without --agent a request is one reply of the model. With it, the agent plays a chain with its own tools and environment, and
the reply is its final answer.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..agents import BaseAgent
    from ..config import Config
    from ..endpoint.calls import Answerer

DEFAULT_PORT = 8370
KEY_VARIABLE = "AGENTFLY_KEY"
MAX_IN_FLIGHT = 4096
READS = ("agent.", "sampling.", "resources.", "run.threads")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the command line."""
    serve = commands.add_parser("serve", help="serve a checkpoint or a model to clients of OpenAI and Anthropic")
    serve.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint, a run folder (its newest one) or a model's name")
    serve.add_argument("overrides", metavar="key=value", nargs="*", help="set config keys: sampling.temperature=0")
    serve.add_argument("--agent", action="store_true", help="serve the agent with its tools: a reply is its final answer")
    serve.add_argument("--recipe", metavar="R", help="the config file or recipe of the agent (default: that of the run)")
    serve.add_argument("--name", help="the model's name in answers (default: that of the checkpoint's run, or of the model)")
    serve.add_argument(
        "--key", action="append", metavar="KEY", help=f"a key that clients must send (default: {KEY_VARIABLE}, or a random one)"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    serve.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"port to listen on (default: {DEFAULT_PORT}; 0: any)")
    serve.set_defaults(run=run_serve)


def run_serve(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    import asyncio

    if not 0 <= arguments.port < 1 << 16:
        raise ConfigError(f"--port is a number from 0 to 65535, not {arguments.port}")
    for override in arguments.overrides:
        if not override.startswith(READS):
            raise ConfigError(f"agentfly serve does not use the config key {override.partition('=')[0]}; remove it")
    keys = given_keys(arguments.key)
    config, is_described = config_of(arguments)
    if config.run.threads is not None:
        from ..learn.model.storage import set_threads

        set_threads(config.run.threads)
    asyncio.run(_serve(config, keys, arguments, is_described))
    return 0


def given_keys(words: Sequence[str] | None) -> list[str]:
    """The keys of the command line, else of the environment; none if there are none. Raises ConfigError."""
    from ..net.guard import check_token

    keys = list(words or filter(None, [os.environ.get(KEY_VARIABLE)]))
    for key in keys:
        check_token(key, "a key")
    return keys


def config_of(arguments: argparse.Namespace) -> tuple[Config, bool]:
    """The config to serve with, and whether a run or a recipe describes it. A model alone is served with the defaults."""
    from ..build import checkpoint_config, run_of
    from ..config import Config

    if arguments.recipe is not None or run_of(arguments.checkpoint) is not None:
        return checkpoint_config(arguments.checkpoint, arguments.recipe, arguments.overrides), True
    if arguments.agent:
        raise ConfigError(f"{arguments.checkpoint} is not a checkpoint of a run: --recipe says which agent to serve with it")
    config = Config.load(None, arguments.overrides)
    described = any(word.startswith("sampling.max_tokens=") for word in arguments.overrides)
    return replace(config, agent=replace(config.agent, model=arguments.checkpoint)), described


async def _serve(config: Config, keys: Sequence[str], arguments: argparse.Namespace, is_described: bool) -> None:
    from ..build import build_agent
    from ..endpoint.server import EndpointServer, Keys
    from ..net.guard import Guard
    from ..net.server import serve_until_stopped

    agent = build_agent(config)
    try:
        async with _answerer(agent, config, arguments.agent, is_described) as answerer:
            known = Keys()
            opened = [known.open(answerer, key) for key in keys] or [known.open(answerer)]
            name = arguments.name or name_of(arguments.checkpoint)
            guard = Guard(arguments.host, keyed=True)
            server = EndpointServer(
                known, model=name, host=arguments.host, port=arguments.port, guard=guard, max_in_flight=MAX_IN_FLIGHT
            )
            what = f"{type(agent).__name__} with the tools {', '.join(agent.tools) or 'none'}" if arguments.agent else name
            told = "" if keys else f"\nkey: {opened[0]}"
            opening = f"{what} at {{url}}/v1 for clients of OpenAI, {{url}} for those of Anthropic{told}"
            await serve_until_stopped(server, lambda line: print(line, flush=True), opening)
    finally:
        await agent.close()


@asynccontextmanager
async def _answerer(agent: BaseAgent, config: Config, plays: bool, is_described: bool) -> AsyncIterator[Answerer]:
    from ..endpoint.model import ModelAnswerer

    if plays:
        from ..endpoint.agent import open_agent

        async with open_agent(agent, config.sampling) as answerer:
            yield answerer
        return
    yield ModelAnswerer(
        agent.engine, agent.renderer, config.sampling, max_context=config.agent.max_context, fills_context=not is_described
    )


def name_of(checkpoint: str) -> str:
    """The name of a model in answers: its run's, or the last part of its path."""
    from ..build import run_of

    run = run_of(checkpoint)
    if run is not None:
        return run.resolve().name
    return Path(checkpoint.removeprefix("openai:").partition("@")[0]).name or checkpoint
