"""The slot allocator: which slot of the slot cache belongs to which chain, within a budget of tokens.

A slot is busy (a sequence runs in it), kept (its chain waits for tools) or free. A free slot keeps its tokens until another
chain needs it, so a later sequence can copy a common prefix from it. The cache grows and shrinks in both directions within
`max_tokens` (slots x length). If that is not enough, `allocate` returns None and the scheduler waits, or `ensure_length`
returns False and the scheduler preempts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import TypeVar

from .slot_attention import SlotCache

MIN_SHARED = 8  # computing a shorter prefix is faster than copying it


class CacheEntry:
    """A running sequence or a waiting chain in the cache. `tokens[:cached]` have keys and values.

    The `tokens` of a busy entry is the sequence's own, growing list. `used` is when it was last used, on the allocator's clock.
    `publication` is the publication of the oldest weights that computed any of its keys and values: an entry is reused, and
    shared from, only while that is the current one.
    """

    __slots__ = ("busy", "cached", "publication", "session", "tokens", "used")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.cached = 0
        self.publication = 0
        self.session = ""
        self.busy = False
        self.used = 0

    @property
    def planned(self) -> int:
        """Tokens cached once the prefill of a running sequence is done."""
        return len(self.tokens) if self.busy else self.cached


AnyEntry = TypeVar("AnyEntry", bound=CacheEntry)


class ReuseAudit:
    """Counts the cached tokens that were reused although older weights had computed them: `stale_tokens` must stay 0.

    The audit does not rely on the tags by which entries are matched. The allocators stamp pages and slots when they are
    written, and compare the stamps at every reuse with `publication`, which the engine sets before each step.
    """

    __slots__ = ("publication", "stale_tokens")

    def __init__(self) -> None:
        self.publication = self.stale_tokens = 0

    def reuse(self, stamps: Sequence[int], tokens: int, per_stamp: int) -> None:
        """Reuse `tokens` tokens, `per_stamp` of them under each stamp."""
        if min(stamps, default=self.publication) < self.publication:
            stale = sum([stamp < self.publication for stamp in stamps])
            self.stale_tokens += min(tokens, stale * per_stamp)


class CacheSlot(CacheEntry):
    """One slot of the cache. `stamp` is the publication in which its first position was written."""

    __slots__ = ("index", "stamp")

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.stamp = 0

    @property
    def free(self) -> bool:
        return not self.busy and not self.session


class SlotAllocator:
    """All slots and the token budget."""

    def __init__(self, cache: SlotCache, *, max_tokens: int, max_slots: int, max_length: int) -> None:
        self.cache = cache
        self.max_tokens = max_tokens
        self.max_slots = max_slots
        self.max_length = max_length
        self.num_evicted = 0
        self.publication = 0
        self.audit = ReuseAudit()
        self._slots = [CacheSlot(index) for index in range(cache.num_slots)]
        self._sessions: dict[str, CacheSlot] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._slots)

    def allocate(self, tokens: list[int], session: str) -> tuple[CacheSlot, CacheSlot | None, int] | None:
        """Assign a slot to a sequence. Returns (slot, source of a shared prefix or None, prefix length).

        The source may still be in prefill. Returns None if every slot is busy and the budget allows no more.
        """
        want = len(tokens) - 1  # the last token is always computed: its logits are sampled
        own = self._sessions.get(session) if session else None
        if own is not None and own.busy:
            own, session = None, ""  # a concurrent second request of the same chain runs without a session
        if own is not None and own.publication != self.publication:
            self._clear(own)
            own = None
        num_own = shared_prefix_length(own.tokens, tokens, min(own.cached, want)) if own else 0
        source: CacheSlot | None = None
        num_shared = 0
        if own is None or num_own < min(own.cached, want):
            current = (slot for slot in self._slots if slot.publication == self.publication)
            source, num_shared = longest_shared_prefix(current, tokens, want, own)
        slot = own or self._find_free(source)
        if slot is None:
            return None
        if own is None:
            num_own = num_shared if slot is source else 0
        if slot is source or num_shared < max(MIN_SHARED, num_own + MIN_SHARED):
            source, num_shared = None, 0
        self._clock += 1
        self.audit.reuse((slot.stamp,), num_own, num_own)
        slot.tokens, slot.cached, slot.busy, slot.used = tokens, num_own, True, self._clock
        slot.publication = self.publication
        if session:
            slot.session = session
            self._sessions[session] = slot
        return slot, source, num_shared

    def share(self, slot: CacheSlot, source: CacheSlot, count: int) -> int:
        """Copy the first `count` tokens of `source`, as far as they are cached. Returns the number of tokens gained."""
        count = min(count, source.cached)
        if count <= slot.cached:
            return 0
        self.audit.reuse((source.stamp,), count, count)
        self.cache.copy(source.index, slot.index, count)
        slot.cached, slot.stamp = count, source.stamp
        return count

    def finish(self, slot: CacheSlot) -> None:
        """The sequence has ended. Its keys and values stay for the chain's next turn, unless they are of older weights."""
        self._clock += 1
        slot.busy, slot.used = False, self._clock
        if slot.publication != self.publication:
            self._clear(slot)

    def release(self, session: str) -> None:
        """The chain has ended: its slot becomes free, once no sequence runs in it."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            slot.session = ""

    def renew(self, publication: int, keep: Container[CacheSlot] = ()) -> dict[CacheSlot, tuple[CacheSlot | None, int]]:
        """The weights have changed: drop all keys and values but those of the busy slots in `keep`.

        A busy slot that has none, or loses them, belongs to the new publication. Returns for each of those the source of a
        shared prefix, as `allocate` does.
        """
        self.publication = publication
        sources: dict[CacheSlot, tuple[CacheSlot | None, int]] = {}
        for slot in self._slots:
            if not slot.busy:
                self._clear(slot)
            elif slot not in keep:
                slot.cached, slot.publication = 0, publication
                # Among those before it, so that no two wait for each other.
                source, count = longest_shared_prefix(sources, slot.tokens, len(slot.tokens) - 1, None)
                sources[slot] = (source, count) if count >= MIN_SHARED else (None, 0)
        return sources

    def drop(self, slot: CacheSlot) -> None:
        """Free the slot of a running sequence (preemption)."""
        slot.busy = False
        self._clear(slot)

    def ensure_length(self, length: int) -> bool:
        """Make every slot hold `length` tokens. Returns False if the busy slots alone would exceed the budget."""
        if length <= self.cache.length:
            return True
        roomy = min(self.max_length, _round(max(length, self.cache.length * 3 // 2), 64))
        tight = min(self.max_length, _round(length, 16))
        for size in (roomy, tight):
            if len(self._slots) * size <= self.max_tokens:
                self._reshape(len(self._slots), size, self._slots)
                return True
        room = self.max_tokens // tight
        busy = [slot for slot in self._slots if slot.busy]
        if not 0 < room >= len(busy):
            return False
        self._reshape(room, tight, busy + self._most_useful(room - len(busy)))
        return True

    def _find_free(self, source: CacheSlot | None) -> CacheSlot | None:
        """A slot to overwrite: the source if it is free, any free slot, a new slot, or the least recently used kept slot."""
        if source is not None and source.free:
            return source
        free = next((slot for slot in self._slots if slot.free), None)
        if free is None and self._add_slots():
            free = next((slot for slot in self._slots if slot.free), None)
        if free is not None:
            return free
        oldest = min((slot for slot in self._slots if not slot.busy), key=lambda slot: slot.used, default=None)
        if oldest is not None:
            self.num_evicted += 1
            self.release(oldest.session)
            if oldest is not source:
                self._clear(oldest)
        return oldest

    def _add_slots(self) -> bool:
        count = len(self._slots)
        room = min(self.max_slots, self.max_tokens // self.cache.length)
        if room > count:
            self._reshape(min(room, max(8, 2 * count)), self.cache.length, self._slots)
            return True
        # The slots may be longer than the sequences that run now need.
        length = _round(max((len(slot.tokens) for slot in self._slots if slot.busy), default=1) + 16, 64)
        room = min(self.max_slots, self.max_tokens // length)
        if length * 2 > self.cache.length or room <= count:
            return False
        self._reshape(room, length, [slot for slot in self._slots if slot.busy or slot.cached <= length])
        return True

    def _most_useful(self, count: int) -> list[CacheSlot]:
        idle = [slot for slot in self._slots if not slot.busy and slot.cached]
        return sorted(idle, key=lambda slot: (slot.session != "", slot.used), reverse=True)[: max(count, 0)]

    def _reshape(self, num_slots: int, length: int, keep: Iterable[CacheSlot]) -> None:
        staying_slots = sorted(keep, key=lambda slot: slot.index)
        staying = set(map(id, staying_slots))
        for slot in self._slots:
            if id(slot) not in staying:
                self.num_evicted += bool(slot.session)
                self._clear(slot)
        moves = [(slot.index, index, slot.cached) for index, slot in enumerate(staying_slots)]
        self.cache.reshape(num_slots, length, moves)
        for index, slot in enumerate(staying_slots):
            slot.index = index
        self._slots = staying_slots + [CacheSlot(index) for index in range(len(staying_slots), num_slots)]

    def _clear(self, slot: CacheSlot) -> None:
        if slot.session:
            self.release(slot.session)
        slot.tokens, slot.cached = [], 0  # sequences that wait for this prefix compare `tokens` by identity


def longest_shared_prefix(
    sources: Iterable[AnyEntry], tokens: list[int], want: int, own: AnyEntry | None
) -> tuple[AnyEntry | None, int]:
    """The source, except `own`, that shares the longest prefix with `tokens`, and its length (at most `want`)."""
    best, count = None, 0
    for source in sources:
        limit = min(source.planned, want)
        if limit > count and source is not own:
            # Compare the token after the best prefix first: most sources differ there, so they cost one comparison.
            if source.tokens[count] != tokens[count]:
                continue
            length = shared_prefix_length(source.tokens, tokens, limit)
            if length > count:
                best, count = source, length
            if count == want:
                break
    return best, count


def shared_prefix_length(a: list[int], b: list[int], limit: int) -> int:
    """Length of the common prefix, at most `limit`, by bisection: comparing slices is far faster than a loop."""
    if a[:limit] == b[:limit]:
        return limit
    low, high = 0, limit  # a[:low] == b[:low]; a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _round(count: int, step: int) -> int:
    return -(-count // step) * step
