"""`agentfly search-server`: the command line of the search server.

Every `agentfly` command imports this module, so it imports the server and the retrievers only when the command runs.
"""

from __future__ import annotations

import argparse
from typing import Any

from ..envs.search.serve.protocol import DEFAULT_PORT, TOKEN_VARIABLE

ENCODER_OPTIONS = ("max_length", "passage_prefix", "pooling", "query_prefix")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command and its options to the subparsers of the command line."""
    parser = commands.add_parser("search-server", help="serve a corpus to many trainers over HTTP")
    parser.add_argument("--corpus", default="encyclopaedia", help="a file of passages (JSONL, .gz too), or encyclopaedia")
    parser.add_argument("--retriever", default="bm25", help="bm25, dense or hybrid")
    parser.add_argument("--model", help="dense and hybrid: the directory of an embedding model, or hashing")
    parser.add_argument("--pooling", help="how token vectors become one vector; default: as the model's directory says")
    parser.add_argument("--query-prefix", help="text that the model expects before a query, such as 'query: '")
    parser.add_argument("--passage-prefix", help="the same before a passage")
    parser.add_argument("--max-length", type=int, help="tokens of a text that the model reads")
    parser.add_argument("--host", default="127.0.0.1", help=f"a host other than loopback needs {TOKEN_VARIABLE}")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0: any free port")
    parser.add_argument("--max-batch", type=int, default=64, help="queries that are ranked together")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Open the corpus, build its index if it is missing, and serve it until SIGTERM or Ctrl-C."""
    import asyncio

    from ..envs.search.sources import Source, open_local
    from ..errors import ConfigError

    given = {name: getattr(arguments, name) for name in ENCODER_OPTIONS}
    options = tuple((name, value) for name, value in given.items() if value is not None)
    source = Source(arguments.corpus, arguments.retriever, arguments.model, options)
    if not source.local:
        raise ConfigError(f"a search server serves passages, not {arguments.corpus}: give a file, or encyclopaedia")
    if not 0 <= arguments.port < 1 << 16:
        raise ConfigError(f"a port is from 0 to 65535, not {arguments.port}")
    asyncio.run(_serve(open_local(source), arguments))
    return 0


async def _serve(retriever: Any, arguments: argparse.Namespace) -> None:
    import os

    from ..envs.search.serve.server import SearchServer
    from ..net.server import serve_until_stopped

    token = os.environ.get(TOKEN_VARIABLE)
    server = SearchServer(retriever, host=arguments.host, port=arguments.port, token=token, max_batch=arguments.max_batch)
    guarded = " with a token" if token else ""
    opening = f"{len(retriever.corpus):,} passages by {retriever.name} at {{url}}{guarded}"
    await serve_until_stopped(server, lambda line: print(line, flush=True), opening)
