"""`SearchEnv`: one chain's way into a corpus, a search server or the web.

In: queries and ids. Out: text for the model, and the record of what it has been shown, which is what `recall` measures. What
is searched is said by the option `source`, else by the task's field `corpus`, else it is the invented encyclopaedia. A query
that cannot be searched (empty, of 100 kB, no text) is the model's mistake and answered in one sentence; a server or provider
that stays dead is a WorldError. The retriever itself is shared by all environments of the process and never changed by one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, ClassVar

from ...errors import ConfigError, WorldError
from ...resources.spec import Cost, Environment
from ...types import Task, ToolResult
from .retrieval import MAX_K, Passage, Retriever
from .sources import Source, acquire, is_open, named_corpora, opened, release
from .view import plain_id, read_id, read_query, show_hits, show_passage

log = logging.getLogger(__name__)
DEFAULT = "encyclopaedia"
TOP, CUT, PAGE = 3, 400, 4_000
PATIENCE_S = 50.0
"""How long a reset waits for an index; shorter than a pool waits for a reset, so that the reason is said."""
# The small world is read by small models: one page, and nothing around it.
SMALL = {"easy_search": {"top": 1, "ids": False}}


class SearchEnv(Environment):
    """A corpus, or the web: search it, open pages, answer.

    `search` shows `top` passages, each cut to `cut` characters; `retrieve` shows up to `page` characters of one.

    source      what is searched (see `sources.py`); None: the task's field `corpus`
    retriever   "bm25", "dense" or "hybrid"; `model` is the directory of an embedding model (or "hashing")
    ids         whether hits are shown with id and title
    options     for the encoder, the server's client or the provider, such as {"token": "..."}
    """

    cost: ClassVar[Cost] = Cost(cpu=0.02, memory_mb=1, start_s=0.01)
    reusable: ClassVar[bool] = True
    max_chains: ClassVar[int] = 1
    placement: ClassVar[str] = "loop"
    task_set: ClassVar[str] = "encyclopaedia"
    main_tool: ClassVar[str] = "search"

    def __init__(
        self,
        source: str | None = None,
        retriever: str = "bm25",
        model: str | None = None,
        top: int | None = None,
        cut: int = CUT,
        page: int = PAGE,
        ids: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if top is not None and (type(top) is not int or not 1 <= top <= MAX_K):
            raise ConfigError(f"SearchEnv: top must be from 1 to {MAX_K}, not {top!r}")
        if min(cut, page) < 20:
            raise ConfigError(f"SearchEnv: cut and page must be at least 20 characters, not {cut} and {page}")
        self._how = retriever, model, tuple(sorted((options or {}).items()))
        self._given, self._top, self._cut, self._page, self._ids = source, top, cut, page, ids
        if source is not None:
            self._source_of(source)  # a wrong option is said now, not in the first chain
        self._source: Source | None = None
        self._retriever: Retriever | None = None
        self._closed = False
        self.searches = 0
        self.seen: dict[str, str] = {}
        """The ids of everything that the model was shown, with their titles."""

    @staticmethod
    def make_ready(
        task: Task | None,
        source: str | None = None,
        retriever: str = "bm25",
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Awaitable[None] | None:
        """Open what will be searched before a chain waits for it: an index that is missing takes as long as it takes.

        Before the first chain that is `source`, else what the task sets that were loaded name; before a chain, its own.
        """
        named = [source] if source else named_corpora() if task is None else [_corpus_of(task)]
        wanted = [Source(where, retriever, model, tuple(sorted((options or {}).items()))) for where in named]
        missing = [each for each in wanted if each.local and not is_open(each)]
        return _open_all(missing, must=source is not None or task is not None) if missing else None

    async def reset(self, task: Task | None = None) -> None:
        """Forget what was shown. What is searched is opened here, where that was not done before the first chain."""
        where = self._given or _corpus_of(task)
        wanted = self._source_of(where)
        if not wanted.local and not self._given:
            # A row of data must not send a run to an address of its own.
            raise ConfigError("a task's corpus is a name or a file; a server or a provider is named by the option `source`")
        if self._retriever is None or wanted != self._source:
            await self._let_go()
            self._retriever, self._source = await _open(wanted), wanted
        small = SMALL.get(where.partition(":")[0], {})
        self.top = self._top if self._top is not None else int(small.get("top", TOP))
        self.ids = self._ids if self._ids is not None else bool(small.get("ids", True))
        self.searches, self.seen, self._closed = 0, {}, False

    async def search(self, query: str) -> ToolResult:
        """The best passages for a query, as text."""
        retriever = self._open_retriever()
        text, refused = read_query(query)
        if refused:
            return ToolResult(observation=refused, error="bad_arguments")
        self.searches += 1
        (hits,) = await retriever.search([text], self.top)
        self._note(hit.passage for hit in hits)
        return ToolResult(observation=show_hits(hits, ids=self.ids, cut=self._cut))

    async def retrieve(self, id: str) -> ToolResult:  # noqa: A002 - the word that models read
        """A whole passage by the id that a search has shown."""
        retriever = self._open_retriever()
        text, refused = read_id(id)
        if refused:
            return ToolResult(observation=refused, error="bad_arguments")
        passage = await retriever.get(text)
        if passage is None:
            return ToolResult(observation=f"There is no passage with the id {text[:80]!r}. Search shows ids in brackets.")
        self._note([passage])
        return ToolResult(observation=show_passage(passage, self._page))

    async def recall(self, titles: Iterable[str] = (), ids: Iterable[str] = ()) -> float:
        """The share of these passages that the model was shown; 0 where none are named."""
        wanted = [("title", title) for title in titles] or [("id", plain_id(each)) for each in ids]
        shown = {("title", title.casefold()) for title in self.seen.values()} | {("id", each.casefold()) for each in self.seen}
        return sum((kind, name.casefold()) in shown for kind, name in wanted) / len(wanted) if wanted else 0.0

    async def close(self) -> None:
        self._closed = True
        await self._let_go()

    def healthy(self) -> bool:
        return not self._closed

    @staticmethod
    def conformance() -> dict[str, Any]:
        """How `check_env` plays it: the solver must find the answer and see every page that holds it."""
        from ...data import load_tasks
        from .solver import solve
        from .tasks import encyclopaedia

        async def play(env: SearchEnv, task: Task) -> float:
            answer = await solve(env, task)
            return float(answer == task.fields["answer"]) * await env.recall(task.fields["gold_titles"])

        def act(rng: Any, seen: Any) -> tuple[str, dict[str, Any]]:
            if rng.random() < 0.3:
                return "retrieve", {"id": str(rng.randint(0, 1200))}
            return "search", {"query": rng.choice(["river", "born in 1500", "the capital", "", "Mount", "painter"])}

        return {
            "tasks": load_tasks(encyclopaedia("test", 2)),
            "actions": act,
            "solver": play,
            "do_nothing": lambda env, task: 0.0,
            "score": lambda env, task: env.recall(task.fields["gold_titles"]),
        }

    def _source_of(self, where: str) -> Source:
        return Source(where, *self._how)

    def _open_retriever(self) -> Retriever:
        if self._retriever is None or self._closed:
            raise WorldError("the search environment is closed: reset it before the next call")
        return self._retriever

    def _note(self, passages: Iterable[Passage]) -> None:
        self.seen |= {passage.id: passage.title for passage in passages}

    async def _let_go(self) -> None:
        source, self._source, self._retriever = self._source, None, None
        if source is not None:
            await release(source)


def _corpus_of(task: Task | None) -> str:
    return str((task.fields.get("corpus") if task else None) or DEFAULT)


async def _open_all(sources: list[Source], *, must: bool) -> None:
    """`must` is False for corpora that perhaps no chain asks for: that one cannot be opened is said by the chain that does."""
    for source in sources:
        try:
            await opened(source)
        except Exception as error:  # whatever it was, it is said: here, or by the chain that asks for it
            if must:
                raise
            log.warning("%s could not be opened ahead of the chains: %s", source.where, error)


async def _open(source: Source) -> Retriever:
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await acquire(source)
    except TimeoutError:
        raise WorldError(
            f"the index of {source.where} was not there within {PATIENCE_S:g} s; it is still being made, and kept: name "
            f"the corpus in the option `source`, and chains start when it is ready"
        ) from None
