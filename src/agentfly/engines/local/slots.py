"""Whose slot is whose: lending, sharing, evicting and resizing, inside a budget of tokens.

In: token lists of chains that want to run. Out: slots of the cache, with as much of the list already cached as can be had:
the chain's own last turn, or the beginning of any other chain that starts the same way. A slot is busy (a row runs in it),
kept (its chain's tools run), or free; a free slot still remembers its tokens until somebody needs it. Refuses to hold more
than `max_tokens` tokens in all (slots x length): the caller then waits or sends a row back to the queue.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

from .cache import SlotCache

MIN_SHARED = 8  # shorter beginnings are computed faster than they are copied


class Slot:
    """One place in the cache. `tokens[:cached]` have keys and values there; a busy slot's `tokens` is its row's own list."""

    __slots__ = ("busy", "cached", "index", "session", "tokens", "used")

    def __init__(self, index: int) -> None:
        self.index = index
        self.tokens: list[int] = []
        self.cached = 0
        self.session = ""
        self.busy = False
        self.used = 0

    @property
    def planned(self) -> int:
        """How much will be cached once a running row has read its prompt."""
        return len(self.tokens) if self.busy else self.cached

    @property
    def free(self) -> bool:
        return not self.busy and not self.session


class Slots:
    """All slots and the budget."""

    def __init__(self, cache: SlotCache, *, max_tokens: int, max_slots: int, max_length: int) -> None:
        self.cache = cache
        self.max_tokens = max_tokens
        self.max_slots = max_slots
        self.max_length = max_length
        self.num_evicted = 0
        self._slots = [Slot(index) for index in range(cache.num_slots)]
        self._sessions: dict[str, Slot] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._slots)

    def lend(self, tokens: list[int], session: str) -> tuple[Slot, Slot | None, int] | None:
        """A slot for a row that will hold `tokens`, and where its beginning is to be copied from (slot, count), if anywhere.

        The source may still be reading that beginning itself. None: every slot is busy, and the budget allows no more.
        """
        want = len(tokens) - 1  # the last token is always computed: its logits are what is wanted
        own = self._sessions.get(session) if session else None
        if own is not None and own.busy:
            own, session = None, ""  # a second request of the same chain runs beside the first, under no name
        num_own = common(own.tokens, tokens, min(own.cached, want)) if own else 0
        source: Slot | None = None
        num_shared = 0
        if own is None or num_own < min(own.cached, want):
            source, num_shared = longest_beginning(self._slots, tokens, want, own)
        if own is not None:
            slot = own
        else:
            slot_or_none = self._vacate(source)
            if slot_or_none is None:
                return None
            slot = slot_or_none
            num_own = num_shared if slot is source else 0
        if slot is source or num_shared < max(MIN_SHARED, num_own + MIN_SHARED):
            source, num_shared = None, 0
        self._clock += 1
        slot.tokens, slot.cached, slot.busy, slot.used = tokens, num_own, True, self._clock
        if session:
            slot.session = session
            self._sessions[session] = slot
        return slot, source, num_shared

    def give_back(self, slot: Slot) -> None:
        """The row has ended. What it cached stays for its chain's next turn."""
        self._clock += 1
        slot.busy, slot.used = False, self._clock

    def release(self, session: str) -> None:
        """The chain is over: its slot is free (when its row has ended, if one still runs)."""
        slot = self._sessions.pop(session, None)
        if slot is not None:
            slot.session = ""

    def forget(self) -> None:
        """The weights have changed: nothing cached is true any more."""
        for slot in self._slots:
            slot.cached = 0
            if not slot.busy:
                self._clear(slot)

    def drop(self, slot: Slot) -> None:
        """Take a busy row's slot away."""
        slot.busy = False
        self._clear(slot)

    def ensure_length(self, length: int) -> bool:
        """Make slots hold `length` tokens each. False: too many are busy for that."""
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
        self._reshape(room, tight, busy + self._kept_first(room - len(busy)))
        return True

    def _vacate(self, source: Slot | None) -> Slot | None:
        """An empty place: the free source itself, any free slot, a new one, or the one kept longest by a chain that waits."""
        if source is not None and source.free:
            return source
        free = next((slot for slot in self._slots if slot.free), None)
        if free is None and self._add():
            free = next((slot for slot in self._slots if slot.free), None)
        if free is None:
            kept = min((slot for slot in self._slots if not slot.busy), key=lambda slot: slot.used, default=None)
            if kept is None:
                return None
            self.num_evicted += 1
            if kept is not source:
                self._clear(kept)
            else:
                self.release(kept.session)
            free = kept
        return free

    def _add(self) -> bool:
        count = len(self._slots)
        room = min(self.max_slots, self.max_tokens // self.cache.length)
        if room > count:
            self._reshape(min(room, max(8, 2 * count)), self.cache.length, self._slots)
            return True
        # The slots may be longer than anybody needs by now.
        length = _round(max((len(slot.tokens) for slot in self._slots if slot.busy), default=1) + 16, 64)
        room = min(self.max_slots, self.max_tokens // length)
        if length * 2 > self.cache.length or room <= count:
            return False
        self._reshape(room, length, [slot for slot in self._slots if slot.busy or slot.cached <= length])
        return True

    def _kept_first(self, count: int) -> list[Slot]:
        idle = [slot for slot in self._slots if not slot.busy and slot.cached]
        return sorted(idle, key=lambda slot: (slot.session != "", slot.used), reverse=True)[: max(count, 0)]

    def _reshape(self, num_slots: int, length: int, keep: Iterable[Slot]) -> None:
        kept = sorted(keep, key=lambda slot: slot.index)
        staying = set(map(id, kept))
        for slot in self._slots:
            if id(slot) not in staying:
                self.num_evicted += bool(slot.session)
                self._clear(slot)
        moves = [(slot.index, index, slot.cached) for index, slot in enumerate(kept)]
        self.cache.reshape(num_slots, length, moves)
        for index, slot in enumerate(kept):
            slot.index = index
        self._slots = kept + [Slot(index) for index in range(len(kept), num_slots)]

    def _clear(self, slot: Slot) -> None:
        if slot.session:
            self.release(slot.session)
        slot.tokens, slot.cached = [], 0


class Place(Protocol):
    """A slot of any kind: its tokens, and how many of them are or will be cached."""

    tokens: list[int]

    @property
    def planned(self) -> int: ...


AnyPlace = TypeVar("AnyPlace", bound=Place)


def longest_beginning(
    places: Iterable[AnyPlace], tokens: list[int], want: int, own: AnyPlace | None
) -> tuple[AnyPlace | None, int]:
    """Whose tokens, `own` aside, begin like `tokens` for longest, and for how many of the first `want`."""
    best, count = None, 0
    for place in places:
        limit = min(place.planned, want)
        if limit > count and place is not own:
            # Look past the best so far first: most places differ before that, and cost one comparison.
            if place.tokens[count] != tokens[count]:
                continue
            found = common(place.tokens, tokens, limit)
            if found > count:
                best, count = place, found
            if count == want:
                break
    return best, count


def common(a: list[int], b: list[int], limit: int) -> int:
    """How many of the first `limit` items are the same, by halving: comparing slices is far faster than a loop."""
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
