"""What is searched: a description in, an open retriever out, shared by all environments of this process that ask for the same.

    "encyclopaedia"          the invented world; "encyclopaedia:7" that of another seed
    "easy_search"            the small world for small models
    "path/passages.jsonl"    a file of passages, .gz too
    "http://host:port"       a search server
    "web:serper"             a provider of web search: serper, tavily, brave or searxng

Local ones stay open as long as the process lives (they are mapped into memory, or small); a server's or provider's connections
are closed with the last environment that uses them.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .retrieval import LocalRetriever, Retriever

RETRIEVERS = ("bm25", "dense", "hybrid")


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
_lock = threading.RLock()
_remote: dict[tuple[asyncio.AbstractEventLoop, Source], tuple[Retriever, int]] = {}


def open_local(source: Source) -> LocalRetriever:
    """A retriever over passages that are here, opened once. Blocks while an index is made."""
    with _lock:
        if source not in _local:
            if len(_local) >= 16:  # a sweep over many corpora must not keep them all
                _local.pop(next(iter(_local)))
            _local[source] = _make(source)
        return _local[source]


def acquire(source: Source) -> Retriever:
    """A retriever for one environment of the running loop; give it back with `release`."""
    if source.local:
        return open_local(source)
    key = asyncio.get_running_loop(), source
    retriever, users = _remote.get(key, (None, 0))
    if retriever is None:
        retriever = _connect(source)
    _remote[key] = (retriever, users + 1)
    return retriever


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
    if name in GENERATED and (not seed or seed.isdigit()):
        if where not in _corpora:
            _corpora[where] = MemoryCorpus(GENERATED[name](int(seed or 0)))
        return _corpora[where]
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


def is_open(source: Source) -> bool:
    return source in _local
