"""What is searched: a description in, an open retriever out, shared by all environments of this process that ask for the same.

    "encyclopaedia"          the invented world; "encyclopaedia:7" that of another seed
    "easy_search"            the small world for small models
    "path/passages.jsonl"    a file of passages, .gz too
    "http://host:port"       a search server
    "web:serper"             a provider of web search: serper, tavily, brave or searxng

Local ones stay open as long as the process lives (they are mapped into memory, or small); a server's or provider's connections
are closed with the last environment that uses them. Each source is opened, and its index made, in one thread of its own: other
sources and the event loop never wait for it, and it goes on when those who wanted it have left.
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
from .retrieval import LocalRetriever, Retriever

log = logging.getLogger(__name__)
RETRIEVERS = ("bm25", "dense", "hybrid")
MAX_OPEN = 16
"""A sweep over many corpora must not keep them all."""
SAY_S = 5.0
"""After so long a wait the log says what is waited for."""


@dataclass(frozen=True, slots=True)
class Source:
    """`retriever` and `model` are for passages that are searched here; `options` are for the encoder, the client or the web."""

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
        return not self.where.startswith(("http://", "https://", "web:"))


_local: dict[Source, LocalRetriever] = {}
_corpora: dict[str, Any] = {}
_making: dict[Source, Future[LocalRetriever]] = {}
_lock = threading.Lock()
"""Held for a moment only, never while something is read or made."""
_remote: dict[tuple[asyncio.AbstractEventLoop, Source], tuple[Retriever, int]] = {}
_named: dict[str, None] = {}


def open_local(source: Source) -> LocalRetriever:
    """A retriever over passages that are here, opened once. Blocks while an index is made."""
    made = _local.get(source)
    return _job(source).result() if made is None else made


def is_open(source: Source) -> bool:
    return source in _local


async def acquire(source: Source) -> Retriever:
    """A retriever for one environment of the running loop; give it back with `release`."""
    if source.local:
        return await opened(source)
    key = asyncio.get_running_loop(), source
    retriever, users = _remote.get(key, (None, 0))
    if retriever is None:
        retriever = _connect(source)
    _remote[key] = (retriever, users + 1)
    return retriever


async def opened(source: Source) -> LocalRetriever:
    """The same as `open_local` without blocking. Whoever gives up waiting does not end the making: the next one finds it."""
    made = _local.get(source)
    if made is not None:
        return made
    waiting = asyncio.wrap_future(_job(source))
    try:
        done, _ = await asyncio.wait([waiting], timeout=SAY_S)
        if not done:
            log.warning("%s is being read and its index made, which is kept for the next run: waiting for it", source.where)
        return await waiting
    finally:
        waiting.cancel()  # of no effect on the making


def _job(source: Source) -> Future[LocalRetriever]:
    """The one thread that opens a source, for all who want it; done already where it was opened a moment ago."""
    with _lock:
        job = _making.get(source)
        if job is None and source in _local:
            job = Future()
            job.set_result(_local[source])
        elif job is None:
            job = _making[source] = Future()
            job.set_running_or_notify_cancel()  # from now on nobody who waits can cancel it
            # A thread of its own and no pool's: a call of a pool's that nobody waits for is stopped.
            threading.Thread(target=_work, args=(source, job), name="search-index", daemon=True).start()
        return job


def _work(source: Source, job: Future[LocalRetriever]) -> None:
    try:
        made = _make(source)
    except BaseException as error:  # noqa: BLE001 - it belongs to those who wait
        with _lock:
            del _making[source]  # the next one tries again
        job.set_exception(error)
        return
    with _lock:
        if len(_local) >= MAX_OPEN:
            _local.pop(next(iter(_local)))
        _local[source] = made
        del _making[source]
    job.set_result(made)


def name_corpus(where: str) -> None:
    """Rows that were loaded name this corpus: every pool of this process opens it before its first chain."""
    _named[where] = None


def named_corpora() -> list[str]:
    """Those of them that are still there."""
    return [where for where in _named if Path(where).is_file()]


async def release(source: Source) -> None:
    key = asyncio.get_running_loop(), source
    if source.local or key not in _remote:
        return
    retriever, users = _remote[key]
    if users > 1:
        _remote[key] = (retriever, users - 1)
    else:
        del _remote[key]
        await retriever.close()


def _make(source: Source) -> LocalRetriever:
    from .bm25 import Bm25
    from .dense import Dense, open_encoder
    from .hybrid import Hybrid

    corpus = _corpus(source.where)
    if source.retriever == "bm25":
        return Bm25(corpus)
    dense = Dense(corpus, open_encoder(source.model, **dict(source.options)))
    return dense if source.retriever == "dense" else Hybrid(Bm25(corpus), dense)


def _corpus(where: str) -> Any:
    from .corpus import MemoryCorpus, open_corpus

    name, _, seed = where.partition(":")
    if name in GENERATED and (not seed or (seed.isascii() and seed.isdigit())):
        known = _corpora.get(where)
        return known if known is not None else _corpora.setdefault(where, MemoryCorpus(GENERATED[name](int(seed or 0))))
    if not Path(where).expanduser().is_file():
        raise ConfigError(
            f"no corpus {where!r}: it is neither a file of passages nor one of {', '.join(GENERATED)}; "
            f"the address of a server begins with http://, the name of a provider with web:"
        )
    return open_corpus(where)


def _connect(source: Source) -> Retriever:
    if source.where.startswith("web:"):
        from .web import WebSearch

        return WebSearch(source.where.removeprefix("web:"), **dict(source.options))
    from .client import ServerRetriever

    return ServerRetriever(source.where, **dict(source.options))


def _encyclopaedia(seed: int) -> Any:
    from .articles import encyclopaedia_passages

    return encyclopaedia_passages(seed)


def _easy(seed: int) -> Any:
    from .easy import easy_passages

    return easy_passages(seed)


GENERATED = {"encyclopaedia": _encyclopaedia, "easy_search": _easy}
