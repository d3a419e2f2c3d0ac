"""The page allocator: which pages of the paged KV cache belong to which sequence, shared by reference count.

A page table lists the pages of a sequence in the order of its tokens. Full pages of a common prefix are held once:

    chain A   [p1 p2 p3 p4]        tokens 0..15 in p1, 16..31 in p2, ...
    chain B   [p1 p2 p9]           the first 32 tokens are A's; B computed the rest

Invariants: a page with more than one holder is never written (`_truncate` moves back to a page boundary before that could
happen), and page 0 belongs to no sequence: padding writes go there and nothing reads it. If no page is free, `grow` evicts
cached sequences that do not run; if that is not enough it returns False and the scheduler preempts a running sequence.

A common prefix is found by the hashes of full pages (`PrefixIndex`), so an admission costs the same however many sequences
there are. Only sequences whose keys and values are all of the current weights are in the index.
"""

from __future__ import annotations

from collections.abc import Container

from .slot_allocator import MIN_SHARED, CacheEntry, ReuseAudit, shared_prefix_length

PAGE_SIZE = 16
"""Tokens per page."""


class PagedSequence(CacheEntry):
    """A cache entry whose keys and values are in `pages`. `hashes` are those of its first full pages, chained."""

    __slots__ = ("hashes", "pages")

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[int] = []
        self.hashes: list[int] = []


class PrefixIndex:
    """The sequences by the hash of each of their prefixes of full pages.

        hash of page n = hash(hash of page n - 1, ids of page n)       so one number stands for the whole prefix

    A sequence is listed with all pages that it has or will have: those of its prompt from its admission on, those of its reply
    when it ends.
    """

    def __init__(self) -> None:
        self._holders: dict[int, dict[PagedSequence, None]] = {}
        self._last_prompt: list[int] = []
        self._last_hashes: list[int] = []  # those of the last sequence that was added whole

    def add(self, seq: PagedSequence, length: int) -> None:
        """List the sequence with the full pages of its first `length` tokens. Pages listed before stay."""
        num_hashed = len(seq.hashes)
        if not num_hashed and seq.tokens[:length] == self._last_prompt:  # siblings come one after another
            seq.hashes = self._last_hashes.copy()
        else:
            seq.hashes += page_hashes(seq.tokens[num_hashed * PAGE_SIZE : length], seq.hashes[-1] if num_hashed else 0)
            if not num_hashed:
                self._last_prompt, self._last_hashes = seq.tokens[:length], seq.hashes.copy()
        self._list(seq, num_hashed)

    def truncate(self, seq: PagedSequence, length: int) -> None:
        """List the sequence with no more than the full pages of its first `length` tokens."""
        first = length // PAGE_SIZE
        if first >= len(seq.hashes):
            return
        for number in seq.hashes[first:]:
            holders = self._holders.get(number, {})
            holders.pop(seq, None)
            if not holders:
                self._holders.pop(number, None)
        del seq.hashes[first:]

    def find(self, seq: PagedSequence) -> tuple[PagedSequence | None, int]:
        """The sequence listed first of those, other than `seq`, that share most pages with it; and the number of tokens."""
        for number in range(len(seq.hashes), 0, -1):
            holders = self._holders.get(seq.hashes[number - 1], {})
            other = next((each for each in holders if each is not seq), None)
            if other is not None:
                # The ids are compared as well: hashes of different pages may be equal.
                return other, shared_prefix_length(other.tokens, seq.tokens, number * PAGE_SIZE)
        return None, 0

    def clear(self) -> None:
        self._holders.clear()

    def list_again(self, seq: PagedSequence) -> None:
        """List a sequence with the pages that it was listed with before `clear`."""
        self._list(seq, 0)

    def _list(self, seq: PagedSequence, first: int) -> None:
        for number in seq.hashes[first:]:
            self._holders.setdefault(number, {})[seq] = None


def page_hashes(tokens: list[int], parent: int) -> list[int]:
    """The chained hashes of the full pages of these tokens, which follow the page whose hash is `parent`."""
    hashes = []
    for start in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE):
        parent = hash((parent, *tokens[start : start + PAGE_SIZE]))
        hashes.append(parent)
    return hashes


class PageAllocator:
    """All pages, their reference counts, and the sequences that hold them."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_evicted = 0
        self.publication = 0
        self.audit = ReuseAudit()
        self._stamps = [0] * num_pages  # the publication in which each page was allocated
        self._index = PrefixIndex()
        self._free = list(range(num_pages - 1, 0, -1))
        self._refcounts = [0] * num_pages
        self._seqs: dict[PagedSequence, None] = {}  # in order of admission
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
        if own is not None and own.publication != self.publication:
            self.drop(own)
            own = None
        self._clock += 1
        whole = False
        if own is None:
            seq = PagedSequence()
            self._seqs[seq] = None
            if session:
                seq.session, self._sessions[session] = session, seq
        else:
            seq, limit = own, min(own.cached, want)
            shared = shared_prefix_length(own.tokens, tokens, limit)
            whole = shared == limit
            self._truncate(seq, shared)
            self.audit.reuse([*map(self._stamps.__getitem__, seq.pages)], seq.cached, PAGE_SIZE)
        seq.tokens, seq.busy, seq.used, seq.publication = tokens, True, self._clock, self.publication
        self._index.add(seq, want)
        return seq, *((None, 0) if whole else self._find_source(seq))

    def share(self, seq: PagedSequence, source: PagedSequence, count: int) -> int:
        """Share the full pages of the first `count` tokens of `source`. Returns the number of tokens gained."""
        full = min(count, source.cached) // PAGE_SIZE
        if full * PAGE_SIZE <= seq.cached:
            return 0
        self._free_pages(seq, 0)
        seq.pages = source.pages[:full]
        self.audit.reuse([*map(self._stamps.__getitem__, seq.pages)], full * PAGE_SIZE, PAGE_SIZE)
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
            self._stamps[page] = self.audit.publication
            seq.pages.append(page)
        return True

    def finish(self, seq: PagedSequence) -> None:
        """The sequence has ended. Its pages stay for the chain's next turn and for sequences with the same prefix.

        Keys and values of older weights are dropped: nothing could use them.
        """
        self._clock += 1
        seq.busy, seq.used = False, self._clock
        if not seq.cached or seq.publication != self.publication:
            self.drop(seq)
            return
        self._free_pages(seq, -(-seq.cached // PAGE_SIZE))
        self._index.truncate(seq, seq.cached)
        self._index.add(seq, seq.cached)

    def release(self, session: str) -> None:
        """The chain has ended: its pages are evicted first."""
        seq = self._sessions.pop(session, None)
        if seq is not None:
            seq.session = ""

    def drop(self, seq: PagedSequence) -> None:
        """Remove a sequence and free everything that it holds."""
        self._free_pages(seq, 0)
        self._index.truncate(seq, 0)
        seq.cached, seq.busy, seq.tokens = 0, False, []  # sequences that wait for this prefix compare `tokens` by identity
        if seq.session:
            self.release(seq.session)
        del self._seqs[seq]

    def renew(
        self, publication: int, keep: Container[PagedSequence] = ()
    ) -> dict[PagedSequence, tuple[PagedSequence | None, int]]:
        """The weights have changed: drop all keys and values but those of the running sequences in `keep`.

        Running sequences keep their entries. One that has no keys and values, or loses them, belongs to the new publication.
        Returns for each of those the source of a shared prefix, as `allocate` does.
        """
        self.publication = publication
        self._index.clear()
        sources: dict[PagedSequence, tuple[PagedSequence | None, int]] = {}
        for seq in list(self._seqs):
            if not seq.busy:
                seq.hashes = []
                self.drop(seq)
            elif seq not in keep:
                self._free_pages(seq, 0)
                seq.cached, seq.publication = 0, publication
                self._index.list_again(seq)
                sources[seq] = self._find_source(seq)  # among those before it, so that no two wait for each other
        return sources

    def _find_source(self, seq: PagedSequence) -> tuple[PagedSequence | None, int]:
        source, count = self._index.find(seq)
        return (source, count) if count >= seq.cached + max(MIN_SHARED, PAGE_SIZE) else (None, 0)

    def _truncate(self, seq: PagedSequence, kept: int) -> None:
        """Keep the first tokens only, back to a page boundary if the last page is shared: the next write would go there."""
        if kept % PAGE_SIZE and self._refcounts[seq.pages[kept // PAGE_SIZE]] > 1:
            kept -= kept % PAGE_SIZE
        seq.cached = kept
        self._free_pages(seq, -(-kept // PAGE_SIZE))
        self._index.truncate(seq, kept)

    def _evict(self, requester: PagedSequence) -> bool:
        """Evict sequences until a page is free: ended chains before waiting chains, least recently used first."""
        while not self._free:
            idle = (seq for seq in self._seqs if not seq.busy and seq is not requester)
            victim = min(idle, key=lambda seq: (seq.session != "", seq.used), default=None)
            if victim is None:
                return False
            self.num_evicted += bool(victim.session)
            self.drop(victim)
        return True

    def _free_pages(self, seq: PagedSequence, keep: int) -> None:
        for page in seq.pages[keep:]:
            self._refcounts[page] -= 1
            if not self._refcounts[page]:
                self._free.append(page)
        del seq.pages[keep:]
