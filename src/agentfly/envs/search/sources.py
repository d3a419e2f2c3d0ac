"""Sources: what an environment searches, and the open retriever for it.

    "encyclopaedia"          the invented encyclopaedia; "encyclopaedia:7" is that of another seed
    "easy_search"            the small world for small models
    "path/passages.jsonl"    a file of passages, also gzipped
    "http://host:port"       a search server
    "web:serper"             a web search provider: serper, tavily, brave or searxng

All environments of a process share one retriever per source. A local retriever stays open; a server's or provider's
connections are closed with the last environment that uses them. Each source is opened, and its index built, in a separate
thread: neither the event loop nor other sources wait for it, and it continues if its callers are cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .retrieve.types import Corpus, LocalRetriever, Retriever

log = logging.getLogger(__name__)
RETRIEVERS = ("bm25", "dense", "hybrid")
GENERATED = ("encyclopaedia", "easy_search")
MAX_OPEN = 16
"""Local retrievers that stay open; the oldest is dropped first."""
WARN_AFTER_S = 5.0
"""A wait for an index is logged after this time."""


@dataclass(frozen=True, slots=True)
class Source:
    """A description of what is searched. `retriever` and `model` are for local passages.

    `options` go to the encoder of a local source, to the client of a server, or to the provider. Raises ConfigError if the
    parts do not fit together.
    """

    where: str
    retriever: str = "bm25"
    model: str | None = None
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __post_init__(self) -> None:
        if self.retriever not in RETRIEVERS:
            raise ConfigError(f"no retriever is called {self.retriever!r}; there are {', '.join(RETRIEVERS)}")
        if not self.local and (self.retriever != "bm25" or self.model):
            raise ConfigError(f"{self.where} does its own ranking: leave out `retriever` and `model`")
        if self.retriever == "bm25" and self.model:
            raise ConfigError("bm25 has no model: leave it out, or use the retriever 'dense' or 'hybrid'")
        if self.retriever == "bm25" and self.local and self.options:
            raise ConfigError(f"bm25 has no option {self.options[0][0]!r}")
        for name, value in self.options:
            if not isinstance(value, str | int | float | bool | None):
                raise ConfigError(f"the option {name!r} of {self.where} is a text or a number, not {value!r}")
        if not self.where:
            raise ConfigError("nothing to search: name a corpus, a file of passages, a server or a provider")

    @property
    def local(self) -> bool:
        """Whether passages are ranked in this process."""
        return not self.where.startswith(("http://", "https://", "web:"))


_local: dict[Source, LocalRetriever] = {}
_corpora: dict[str, Corpus] = {}
_opening: dict[Source, Future[LocalRetriever]] = {}
_lock = threading.Lock()
"""Guards `_local` and `_opening`. It is never held while a source is opened."""
_remote: dict[tuple[asyncio.AbstractEventLoop, Source], tuple[Retriever, int]] = {}
"""Clients by event loop, with the number of environments that use them."""


def open_local(source: Source) -> LocalRetriever:
    """The retriever of a local source. Blocks while its index is built."""
    retriever = _local.get(source)
    return _start(source).result() if retriever is None else retriever


def is_open(source: Source) -> bool:
    """Whether `open_local` returns without waiting."""
    return source in _local


async def acquire(source: Source) -> Retriever:
    """A retriever for one environment of the running event loop, which gives it back with `release`."""
    if source.local:
        return await opened(source)
    key = asyncio.get_running_loop(), source
    retriever, users = _remote.get(key, (None, 0))
    if retriever is None:
        retriever = _connect(source)
    _remote[key] = (retriever, users + 1)
    return retriever


async def release(source: Source) -> None:
    """Give back a retriever. A client is closed with its last user."""
    key = asyncio.get_running_loop(), source
    if source.local or key not in _remote:
        return
    retriever, users = _remote[key]
    if users > 1:
        _remote[key] = (retriever, users - 1)
    else:
        del _remote[key]
        await retriever.close()


async def opened(source: Source) -> LocalRetriever:
    """`open_local` without blocking. If the caller is cancelled, the source is opened all the same."""
    retriever = _local.get(source)
    if retriever is not None:
        return retriever
    waiting = asyncio.wrap_future(_start(source))
    try:
        done, _ = await asyncio.wait([waiting], timeout=WARN_AFTER_S)
        if not done:
            log.warning("waiting for %s: its passages are read and indexed; the index is kept for the next run", source.where)
        return await waiting
    finally:
        waiting.cancel()  # ends this wait only: the thread's future is running and cannot be cancelled


def _start(source: Source) -> Future[LocalRetriever]:
    """The future of the one thread that opens a source. It is done if another caller opened the source in the meantime."""
    with _lock:
        job = _opening.get(source)
        if job is None and source in _local:
            job = Future()
            job.set_result(_local[source])
        elif job is None:
            job = _opening[source] = Future()
            job.set_running_or_notify_cancel()  # a caller that is cancelled must not cancel it for the others
            # Not a pooled thread: those are told to stop when the call that waits for them is cancelled.
            threading.Thread(target=_open, args=(source, job), name="search-index", daemon=True).start()
        return job


def _open(source: Source, job: Future[LocalRetriever]) -> None:
    try:
        retriever = _make(source)
    except BaseException as error:  # noqa: BLE001 - raised in every caller that waits
        with _lock:
            del _opening[source]  # the next caller tries again
        job.set_exception(error)
        return
    with _lock:
        if len(_local) >= MAX_OPEN:
            _local.pop(next(iter(_local)))
        _local[source] = retriever
        del _opening[source]
    job.set_result(retriever)


def _make(source: Source) -> LocalRetriever:
    from .retrieve.bm25 import Bm25
    from .retrieve.dense import Dense, open_encoder
    from .retrieve.hybrid import Hybrid

    corpus = _corpus(source.where)
    if source.retriever == "bm25":
        return Bm25(corpus)
    dense = Dense(corpus, open_encoder(source.model, **dict(source.options)))
    return dense if source.retriever == "dense" else Hybrid(Bm25(corpus), dense)


def _corpus(where: str) -> Corpus:
    from .retrieve.corpus import open_corpus

    name, _, seed = where.partition(":")
    if name in GENERATED and (not seed or (seed.isascii() and seed.isdigit())):
        corpus = _corpora.get(where)
        return corpus if corpus is not None else _corpora.setdefault(where, _generate(name, int(seed or 0)))
    if not Path(where).expanduser().is_file():
        raise ConfigError(
            f"no corpus {where!r}: it is neither a file of passages nor one of {', '.join(GENERATED)}; "
            f"the address of a server begins with http://, the name of a provider with web:"
        )
    return open_corpus(where)


def _generate(name: str, seed: int) -> Corpus:
    from .generated.articles import encyclopaedia_passages
    from .generated.easy import easy_passages
    from .retrieve.corpus import MemoryCorpus

    return MemoryCorpus(encyclopaedia_passages(seed) if name == "encyclopaedia" else easy_passages(seed))


def _connect(source: Source) -> Retriever:
    if source.where.startswith("web:"):
        from .web.providers import WebSearch

        return WebSearch(source.where.removeprefix("web:"), **dict(source.options))
    from .serve.client import ServerRetriever

    return ServerRetriever(source.where, **dict(source.options))
