"""Lending slots: what is shared, who is evicted, and the budget that is never exceeded."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentfly.engines.local.slot_allocator import SlotAllocator, shared_prefix_length
from agentfly.engines.local.slot_attention import SlotCache


def make(num_slots=2, length=16, **limits) -> SlotAllocator:
    limits = {"max_tokens": 64, "max_slots": 8, "max_length": 64} | limits
    return SlotAllocator(SlotCache(num_slots, length), **limits)


def use(slots: SlotAllocator, tokens: list[int], session: str = ""):
    """A row that runs to its end."""
    lent = slots.allocate(tokens, session)
    assert lent is not None
    lent[0].cached = len(tokens)
    slots.finish(lent[0])
    return lent


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(0, 2), max_size=40))
def test_the_common_beginning_is_found_as_by_a_loop(a, b):
    limit = min(len(a), len(b))
    want = next((i for i in range(limit) if a[i] != b[i]), limit)
    assert shared_prefix_length(a, b, limit) == want


def test_a_chain_finds_its_own_slot_again():
    slots = make()
    first, _, _ = use(slots, list(range(10)), "a")
    again, source, _ = slots.allocate(list(range(14)), "a")
    assert again is first
    assert source is None
    assert again.cached == 10


def test_the_last_token_is_always_computed():
    slots = make()
    use(slots, list(range(10)), "a")
    slot, _, _ = slots.allocate(list(range(10)), "a")
    assert slot.cached == 9


def test_a_running_sibling_is_named_as_the_source_of_what_it_has_not_yet_read():
    slots = make()
    leader, _, _ = slots.allocate(list(range(12)), "a")
    follower, source, count = slots.allocate(list(range(12)), "b")
    assert (source, count) == (leader, 11)
    assert follower is not leader


def test_a_free_slot_that_begins_alike_is_taken_over_in_place():
    slots = make()
    old, _, _ = use(slots, list(range(12)), "a")
    slots.release("a")
    new, source, _ = slots.allocate([*range(9), 77, 78], "b")
    assert new is old
    assert source is None
    assert new.cached == 9


def test_the_chain_that_waited_longest_is_evicted():
    slots = make(max_slots=2)
    use(slots, [1] * 10, "old")
    use(slots, [2] * 10, "young")
    use(slots, [3] * 10, "new")
    assert slots.num_evicted == 1
    slot, _, _ = slots.allocate([2] * 12, "young")
    assert slot.cached == 10


def test_busy_slots_are_never_taken():
    slots = make(max_slots=2)
    for session in "ab":
        assert slots.allocate([ord(session)] * 5, session) is not None
    assert slots.allocate([3] * 5, "c") is None


def test_slots_longer_than_needed_are_traded_for_more_of_them():
    slots = make(num_slots=1, length=16, max_tokens=256, max_length=256)
    assert slots.ensure_length(256)
    assert len(slots) == 1
    slots.allocate([1] * 5, "a")
    assert slots.allocate([2] * 5, "b") is not None
    assert slots.cache.num_slots * slots.cache.length <= 256


def test_growing_keeps_what_is_cached():
    slots = make(num_slots=1, length=4, max_tokens=256)
    keys = torch.arange(8.0).view(4, 1, 2)
    slots.cache.layer(0, keys, keys)[0][0] = keys.transpose(0, 1)
    slot, _, _ = slots.allocate([1, 2, 3, 4], "a")
    slot.cached = 4
    assert slots.ensure_length(9)
    assert slots.allocate([9, 9], "b") is not None
    assert torch.equal(slots.cache.layers[0][0][slot.index, :, :4], keys.transpose(0, 1))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(2, 60), st.booleans()), max_size=30))
def test_the_budget_holds_whatever_is_asked(asked):
    slots = make()
    busy = []
    for session, length, ends in asked:
        lent = slots.allocate([session] * length, str(session))
        if lent is not None:
            busy.append(lent[0])
            if not slots.ensure_length(length):
                slots.drop(busy.pop())
        if ends and busy:
            slot = busy.pop()
            slot.cached = min(len(slot.tokens), slots.cache.length)
            slots.finish(slot)
        assert len(slots) * slots.cache.length <= 64
        assert len({slot.index for slot in busy}) == len(busy)
        assert all(slot.index < len(slots) for slot in busy)
