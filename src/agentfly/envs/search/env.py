"""`SearchEnv`: the environment through which one chain searches a corpus, a search server or the web.

The option `source` says what is searched, else the task's field `corpus`, else it is the invented encyclopaedia. A query that
cannot be searched is the model's mistake and is answered with a sentence. A server or provider that keeps failing is a
WorldError. The environment records which passages it has shown; `recall` is computed from that record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import Any, ClassVar

from ...errors import ConfigError, WorldError
from ...resources.spec import Cost, Environment
from ...types import Task, ToolResult
from .retrieve.passages import plain_id
from .retrieve.types import MAX_K, Passage, Retriever
from .sources import Source, acquire, is_open, opened, release
from .view import read_id, read_query, show_hits, show_passage

DEFAULT = "encyclopaedia"
TOP, CUT, PAGE = 3, 400, 4_000
INDEX_TIMEOUT_S = 50.0
"""How long a reset waits for an index. A pool waits longer for the reset, so the error names the index."""
SMALL = {"easy_search": {"top": 1, "ids": False}}
"""Other defaults for the small world, whose models have a short context."""


class SearchEnv(Environment):
    """Searches a corpus, a server or the web, and opens passages.

    `search` shows `top` passages, each cut to `cut` characters; `retrieve` shows up to `page` characters of one.

    source      what is searched (see `sources.py`); None: the task's field `corpus`
    retriever   "bm25", "dense" or "hybrid"; `model` is the directory of an embedding model (or "hashing")
    ids         whether hits are shown with id and title
    options     for the encoder, the server's client or the provider, such as {"token": "..."}
    """

    cost: ClassVar[Cost] = Cost(cpu=0.02, memory_mb=1, start_s=0.01)
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
        self._source_name, self._top, self._cut, self._page, self._ids = source, top, cut, page, ids
        if source is not None:
            self._source_of(source)  # raises ConfigError now, not in the first chain
        self._source: Source | None = None
        self._retriever: Retriever | None = None
        self._closed = False
        self.searches = 0
        self.seen: dict[str, str] = {}
        """Id and title of every passage that the model was shown."""

    @staticmethod
    def make_ready(
        task: Task | None,
        source: str | None = None,
        retriever: str = "bm25",
        model: str | None = None,
        options: Mapping[str, Any] | None = None,
        **others: object,
    ) -> Awaitable[Any] | None:
        """Open what will be searched, and build its index if it is missing, outside the deadlines of chains.

        With `source` this opens the source; without it, the corpus that the task names, or nothing if there is no task.
        """
        if source is None and task is None:
            return None
        wanted = Source(source or _corpus_of(task), retriever, model, tuple(sorted((options or {}).items())))
        return opened(wanted) if wanted.local and not is_open(wanted) else None

    async def reset(self, task: Task | None = None) -> None:
        """Clear the record of shown passages, and open what the task searches unless it is open already."""
        where = self._source_name or _corpus_of(task)
        wanted = self._source_of(where)
        if not wanted.local and not self._source_name:
            # Data must not decide which hosts a run connects to.
            raise ConfigError("a task's corpus is a name or a file; a server or a provider is named by the option `source`")
        if self._retriever is None or wanted != self._source:
            await self._release()
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
        """The whole passage with an id that a search has shown."""
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
        """The share of these passages that the model was shown; 0 if none are named."""
        wanted = [("title", title) for title in titles] or [("id", plain_id(each)) for each in ids]
        shown = {("title", title.casefold()) for title in self.seen.values()} | {("id", each.casefold()) for each in self.seen}
        return sum((kind, name.casefold()) in shown for kind, name in wanted) / len(wanted) if wanted else 0.0

    def state_key(self) -> str:
        """The passages that were shown, in whatever order."""
        return repr(sorted(self.seen))

    async def close(self) -> None:
        self._closed = True
        await self._release()

    def healthy(self) -> bool:
        return not self._closed

    @staticmethod
    def conformance() -> dict[str, Any]:
        """How `check_env` examines it: the solver must find the answer and be shown every page that contains it."""
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

    async def _release(self) -> None:
        source, self._source, self._retriever = self._source, None, None
        if source is not None:
            await release(source)


def _corpus_of(task: Task | None) -> str:
    return str((task.fields.get("corpus") if task else None) or DEFAULT)


async def _open(source: Source) -> Retriever:
    try:
        async with asyncio.timeout(INDEX_TIMEOUT_S):
            return await acquire(source)
    except TimeoutError:
        raise WorldError(
            f"the index of {source.where} was not built within {INDEX_TIMEOUT_S:g} s; it is still being built, and will be "
            f"kept: name the corpus in the option `source`, and chains start when it is ready"
        ) from None
