"""The page allocator: which pages of the paged KV cache belong to which sequence, shared by reference count.

A page table lists the pages of a sequence in the order of its tokens. Full pages of a common prefix are held once:

    chain A   [p1 p2 p3 p4]        tokens 0..15 in p1, 16..31 in p2, ...
    chain B   [p1 p2 p9]           the first 32 tokens are A's; B computed the rest

Invariants: a page with more than one holder is never written (`_truncate` moves back to a page boundary before that could
happen), and page 0 belongs to no sequence: padding writes go there and nothing reads it. If no page is free, `grow` evicts
cached sequences that do not run; if that is not enough it returns False and the scheduler preempts a running sequence.
"""

from __future__ import annotations

from .slot_allocator import MIN_SHARED, CacheEntry, longest_shared_prefix, shared_prefix_length

PAGE_SIZE = 16
"""Tokens per page."""


class PagedSequence(CacheEntry):
    """A cache entry whose keys and values are in `pages`."""

    __slots__ = ("pages",)

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[int] = []


class PageAllocator:
    """All pages, their reference counts, and the sequences that hold them."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_evicted = 0
        self._free = list(range(num_pages - 1, 0, -1))
        self._refcounts = [0] * num_pages
        self._seqs: list[PagedSequence] = []
        self._sessions: dict[str, PagedSequence] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._seqs)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, tokens: list[int], session: str) -> tuple[PagedSequence, PagedSequence | None, int]:
        """Create or reuse the entry of a sequence. Returns (entry, source of a shared prefix or None, prefix length).

        No page is allocated yet. The source may still be in prefill; call `share` once it has computed the prefix.
        """
        want = len(tokens) - 1  # the last token is always computed: its logits are sampled
        own = self._sessions.get(session) if session else None
        if own is not None and own.busy:
            own, session = None, ""  # a concurrent second request of the same chain runs without a session
        self._clock += 1
        kept = shared_prefix_length(own.tokens, tokens, min(own.cached, want)) if own else 0
        source, count = (
            (None, 0)
            if own is not None and kept == min(own.cached, want)
            else longest_shared_prefix(self._seqs, tokens, want, own)
        )
        if own is None:
            seq = PagedSequence()
            self._seqs.append(seq)
            if session:
                seq.session, self._sessions[session] = session, seq
        else:
            seq = own
            self._truncate(seq, kept)
        seq.tokens, seq.busy, seq.used = tokens, True, self._clock
        if count < seq.cached + max(MIN_SHARED, PAGE_SIZE):
            source, count = None, 0
        return seq, source, count

    def share(self, seq: PagedSequence, source: PagedSequence, count: int) -> int:
        """Share the full pages of the first `count` tokens of `source`. Returns the number of tokens gained."""
        full = min(count, source.cached) // PAGE_SIZE
        if full * PAGE_SIZE <= seq.cached:
            return 0
        self._free_pages(seq, 0)
        seq.pages = source.pages[:full]
        for page in seq.pages:
            self._refcounts[page] += 1
        seq.cached = full * PAGE_SIZE
        return seq.cached

    def grow(self, seq: PagedSequence, length: int) -> bool:
        """Allocate pages for `length` tokens. Returns False if every page is held by a running sequence."""
        while len(seq.pages) * PAGE_SIZE < length:
            if not self._free and not self._evict(seq):
                return False
            page = self._free.pop()
            self._refcounts[page] = 1
            seq.pages.append(page)
        return True

    def finish(self, seq: PagedSequence) -> None:
        """The sequence has ended. Its pages stay for the chain's next turn and for sequences with the same prefix."""
        self._clock += 1
        seq.busy, seq.used = False, self._clock
        self._free_pages(seq, -(-seq.cached // PAGE_SIZE))
        if not seq.cached:
            self.drop(seq)

    def release(self, session: str) -> None:
        """The chain has ended: its pages are evicted first."""
        seq = self._sessions.pop(session, None)
        if seq is not None:
            seq.session = ""

    def drop(self, seq: PagedSequence) -> None:
        """Remove a sequence and free everything that it holds."""
        self._free_pages(seq, 0)
        seq.cached, seq.busy, seq.tokens = 0, False, []  # sequences that wait for this prefix compare `tokens` by identity
        if seq.session:
            self.release(seq.session)
        self._seqs.remove(seq)

    def invalidate(self) -> None:
        """The weights have changed: drop all keys and values. Running sequences keep their entries and are prefilled again."""
        for seq in list(self._seqs):
            if seq.busy:
                self._free_pages(seq, 0)
                seq.cached = 0
            else:
                self.drop(seq)

    def _truncate(self, seq: PagedSequence, kept: int) -> None:
        """Keep the first tokens only, back to a page boundary if the last page is shared: the next write would go there."""
        if kept % PAGE_SIZE and self._refcounts[seq.pages[kept // PAGE_SIZE]] > 1:
            kept -= kept % PAGE_SIZE
        seq.cached = kept
        self._free_pages(seq, -(-kept // PAGE_SIZE))

    def _evict(self, requester: PagedSequence) -> bool:
        """Evict sequences until a page is free: ended chains before waiting chains, least recently used first."""
        idle = [seq for seq in self._seqs if not seq.busy and seq is not requester]
        idle.sort(key=lambda seq: (seq.session != "", seq.used))
        for seq in idle:
            self.num_evicted += bool(seq.session)
            self.drop(seq)
            if self._free:
                return True
        return False

    def _free_pages(self, seq: PagedSequence, keep: int) -> None:
        for page in seq.pages[keep:]:
            self._refcounts[page] -= 1
            if not self._refcounts[page]:
                self._free.append(page)
        del seq.pages[keep:]
