"""Prefixes found by hashes of pages: the longest common one, also where hashes collide, and none of older weights."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agentfly.engines.local import page_allocator
from agentfly.engines.local.page_allocator import PAGE_SIZE, PageAllocator, page_hashes

from .tiny import check_pages


def common_pages(a: list[int], b: list[int]) -> int:
    count = 0
    while a[: (count + 1) * PAGE_SIZE] == b[: (count + 1) * PAGE_SIZE] and len(a) >= (count + 1) * PAGE_SIZE <= len(b):
        count += 1
    return count


def play(pages: PageAllocator, tokens: list[int], session: str = "") -> Any:
    """Allocate, share, compute and finish a sequence. Returns (source's tokens, prefix length) as allocated."""
    seq, source, count = pages.allocate(tokens, session)
    found = (None if source is None else list(source.tokens), count)
    if source is not None:
        pages.share(seq, source, count)
    assert pages.grow(seq, len(tokens))
    seq.cached = len(tokens) - 1
    pages.finish(seq)
    return found


def random_tokens(rng: random.Random) -> list[int]:
    """Prompts that often share some pages: each page is one of two."""
    return [token for _ in range(rng.randint(1, 5)) for token in [rng.randrange(2) + 40_000] * PAGE_SIZE][: rng.randint(2, 80)]


def test_the_longest_common_prefix_of_full_pages_is_found() -> None:
    rng = random.Random(1)
    pages = PageAllocator(4000)
    cached: list[list[int]] = []
    for _ in range(300):
        tokens = random_tokens(rng)
        source, count = play(pages, list(tokens))
        best = max((common_pages(old[:-1], tokens[:-1]) for old in cached), default=0)
        assert count == best * PAGE_SIZE
        assert best == 0 or source[:count] == tokens[:count]
        cached.append(tokens)
    check_pages(pages)


def test_hashes_that_collide_share_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        page_allocator, "page_hashes", lambda tokens, parent: [number % 2 for number in page_hashes(tokens, parent)]
    )
    rng = random.Random(2)
    pages = PageAllocator(25)  # few: sequences are evicted, and leave the index
    for number in range(400):
        tokens = random_tokens(rng)
        source, count = play(pages, list(tokens), f"{number % 9}")
        assert source is None or source[:count] == tokens[:count]
        if number % 50 == 0:
            pages.renew(number + 1)
        check_pages(pages)
    assert pages.num_evicted > 0


def test_equal_pages_after_different_beginnings_are_not_equal_prefixes() -> None:
    pages = PageAllocator(100)
    play(pages, [1] * PAGE_SIZE + [7] * (PAGE_SIZE + 1))
    assert play(pages, [2] * PAGE_SIZE + [7] * (PAGE_SIZE + 1)) == (None, 0)


def test_a_sequence_that_spans_two_publications_is_no_source_and_not_found_again_by_its_own_chain() -> None:
    pages = PageAllocator(100)
    tokens = list(range(50))
    seq, _, _ = pages.allocate(tokens, "a")
    assert pages.grow(seq, 50)
    seq.cached = 49
    pages.renew(1, {seq})
    assert seq.cached == 49
    assert pages.allocate(list(tokens), "b")[1:] == (None, 0)
    pages.finish(seq)
    again, source, _ = pages.allocate([*tokens, 5, 6], "a")
    assert again.cached == 0
    assert source is None or source.session == "b"  # which is of the new weights
    check_pages(pages)


def test_a_sibling_that_has_nothing_yet_moves_to_the_new_publication_and_can_be_shared_from() -> None:
    pages = PageAllocator(100)
    first, _, _ = pages.allocate(list(range(50)), "a")
    pages.renew(1)
    second, source, count = pages.allocate(list(range(50)), "b")
    assert (source, count) == (first, 48)
    assert first.publication == second.publication == 1


def test_the_index_is_empty_when_all_sequences_are_gone() -> None:
    rng = random.Random(3)
    pages = PageAllocator(200)
    for number in range(100):
        play(pages, random_tokens(rng), f"{number % 7}")
    pages.renew(1)
    assert not pages._index._holders
    assert pages.num_free == 199


def test_siblings_that_come_one_after_another_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []
    monkeypatch.setattr(
        page_allocator, "page_hashes", lambda tokens, parent: hashed.append(len(tokens)) or page_hashes(tokens, parent)
    )
    pages = PageAllocator(100)
    prompt = list(range(4 * PAGE_SIZE))
    alone, *others = [pages.allocate(list(prompt), f"{number}") for number in range(4)]
    assert hashed == [len(prompt) - 1]
    assert alone[1] is None and all(source is alone[0] and count == 3 * PAGE_SIZE for _, source, count in others)
    other = pages.allocate([*prompt[:-PAGE_SIZE], *[7] * PAGE_SIZE], "other")
    assert len(hashed) == 2 and other[2] == 3 * PAGE_SIZE
    pages.allocate(prompt[: 2 * PAGE_SIZE], "shorter")
    assert len(hashed) == 3


def test_after_new_weights_nothing_of_the_ended_chains_is_found() -> None:
    pages = PageAllocator(100)
    prompt = list(range(4 * PAGE_SIZE))
    play(pages, list(prompt), "ended")
    running, _, _ = pages.allocate(list(prompt), "running")
    pages.renew(1)
    seq, source, count = pages.allocate(list(prompt), "new")
    assert source is running and count == 3 * PAGE_SIZE
    for each in (seq, running):
        pages.drop(each)
    assert pages.allocate(list(prompt), "last")[1] is None
    check_pages(pages)
