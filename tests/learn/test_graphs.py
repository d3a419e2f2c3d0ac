"""Lines that are padded to the sizes of a CUDA graph keep their hidden states and gradients. The graphs run in test_cuda.py."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentfly.learn.model import graphs
from agentfly.learn.model.graphs import NEXT, ROOM, SPARE, WASTE, Graphs, Sizes, SurplusTake, _beginning, pad_rows
from agentfly.learn.packed import PackedLayout, packed_replica, run_packed
from tests.close import assert_close_to_norm
from tests.engines.tiny import make_model

CPU = torch.device("cpu")


def line_of(rows: list[tuple[int, int]]) -> PackedLayout:
    """Rows of (tokens shared with the row before, own tokens)."""
    keys: list[np.ndarray] = []
    size = 0
    for shared, own in rows:
        before = keys[-1][:shared] if keys else np.zeros(0, np.int64)
        keys.append(np.concatenate([before, np.arange(size, size + own)]))
        size += own
    return PackedLayout([own for _, own in rows], CPU, keys)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), min_size=1, max_size=40))
def test_new_sizes_hold_the_line_they_are_made_for(rows: list[tuple[int, int]]) -> None:
    layout = line_of(rows)
    line = Sizes.of(layout)
    sizes = line.with_room()
    assert sizes.hold(line)
    lengths, keys = pad_rows(layout, sizes)
    assert sum(lengths) == sizes.tokens
    assert len(lengths) == len(keys) == sizes.rows
    assert max(lengths) <= sizes.longest
    assert sum(map(len, keys)) <= sizes.keys
    assert all(places[-1] == end - 1 for places, end in zip(keys, np.cumsum(lengths), strict=True) if len(places))


def test_a_line_that_would_waste_too_much_is_not_held() -> None:
    line = Sizes(30_000, 36_000, 120, 400, 500)
    sizes = line.with_room()
    assert sizes.hold(line)
    assert not sizes.hold(line._replace(tokens=int(sizes.tokens / WASTE) - 1))
    assert not sizes.hold(line._replace(tokens=sizes.tokens + 1))
    assert not sizes.hold(line._replace(longest=sizes.longest + 1))
    assert not sizes.hold(line._replace(keys=sizes.keys))


@pytest.mark.parametrize("tokens", [1, 500, 4000])
def test_a_small_graph_runs_all_shorter_lines(tokens: int) -> None:
    """To compute a few thousand tokens in vain takes less time than to launch the kernels one by one."""
    sizes = Sizes(4000, 5000, 20, 400, 500).with_room()
    line = Sizes(tokens, tokens * 5 // 4, -(-tokens // 200), min(tokens, 400), min(tokens * 5 // 4, 500))
    assert sizes.tokens - 4000 < SPARE
    assert sizes.hold(line)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(1, 400)), min_size=1, max_size=40))
def test_neighbours_are_captured_with_the_beginning_of_a_line(rows: list[tuple[int, int]]) -> None:
    layout = line_of(rows)
    line = Sizes.of(layout)
    longer, shorter = (line.with_room(ROOM * factor) for factor in (NEXT, 1 / NEXT))
    assert _beginning(layout, longer) is layout
    part = _beginning(layout, shorter)
    if part is not None:
        assert part.lengths == layout.lengths[: len(part.lengths)]
        assert shorter.can_run(Sizes.of(part))
        lengths, keys = pad_rows(part, shorter)
        assert (sum(lengths), len(lengths)) == (shorter.tokens, shorter.rows)
        assert sum(map(len, keys)) <= shorter.keys


def test_lines_around_the_first_one_have_a_graph() -> None:
    line = Sizes(4000, 5000, 20, 400, 500)
    sizes = [line.with_room(ROOM * factor) for factor in (1 / NEXT, 1.0, NEXT)]
    for tokens in range(2600, 5900, 100):
        each = line._replace(tokens=tokens, keys=tokens * 5 // 4, rows=tokens // 200)
        assert any(graph.hold(each) for graph in sizes), tokens


def test_padding_changes_neither_hidden_states_nor_gradients() -> None:
    model = make_model("llama")
    replica = packed_replica(model.model)
    layout = line_of([(0, 9), (4, 3), (4, 5)])
    ids = torch.randint(0, 250, (1, 17))
    sizes = Sizes(24, 40, 8, 10, 12)
    lengths, keys = pad_rows(layout, sizes)
    count = sum(own > 0 for own in lengths)
    longer = PackedLayout(lengths[:count], CPU, keys[:count])
    found = []
    for line, tokens in ((layout, ids), (longer, torch.cat([ids, torch.zeros(1, 7, dtype=torch.int64)], 1))):
        out = run_packed(replica, tokens, line)[:, :17]
        found.append((out.detach(), torch.autograd.grad(out.square().sum(), list(replica.parameters()))))
    assert_close_to_norm(found[1][0], found[0][0])
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert_close_to_norm(b, a)


def test_surplus_copies_get_no_gradient_even_if_it_is_not_a_number() -> None:
    take = SurplusTake(6, 3, CPU)
    take.load(np.array([2, 0, 2]))
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    out = take(x)
    assert out[:3].tolist() == [[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]
    grad = torch.ones(6, 2)
    grad[3:] = torch.nan
    out.backward(grad)
    assert x.grad is not None
    assert x.grad.tolist() == [[1.0, 1.0], [0.0, 0.0], [2.0, 2.0]]


def test_a_spare_graph_that_cannot_be_captured_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose memory has no room for the longest line."""
    replica = packed_replica(make_model("llama").model)
    layout = line_of([(0, 400), (200, 100), (200, 120)] * 8)
    line = Sizes.of(layout)
    made: list[Sizes] = []

    def capture(_: object, sizes: Sizes, ids: torch.Tensor, *__: object) -> SimpleNamespace:
        if sizes.tokens > 1.2 * line.tokens:
            raise torch.OutOfMemoryError
        made.append(sizes)
        return SimpleNamespace(sizes=sizes, pool=None)

    monkeypatch.setattr(graphs, "_Graph", capture)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = Graphs(replica)
    found._usable = True
    ids = torch.zeros(1, line.tokens, dtype=torch.int64)
    found._capture_neighbours(line, ids, layout)
    assert [sizes.tokens < line.tokens for sizes in made] == [True]
    assert found.usable
    assert found._capture(line.with_room(ROOM * NEXT), ids, layout) is None
    assert not found.usable


def test_no_graph_is_captured_while_lines_have_other_sizes_than_they_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update of `train.max_tokens_per_batch = "auto"` has small batches, whose graphs would never be used again."""
    made: list[Sizes] = []

    class Fake:
        def __init__(self, _: object, sizes: Sizes, *__: object) -> None:
            self.sizes, self.parameters, self.pool = sizes, [], None
            made.append(sizes)

        def load(self, *_: object) -> None: ...

        def replay_forward(self) -> torch.Tensor:
            return torch.zeros(1, self.sizes.tokens, 2)

    monkeypatch.setattr(graphs, "_Graph", Fake)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    found = Graphs(packed_replica(make_model("llama").model))
    found._usable = True
    layout = line_of([(0, 400), (200, 100), (200, 120)] * 8)
    ids = torch.zeros(1, sum(layout.lengths), dtype=torch.int64)
    found.settled = False
    for _ in range(3):
        assert found.run(ids, layout) is None
    assert not made
    found.settled = True
    out = found.run(ids, layout)
    assert out is not None
    assert out.shape[1] == ids.shape[1]
    assert len(made) == 3, "with those for longer and shorter lines"
    assert found.run(ids[:, :400], line_of([(0, 400)])) is not None, "a short line uses a longer graph"
    assert len(made) == 3
