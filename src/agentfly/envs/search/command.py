"""`agentfly search-server`: its arguments in, a server that runs until it is interrupted.

Loaded with every command line, so nothing but its arguments is read before it is run.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .retrieval import LocalRetriever

TOKEN_VARIABLE = "AGENTFLY_SEARCH_TOKEN"
DEFAULT_PORT = 8901
ENCODER_OPTIONS = ("max_length", "passage_prefix", "pooling", "query_prefix")


def add_command(commands: Any) -> None:
    """The command and its options."""
    parser = commands.add_parser("search-server", help="serve a corpus to many trainers over HTTP")
    parser.add_argument("--corpus", default="encyclopaedia", help="a file of passages (JSONL, .gz too), or encyclopaedia")
    parser.add_argument("--retriever", default="bm25", help="bm25, dense or hybrid")
    parser.add_argument("--model", help="dense and hybrid: the directory of an embedding model, or hashing")
    parser.add_argument("--pooling", help="how the model's tokens become one vector; left out, as its directory says")
    parser.add_argument("--query-prefix", help="what the model wants before a query, such as 'query: '")
    parser.add_argument("--passage-prefix", help="the same before a passage")
    parser.add_argument("--max-length", type=int, help="tokens of a text that the model reads")
    parser.add_argument("--host", default="127.0.0.1", help=f"another than loopback needs {TOKEN_VARIABLE}")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="0: any free one")
    parser.add_argument("--max-batch", type=int, default=64, help="queries that are ranked together")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Open the corpus (its index is made where it is missing) and serve it until interrupted."""
    import asyncio

    from ...errors import ConfigError
    from .sources import Source, open_local

    given = {name: getattr(arguments, name) for name in ENCODER_OPTIONS}
    options = tuple((name, value) for name, value in given.items() if value is not None)
    source = Source(arguments.corpus, arguments.retriever, arguments.model, options)
    if not source.local:
        raise ConfigError(f"a search server serves passages, and {arguments.corpus} is none: give a file, or encyclopaedia")
    if not 0 <= arguments.port < 1 << 16:
        raise ConfigError(f"a port is from 0 to 65535, not {arguments.port}")
    asyncio.run(_serve(open_local(source), arguments))
    return 0


async def _serve(retriever: LocalRetriever, arguments: argparse.Namespace) -> None:
    import asyncio
    import contextlib
    import os
    import signal

    from .server import SearchServer

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C is raised instead
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    token = os.environ.get(TOKEN_VARIABLE)
    server = SearchServer(retriever, host=arguments.host, port=arguments.port, token=token, max_batch=arguments.max_batch)
    async with server:
        guarded = " with a token" if token else ""
        print(f"{len(retriever.corpus):,} passages by {retriever.name} at {server.url}{guarded}", flush=True)
        await stop.wait()
    print("stopped", flush=True)
