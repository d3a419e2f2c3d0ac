"""Whose pages are whose: keys and values in pages of a fixed pool, lent to rows, shared by reference, taken back.

In: token lists of chains that want to run. Out: slots, each a list of pages in the order of its tokens, with as much of the
list already cached as can be had. The full pages of a beginning that two chains have in common are held once:

    chain A   [p1 p2 p3 p4]        tokens 0..15 in p1, 16..31 in p2, ...
    chain B   [p1 p2 p9]           the first 32 tokens are A's; B wrote the rest itself

A page with more than one holder is never written: `cached` steps back to the page's edge before anybody could. Page 0 belongs
to nobody: what must be written somewhere and read nowhere goes there. Refuses to hold more pages than there are: the caller
then waits, or sends a row back to the queue.
"""

from __future__ import annotations

from .slots import MIN_SHARED, common, longest_beginning

PAGE = 16


class PagedSlot:
    """The place of one row or one chain. `tokens[:cached]` have keys and values in `pages`."""

    __slots__ = ("busy", "cached", "pages", "session", "tokens", "used")

    def __init__(self, tokens: list[int], session: str, used: int) -> None:
        self.tokens = tokens
        self.session = session
        self.used = used
        self.cached = 0
        self.busy = True
        self.pages: list[int] = []

    @property
    def planned(self) -> int:
        """How much will be cached once a running row has read its prompt."""
        return len(self.tokens) if self.busy else self.cached


class Pages:
    """All pages and who holds them."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_evicted = 0
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages
        self._slots: list[PagedSlot] = []
        self._sessions: dict[str, PagedSlot] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def room(self) -> int:
        """Tokens that one row could hold if it were alone."""
        return (self.num_pages - 1) * PAGE

    def lend(self, tokens: list[int], session: str) -> tuple[PagedSlot, PagedSlot | None, int]:
        """A slot for a row that will hold `tokens`, and whose beginning it shares (slot, tokens), if anybody's.

        The source may still be reading that beginning itself; `share` takes it over when it has. No page is taken yet.
        """
        want = len(tokens) - 1  # the last token is always computed: its logits are what is wanted
        own = self._sessions.get(session) if session else None
        if own is not None and own.busy:
            own, session = None, ""  # a second request of the same chain runs beside the first, under no name
        self._clock += 1
        kept = common(own.tokens, tokens, min(own.cached, want)) if own else 0
        source, count = (
            (None, 0)
            if own is not None and kept == min(own.cached, want)
            else longest_beginning(self._slots, tokens, want, own)
        )
        if own is None:
            slot = PagedSlot(tokens, session, self._clock)
            self._slots.append(slot)
            if session:
                self._sessions[session] = slot
        else:
            slot = own
            slot.tokens, slot.busy, slot.used = tokens, True, self._clock
            self._cut(slot, kept)
        if count < slot.cached + max(MIN_SHARED, PAGE):
            source, count = None, 0
        return slot, source, count

    def share(self, slot: PagedSlot, source: PagedSlot, count: int) -> int:
        """Hold the full pages of `source`'s first `count` tokens too; how many tokens that gives."""
        full = min(count, source.cached) // PAGE
        if full * PAGE <= slot.cached:
            return 0
        self._drop_pages(slot, 0)
        slot.pages = source.pages[:full]
        for page in slot.pages:
            self._holders[page] += 1
        slot.cached = full * PAGE
        return slot.cached

    def grow(self, slot: PagedSlot, length: int) -> bool:
        """Make room for `length` tokens. False: no page can be had, every one is held by a row that runs."""
        while len(slot.pages) * PAGE < length:
            if not self._free and not self._evict(slot):
                return False
            page = self._free.pop()
            self._holders[page] = 1
            slot.pages.append(page)
        return True

    def give_back(self, slot: PagedSlot) -> None:
        """The row has ended. What it cached stays for its chain's next turn, and for others that begin alike."""
        self._clock += 1
        slot.busy, slot.used = False, self._clock
        self._drop_pages(slot, -(-slot.cached // PAGE))
        if not slot.cached:
            self._remove(slot)

    def release(self, session: str) -> None:
        """The chain is over: its pages go first when pages are needed."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            slot.session = ""

    def drop(self, slot: PagedSlot) -> None:
        """Take a row's place away altogether."""
        self._remove(slot)

    def forget(self) -> None:
        """The weights have changed: nothing cached is true any more."""
        for slot in list(self._slots):
            if slot.busy:
                self._drop_pages(slot, 0)
                slot.cached = 0
            else:
                self._remove(slot)

    def check(self) -> None:
        """Every page is free once, or held as often as it says. For tests; a broken book would be a silent training bug."""
        held = [0] * self.num_pages
        for slot in self._slots:
            assert slot.cached <= len(slot.pages) * PAGE
            for page in slot.pages:
                held[page] += 1
        assert held == self._holders
        assert len(self._free) == sum(count == 0 for count in held[1:])
        assert held[0] == 0

    def _cut(self, slot: PagedSlot, kept: int) -> None:
        """Keep the first tokens only, and stand where writing harms nobody."""
        if kept % PAGE and self._holders[slot.pages[kept // PAGE]] > 1:
            kept -= kept % PAGE
        slot.cached = kept
        self._drop_pages(slot, -(-kept // PAGE))

    def _evict(self, wanting: PagedSlot) -> bool:
        """Free the pages of whoever can best do without: chains that are over before chains that wait, the oldest first."""
        idle = [slot for slot in self._slots if not slot.busy and slot is not wanting]
        idle.sort(key=lambda slot: (slot.session != "", slot.used))
        for slot in idle:
            self.num_evicted += bool(slot.session)
            self._remove(slot)
            if self._free:
                return True
        return False

    def _remove(self, slot: PagedSlot) -> None:
        self._drop_pages(slot, 0)
        slot.cached, slot.busy, slot.tokens = 0, False, []  # whoever waits for it as a source sees that it is gone
        if slot.session:
            self.release(slot.session)
        self._slots.remove(slot)

    def _drop_pages(self, slot: PagedSlot, keep: int) -> None:
        for page in slot.pages[keep:]:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)
        del slot.pages[keep:]
