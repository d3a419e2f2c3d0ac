"""The engine over pages says what the engine over slots says, and its books of pages always balance."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from agentfly.engines.local import decode_batch, paged_attention, paged_scheduler, prefill
from agentfly.engines.local.page_allocator import PAGE_SIZE, PageAllocator
from agentfly.engines.local.paged_attention import TILE, PrefillArrays
from agentfly.engines.local.sampler import draw, draw_batch
from agentfly.errors import ConfigError, EngineError
from agentfly.types import Sampling

from ..needs import has_interpreter
from .tiny import FAMILIES, ask, ask_or_leave, check_pages, close_to, full_logprobs, make_model, prompt_of, run, until

DRAWS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1, "top_k": 20, "top_p": 0.9},
]


@pytest.fixture(params=[0, 1], ids=["finished at once", "one launch ahead"])
def ahead(request: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """On a GPU the next launch starts before the last has finished; here both ways are run."""
    monkeypatch.setattr(paged_scheduler, "LAUNCHES_AHEAD", {"cpu": request.param, "cuda": request.param})
    return int(request.param)


class SlowPass:
    """A prefill pass that is computed only after `done` was called a few times, or when the stream must wait for it."""

    patience = 3

    def __init__(self, work: Callable[[], Any], before: SlowPass | None) -> None:
        self.work: Callable[[], Any] | None = work
        self.before, self.asked = before, 0

    def done(self) -> bool:
        self.asked += 1
        if self.asked > self.patience:
            self.block_stream()
        return self.work is None

    def block_stream(self) -> None:
        if self.before is not None:
            self.before.block_stream()
        if self.work is not None:
            self.work()
        self.work = self.before = None


@pytest.fixture(params=[False, True], ids=["prefilled at once", "prefilled beside launches"])
def slow(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a prefill pass runs beside decode launches; here it is postponed, which is the worst case."""
    if request.param:
        postpone_passes(monkeypatch)


def postpone_passes(monkeypatch: pytest.MonkeyPatch, patience: int = 3) -> None:
    run_pass = prefill.Prefiller.run
    last: list[SlowPass] = []

    def postponed(self: Any, chunks: Any) -> SlowPass:
        kept = [(list(ids), list(pages), past) for ids, pages, past in chunks]
        last[:] = [SlowPass(lambda: run_pass(self, kept), last[0] if last else None)]
        return last[0]

    monkeypatch.setattr(SlowPass, "patience", patience)
    monkeypatch.setattr(prefill.Prefiller, "run", postponed)


@pytest.mark.usefixtures("ahead", "slow")
@pytest.mark.parametrize("family", FAMILIES)
def test_many_chains_of_several_turns_are_those_of_the_slots(family: str) -> None:
    model = make_model(family)

    async def chain(engine: Any, number: int) -> list[Any]:
        prompt = [*prompt_of(20), *prompt_of(5 + 3 * number, number)]
        said = []
        for turn in range(3):
            options = {**DRAWS[number % len(DRAWS)], "seed": 10 * number + turn, "max_tokens": 6 + number}
            completion = await ask(engine, prompt, f"chain {number}", **options)
            temperature = options["temperature"] or 1.0
            assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids, temperature))
            said.append((completion.token_ids, completion.stop))
            prompt = [*prompt, *completion.token_ids, *prompt_of(7, turn + 50)]
        engine.release(f"chain {number}")
        return said

    async def work(engine: Any) -> Any:
        return await asyncio.gather(*(chain(engine, number) for number in range(9)))

    ours = run(work, model, cache="pages", max_step_tokens=48, max_batch=6)
    assert ours == run(work, model, max_step_tokens=48, max_batch=6)


def test_siblings_read_the_full_pages_of_their_prompt_once() -> None:
    model = make_model()
    prompt = prompt_of(100)

    async def work(engine: Any) -> Any:
        chains = [ask(engine, prompt, f"chain {i}", temperature=1, seed=i, max_tokens=8) for i in range(8)]
        return await asyncio.gather(*chains), engine.stats()

    done, stats = run(work, model, cache="pages", max_step_tokens=32)
    full = 99 // PAGE_SIZE * PAGE_SIZE
    assert stats["shared_tokens"] == 7 * full
    assert stats["prefilled_tokens"] == 99 + 7 * (99 - full)
    for completion in done:
        assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))


@pytest.mark.usefixtures("ahead", "slow")
def test_later_turns_read_only_what_is_new() -> None:
    async def work(engine: Any) -> Any:
        prompt, read = prompt_of(40), []
        for turn in range(3):
            before = engine.stats()["prefilled_tokens"]
            completion = await ask(engine, prompt, "chain", temperature=0, max_tokens=8)
            read.append(engine.stats()["prefilled_tokens"] - before)
            prompt = [*prompt, *completion.token_ids, *prompt_of(10, turn + 1)]
        return read

    assert run(work, cache="pages") == [39, 10, 10]


@pytest.mark.usefixtures("ahead", "slow")
def test_a_pool_too_small_for_all_sends_rows_back_and_still_says_the_same() -> None:
    model = make_model()

    async def work(engine: Any) -> Any:
        asked = [ask(engine, prompt_of(30 + i, i), f"chain {i}", seed=i, max_tokens=40) for i in range(6)]
        done = await asyncio.gather(*asked)
        return [completion.token_ids for completion in done], engine.stats()["preempted"]

    tight, preempted = run(work, model, cache="pages", kv_tokens=160, max_context=96)
    roomy, _ = run(work, model, cache="pages", kv_tokens=4096, max_context=96)
    assert preempted > 0
    assert tight == roomy


@pytest.mark.usefixtures("ahead", "slow")
def test_rows_at_the_far_end_move_into_free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    sizes: list[int] = []
    step = decode_batch.DecodeBatch._step
    monkeypatch.setattr(
        decode_batch.DecodeBatch, "_step", lambda self, size, cuts: (sizes.append(size), step(self, size, cuts))
    )

    async def work(engine: Any) -> Any:
        def options(number: int) -> dict[str, Any]:
            return {**DRAWS[number % len(DRAWS)], "seed": number, "max_tokens": 60 if number in (1, 6, 7) else 5 + number}

        with engine.hold():  # they come all at once, also on a busy machine
            asked = [
                asyncio.ensure_future(ask(engine, prompt_of(9 + number, number), f"{number}", **options(number)))
                for number in range(8)
            ]
            await until(lambda: len(engine._inbox) == 8)
        said = await asyncio.gather(*asked)
        return [(completion.token_ids, completion.stop) for completion in said]

    ours = run(work, model, cache="pages", stop_ids=[])
    assert max(sizes) >= 6 and sizes[-16:] == [3] * 16
    assert ours == run(work, model, stop_ids=[])


@pytest.mark.usefixtures("ahead", "slow")
def test_a_launch_is_short_and_moves_no_row_while_others_wait_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[int, int, int]] = []
    launch = decode_batch.DecodeBatch.launch

    def record(self: Any, rows: Any, steps: int, joining: int) -> Any:
        launches.append((len(rows), steps, joining))
        return launch(self, rows, steps, joining)

    monkeypatch.setattr(decode_batch.DecodeBatch, "launch", record)

    async def work(engine: Any) -> Any:
        with engine.hold():
            asked = [
                asyncio.ensure_future(ask(engine, prompt_of(120, number), f"{number}", temperature=0, max_tokens=40))
                for number in range(6)
            ]
            await until(lambda: len(engine._inbox) == 6)
        return [completion.token_ids for completion in await asyncio.gather(*asked)]

    sizes = {"cache": "pages", "stop_ids": [], "max_step_tokens": 150}  # one prompt a pass
    said = run(work, **sizes)
    waiting = [(rows, steps, joining) for rows, steps, joining in launches if joining]
    full = max(steps for _, steps, joining in launches if not joining)
    assert waiting and all(steps == -(-full * rows // (rows + joining)) for rows, steps, joining in waiting[:3])
    assert said == run(work, stop_ids=[])


@pytest.mark.parametrize("seed", range(5))
def test_the_layout_of_a_pass_places_every_token(seed: int) -> None:
    rng = random.Random(seed)
    rows = []
    for _ in range(rng.randint(1, 9)):
        past, count = rng.randint(0, 70), rng.randint(1, 150)
        rows.append((rng.sample(range(1, 999), -(-(past + count) // PAGE_SIZE)), past, count))
    found = PrefillArrays.of(rows, 20)
    tokens = [(pages, at) for pages, past, count in rows for at in range(past, past + count)]
    assert found.positions.tolist() == [at for _, at in tokens]
    assert found.places.tolist() == [pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for pages, at in tokens]
    assert found.table.tolist() == [pages + [0] * (20 - len(pages)) for pages, _, _ in rows]
    assert found.past.tolist() == [past for _, past, _ in rows]
    assert found.starts.tolist() == [0, *itertools.accumulate(count for _, _, count in rows)]
    tiles = [(number, first) for number, (_, _, count) in enumerate(rows) for first in range(0, count, TILE)]
    assert list(zip(found.tile_rows.tolist(), found.tile_queries.tolist(), strict=True)) == tiles


def test_the_graph_of_a_pass_reads_what_a_pass_without_a_graph_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of many and of few sequences in turn: what an earlier one has left in the buffer does not matter."""

    class Upload:
        def __init__(self, size: int) -> None:
            self._tensor = torch.zeros(size, dtype=torch.int32)
            self.array = self._tensor.numpy()

        def wait(self) -> None:
            pass

        def copy_to(self, target: torch.Tensor, count: int) -> None:
            target[:count] = self._tensor[:count]

    monkeypatch.setattr(prefill, "_Upload", Upload)
    monkeypatch.setattr(prefill, "capture", lambda work, *given: (work, None))
    model, rng = make_model(), random.Random(7)
    seen: list[tuple[Any, Any]] = []
    prefiller = prefill.Prefiller(model, None, max_tokens=1024, max_context=640, device=torch.device("cpu"), times={})  # type: ignore[arg-type]
    monkeypatch.setattr(prefiller, "forward", lambda ids, metadata: seen.append((ids, metadata)))
    graph = prefill._PrefillGraph(prefiller, 1024)
    for count in (200, 3, 256, 1, 90):
        chunks = []
        for _ in range(count):
            past, new = rng.randint(0, 500), rng.randint(1, 4)
            pages = rng.sample(range(1, 999), -(-(past + new) // PAGE_SIZE))
            chunks.append((prompt_of(new, past), pages, past))
        graph.run(chunks)
        ids, found = seen[-1]
        rows = [(pages, past, len(ids)) for ids, pages, past in chunks]
        want = paged_attention.PrefillMetadata.of(None, rows, torch.device("cpu"))  # type: ignore[arg-type]
        tokens, tiles = len(want.positions), len(want.tile_rows)
        assert ids[0, :tokens].tolist() == [token for ids, _, _ in chunks for token in ids]
        for name, size in (("places", tokens), ("positions", tokens), ("starts", count + 1), ("past", count)):
            assert torch.equal(getattr(found, name)[:size], getattr(want, name)), name
        assert torch.equal(found.tile_rows[:tiles], want.tile_rows)
        assert torch.equal(found.tile_queries[:tiles], want.tile_queries)
        for number, (pages, _, _) in enumerate(rows):
            assert found.table[number, : len(pages)].tolist() == list(pages)
        # Padding: the places of no sequence are on page 0, and tiles without work belong to an empty row.
        assert not found.places[tokens:].any()
        idle = found.tile_rows[tiles:].unique().tolist()
        assert idle == [256] and found.starts[256] == found.starts[257] == tokens and not found.past[256]


@pytest.mark.usefixtures("ahead")
def test_a_sibling_sits_down_only_when_what_it_shares_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    postpone_passes(monkeypatch)
    model = make_model()
    prompt = prompt_of(4 * PAGE_SIZE + 1)  # all but the last token can be shared

    async def work(engine: Any) -> Any:
        other = asyncio.ensure_future(ask(engine, prompt_of(9, 5), temperature=1, seed=1, max_tokens=150))
        await until(lambda: engine.stats()["sampled_tokens"] > 8)
        siblings = [ask(engine, prompt, f"{number}", temperature=1, seed=number, max_tokens=5) for number in range(3)]
        said = await asyncio.gather(*siblings)
        await other
        assert engine.stats()["shared_tokens"] >= 4 * PAGE_SIZE
        return said

    for completion in run(work, model, cache="pages", stop_ids=[]):
        assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))


@pytest.mark.parametrize("patience", [1, 3])
def test_rows_cancelled_during_prefill_leave_the_other_rows_unchanged(patience: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_scheduler, "LAUNCHES_AHEAD", {"cpu": 1})
    postpone_passes(monkeypatch, patience)
    model = make_model()
    rng = random.Random(0)

    async def chain(engine: Any, number: int) -> None:
        prompt = [*prompt_of(rng.choice([10, 33])), *prompt_of(rng.randint(1, 20), number)]
        for turn in range(3):
            completion = await ask(engine, prompt, f"{number}", seed=turn, max_tokens=rng.randint(1, 90))
            assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))
            prompt = [*prompt[: rng.randint(5, 50)], *completion.token_ids, *prompt_of(rng.randint(1, 9), turn)]

    async def work(engine: Any) -> Any:
        await asyncio.gather(*(chain(engine, number) for number in range(48)))
        check_pages(engine._scheduler.allocator)
        return engine.stats()

    stats = run(work, model, cache="pages", stop_ids=[], kv_tokens=1200, max_context=250, max_batch=32, max_step_tokens=128)
    assert 0 < stats["preempted"] < 200  # of 144 requests; one that goes back does not come again at once
    assert stats["evicted"] > 0


def test_no_request_waits_after_a_shortage_of_pages_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[int] = []
    admit = paged_scheduler.PagedScheduler._admit

    def count(self: Any) -> None:
        admit(self)
        running.append(len(self.running))

    monkeypatch.setattr(paged_scheduler.PagedScheduler, "_admit", count)

    async def work(engine: Any) -> None:
        await asyncio.gather(*(ask(engine, prompt_of(20, i), seed=i, max_tokens=600) for i in range(3)))
        assert engine.stats()["preempted"] > 0
        running.clear()
        with engine.hold():  # they come all at once
            asked = [asyncio.ensure_future(ask(engine, prompt_of(8, i), seed=i, max_tokens=20)) for i in range(40)]
            await until(lambda: len(engine._inbox) == 40)
        await asyncio.gather(*asked)

    run(work, cache="pages", stop_ids=[], kv_tokens=1500, max_context=700, max_batch=40)
    assert max(running) > 20


def test_no_request_is_admitted_or_finished_while_the_engine_is_held() -> None:
    """A publish may replace the decode batch meanwhile."""

    async def work(engine: Any) -> None:
        leaving = asyncio.ensure_future(ask(engine, prompt_of(9), max_tokens=1500))
        await until(lambda: engine._scheduler.running)
        with engine.hold():
            asked = asyncio.ensure_future(ask(engine, prompt_of(9, 1), max_tokens=2))
            leaving.cancel()
            await asyncio.sleep(0.1)
            assert not engine._scheduler.queue
            assert len(engine._scheduler.running) == 1
        assert len((await asked).token_ids) == 2
        await until(lambda: not engine._scheduler.running)

    run(work, cache="pages", stop_ids=[], max_context=1600)


def test_holding_up_an_idle_engine_does_not_end_its_thread() -> None:
    async def work(engine: Any) -> None:
        await ask(engine, prompt_of(9), max_tokens=2)
        await until(lambda: not engine._scheduler.busy)
        thread = engine._thread
        with engine.hold():
            pass
        await asyncio.sleep(0.1)
        assert engine._thread is thread
        assert thread.is_alive()

    run(work, cache="pages", stop_ids=[])


def test_a_device_that_fails_again_at_shutdown_leaves_no_request_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any, *given: Any) -> Any:
        raise RuntimeError("the device is lost")

    async def work(engine: Any) -> None:
        monkeypatch.setattr(paged_scheduler.PagedScheduler, "step", fail)
        monkeypatch.setattr(paged_scheduler.PagedScheduler, "_wait_for_prefill", fail)
        with pytest.raises(EngineError, match="the device is lost"):
            await asyncio.wait_for(ask(engine, prompt_of(9), max_tokens=2), 60)

    run(work, cache="pages")


def test_event_loops_wait_for_the_host_work_of_a_launch_and_not_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_scheduler, "LAUNCHES_AHEAD", {"cpu": 1, "cuda": 1})
    seen: dict[str, set[bool]] = {"launch": set(), "wait": set()}
    launch, wait = decode_batch.DecodeBatch.launch, paged_scheduler.PagedScheduler._finish

    async def work(engine: Any) -> None:
        def launched(*args: Any) -> Any:
            seen["launch"].add(engine._turn.locked())
            return launch(*args)

        def finished(scheduler: Any, each: Any, changed: Any) -> None:
            device_wait = each.inflight.wait
            calls = iter(["first", "second"])

            def waited() -> Any:
                if next(calls) == "first":
                    seen["wait"].add(engine._turn.locked())
                return device_wait()

            each.inflight.wait = waited
            wait(scheduler, each, changed)

        monkeypatch.setattr(decode_batch.DecodeBatch, "launch", launched)
        monkeypatch.setattr(paged_scheduler.PagedScheduler, "_finish", finished)
        reply = await ask(engine, prompt_of(20, 1), max_tokens=20)
        assert reply.token_ids

    run(work, cache="pages")
    assert seen == {"launch": {True}, "wait": {False}}


def test_a_request_that_arrives_while_a_launch_runs_takes_part_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_scheduler, "LAUNCHES_AHEAD", {"cpu": 1, "cuda": 1})
    queued: list[int] = []
    step = paged_scheduler.PagedScheduler.step

    async def work(engine: Any) -> None:
        arrived = threading.Event()

        def near_end(inflight: Any) -> None:
            assert arrived.wait(60)

        def stepped(scheduler: Any, *given: Any) -> Any:
            queued.append(len(scheduler.queue))
            return step(scheduler, *given)

        monkeypatch.setattr(decode_batch.InFlight, "wait_until_near_end", near_end)
        monkeypatch.setattr(paged_scheduler.PagedScheduler, "step", stepped)
        first = asyncio.create_task(ask(engine, prompt_of(9, 1), max_tokens=40))
        await until(lambda: len(queued) == 1)  # the thread waits for the end of the first launch
        second = asyncio.create_task(ask(engine, prompt_of(9, 2), max_tokens=4))
        await until(lambda: engine.stats()["requests"] == 2)
        arrived.set()
        await asyncio.gather(first, second)

    run(work, cache="pages", stop_ids=[])
    assert queued[:2] == [1, 1]


def test_an_event_loop_waits_for_a_long_launch_for_a_limited_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_scheduler, "LAUNCHES_AHEAD", {"cpu": 1, "cuda": 1})

    async def work(engine: Any) -> None:
        with engine._turn:  # as if the engine's thread captured a graph
            asked = asyncio.create_task(ask(engine, prompt_of(20, 1), max_tokens=4))
            await until(lambda: engine.stats()["requests"] == 1)
        assert (await asked).token_ids

    run(work, cache="pages")


def test_siblings_are_admitted_by_the_pages_that_they_share() -> None:
    prompt = prompt_of(20 * PAGE_SIZE)

    async def work(engine: Any) -> bool:
        going = asyncio.gather(*(ask(engine, prompt, f"{n}", temperature=1, seed=n, max_tokens=140) for n in range(8)))
        await until(lambda: len(engine._scheduler._entries) == 8)
        with engine.hold():
            batch = engine._scheduler
            rows = list(batch.running)
            found = batch._has_room(rows[0])
            everything = sum(len(row.kv.pages) for row in rows)
        await going
        return bool(found and everything > batch.allocator.num_pages)

    assert run(work, cache="pages", stop_ids=[], kv_tokens=100 * PAGE_SIZE, max_context=30 * PAGE_SIZE)


@pytest.mark.usefixtures("ahead")
def test_a_pass_of_a_removed_sequence_does_not_overwrite_the_next_holder_of_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    postpone_passes(monkeypatch, patience=50)  # without the wait it would be computed about 200 tokens later
    monkeypatch.setattr(paged_scheduler.PagedScheduler, "_steps_per_launch", lambda self: 4)
    model = make_model()

    async def work(engine: Any) -> Any:
        staying = asyncio.ensure_future(ask(engine, prompt_of(9, 5), "a", temperature=1, seed=1, max_tokens=220))
        await until(lambda: engine.stats()["sampled_tokens"] > 4)
        leaving = asyncio.ensure_future(ask(engine, prompt_of(9 * PAGE_SIZE), "b", max_tokens=5))
        await until(lambda: engine._scheduler._passes)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        completion = await staying
        assert engine.stats()["evicted"] == 1
        return completion

    completion = run(work, model, cache="pages", stop_ids=[], kv_tokens=15 * PAGE_SIZE, max_context=15 * PAGE_SIZE)
    assert close_to(completion.logprobs, full_logprobs(model, prompt_of(9, 5), completion.token_ids))


@pytest.mark.usefixtures("ahead", "slow")
def test_stop_ids_and_stop_strings_end_a_reply_inside_a_round() -> None:
    model = make_model()

    async def work(engine: Any) -> Any:
        whole = await ask(engine, prompt_of(12), temperature=1, seed=3, max_tokens=20)
        third = whole.token_ids[2]
        by_id = await ask(engine, prompt_of(12), temperature=1, seed=3, max_tokens=20, stop_ids=(third,))
        text = engine.tokenizer.decode(whole.token_ids[:5])
        by_text = await ask(engine, prompt_of(12), temperature=1, seed=3, max_tokens=20, stop=(text[-1],))
        after = await ask(engine, [*prompt_of(12), *by_text.token_ids, 9, 9], "x", temperature=0, max_tokens=4)
        return whole, by_id, by_text, after

    whole, by_id, by_text, after = run(work, model, cache="pages")
    assert by_id.token_ids == whole.token_ids[: whole.token_ids.index(whole.token_ids[2]) + 1]
    assert by_id.stop == "stop"
    assert by_text.stop == "stop"
    assert by_text.token_ids == whole.token_ids[: len(by_text.token_ids)]
    assert len(by_text.token_ids) <= 5
    again = [*prompt_of(12), *by_text.token_ids, 9, 9]
    assert close_to(after.logprobs, full_logprobs(model, again, after.token_ids))


def test_new_weights_are_used_from_the_next_token_and_old_keys_never() -> None:
    model = make_model()

    async def work(engine: Any) -> Any:
        prompt = prompt_of(40)
        await ask(engine, prompt, "chain", temperature=0, max_tokens=8)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        engine.publish(1)
        return await ask(engine, prompt, "chain", temperature=0, max_tokens=8)

    completion = run(work, model, cache="pages")
    assert set(completion.versions) == {1}
    assert close_to(completion.logprobs, full_logprobs(model, prompt_of(40), completion.token_ids))


@pytest.mark.usefixtures("ahead", "slow")
def test_a_publish_in_the_middle_of_a_reply_goes_on_with_the_new_weights() -> None:
    model = make_model()

    async def work(engine: Any) -> Any:
        asked = asyncio.ensure_future(ask(engine, prompt_of(20), "chain", temperature=1, seed=1, max_tokens=1000))
        await until(lambda: engine.stats()["sampled_tokens"] > 10)
        with engine.hold():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
            engine.publish(1)
        return await asked

    completion = run(work, model, cache="pages", stop_ids=[], max_context=1100, kv_tokens=2400)
    first = completion.versions.index(1)
    assert completion.versions == [0] * first + [1] * (len(completion.versions) - first)
    now = full_logprobs(model, prompt_of(20), completion.token_ids)
    assert close_to(completion.logprobs[first:], now[first:])


@pytest.mark.usefixtures("ahead")
def test_a_storm_of_cancelled_repeated_and_rewritten_chains_leaves_the_books_balanced() -> None:
    model = make_model()
    rng = random.Random(4)

    async def chain(engine: Any, number: int) -> None:
        prompt = [*prompt_of(rng.choice([10, 33, 64])), *prompt_of(rng.randint(1, 30), number)]
        for turn in range(rng.randint(1, 4)):
            given = {"seed": turn, "max_tokens": rng.randint(1, 12)}
            completion = await ask_or_leave(engine, rng, 0.3, prompt, f"s{number % 17}", **given)
            if completion is None:
                continue
            assert close_to(completion.logprobs, full_logprobs(model, prompt, completion.token_ids))
            cut = rng.randint(5, len(prompt)) if rng.random() < 0.2 else len(prompt)
            prompt = [*prompt[:cut], *completion.token_ids, *prompt_of(rng.randint(1, 9), turn)]
        engine.release(f"s{number % 17}")

    async def work(engine: Any) -> None:
        for _ in range(3):
            await asyncio.gather(*(chain(engine, number) for number in range(40)))
            await until(lambda: not engine._scheduler.busy and not engine._inbox)
            check_pages(engine._scheduler.allocator)

    run(work, model, cache="pages", kv_tokens=1200, max_context=160, max_batch=12, max_step_tokens=64)


def test_pages_balance_under_ten_thousand_random_events() -> None:
    rng = random.Random(7)
    pages = PageAllocator(24)
    running: list[Any] = []
    publication = 0
    for event in range(10_000):
        what = rng.random()
        if what < 0.4 and len(running) < 6:
            tokens = [rng.randrange(3) for _ in range(rng.randint(2, 60))]
            if rng.random() < 0.7:
                tokens[: len(tokens) // 2] = [1] * (len(tokens) // 2)
            slot, source, count = pages.allocate(tokens, rng.choice(["", "a", "b", "c"]))
            if source is not None and source.cached >= count:
                assert source.tokens[:count] == tokens[:count]
                pages.share(slot, source, count)
            running.append(slot)
        elif what < 0.7 and running:
            slot = rng.choice(running)
            length = min(len(slot.tokens), slot.cached + rng.randint(1, 20))
            if pages.grow(slot, length):
                writes = {slot.pages[at // PAGE_SIZE] for at in range(slot.cached, length)}
                assert all(pages._refcounts[page] == 1 for page in writes), "a page that others read was written"
                slot.cached = length
        elif what < 0.9 and running:
            slot = running.pop(rng.randrange(len(running)))
            pages.finish(slot) if rng.random() < 0.7 else pages.drop(slot)
        elif what < 0.95:
            pages.release(rng.choice("abc"))
        elif what < 0.96:
            publication += 1
            pages.audit.publication = publication
            pages.renew(publication, {slot for slot in running if rng.random() < 0.5})
        if event % 7 == 0:
            check_pages(pages)
    for slot in running:
        pages.finish(slot)
    for session in "abc":
        pages.release(session)
    pages.renew(publication + 1)
    check_pages(pages)
    assert pages.num_free == 23
    assert pages.audit.stale_tokens == 0


def test_the_decode_batch_samples_what_the_sampler_samples() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(DRAWS) * 8, 50)
    samplings = [Sampling(**DRAWS[i % len(DRAWS)]) for i in range(len(logits))]
    uniforms = torch.rand(len(logits))
    want_ids, want = draw(logits, samplings, uniforms.tolist())
    temperature, top_p, min_p = (
        torch.tensor([getattr(s, name) for s in samplings]) for name in ("temperature", "top_p", "min_p")
    )
    top_k = torch.tensor([s.top_k for s in samplings])
    ids, logprobs = draw_batch(logits, uniforms, temperature, top_k, top_p, min_p)
    assert ids.tolist() == want_ids
    assert close_to(logprobs.tolist(), want)
    plain = [i for i, s in enumerate(samplings) if s.top_k == 0 and s.top_p == 1.0 and s.min_p == 0.0]
    ids, _ = draw_batch(logits[plain], uniforms[plain], temperature[plain], None, top_p[plain], min_p[plain])
    assert ids.tolist() == [want_ids[i] for i in plain]


def test_an_unknown_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="'slots' or 'pages'"):
        run(lambda engine: asyncio.sleep(0), cache="books")


KERNELS = """
import torch
from tests.close import assert_close_to_norm
from agentfly.engines.local import paged_attention
from agentfly.kernels import paged_attention as kernels
torch.manual_seed(0)

def turn(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[:, None]

def check_new(query, keys, values, table, lengths, options):
    # New keys and values go to their places, and are attended to; rotated before, if asked for.
    rows, heads, dim = query.shape
    kv_heads = keys.shape[2]
    table = torch.arange(1, 37, dtype=torch.int32).view(3, 12)
    last = (lengths.long() - 1).clamp(min=0)
    places = table[torch.arange(3), last // 16].long() * 16 + last % 16
    merged = torch.randn(rows, (heads + 2 * kv_heads) * dim)  # strided, as the parts of a merged product
    q, k, v = (part.view(rows, -1, dim) for part in merged.split([heads * dim, kv_heads * dim, kv_heads * dim], -1))
    cos, sin = torch.randn(2, rows, 2 * dim)[..., :dim]
    for by in (None, (cos, sin)):
        ours, theirs = (keys.clone(), values.clone()), (keys.clone(), values.clone())
        got = kernels.decode(q, *ours, table, lengths, new=kernels.NewToken(k, v, places, by), **options)
        turned = (q, k) if by is None else (turn(q, *by), turn(k, *by))
        live = lengths > 0
        for pool, part in zip(theirs, (turned[1], v)):
            pool.view(-1, kv_heads, dim)[places[live]] = part[live]
        want = paged_attention.decode_reference(turned[0], *theirs, table, lengths, **options)
        assert_close_to_norm(got, want)
        for pool, expected in zip(ours, theirs):
            assert_close_to_norm(pool, expected)

for heads, kv_heads, dim in ((4, 2, 16), (9, 3, 64), (4, 4, 24)):
    for window, softcap in ((None, None), (20, None), (None, 5.0)):
        pools = paged_attention.KVPools(40, [(torch.zeros(1, kv_heads, 1, dim),) * 2])
        keys, values = pools.layers[0]
        keys.normal_(), values.normal_()
        table = torch.randint(1, 40, (3, 12), dtype=torch.int32)
        lengths = torch.tensor([150, 0, 37], dtype=torch.int32)
        options = dict(scale=dim**-0.5, window=window, softcap=softcap)
        query = torch.randn(3, heads, dim)
        for splits in (1, 4):
            kernels.num_splits = lambda _: splits
            got = kernels.decode(query, keys, values, table, lengths, **options)
            want = paged_attention.decode_reference(query, keys, values, table, lengths, **options)
            assert_close_to_norm(got, want)
            check_new(query, keys.clone(), values.clone(), table, lengths, options)
        rows = [(table[0].tolist(), 70, 75), (table[2].tolist(), 0, 5), (table[1].tolist(), 33, 1)]
        plan = paged_attention.PrefillMetadata.of(pools, rows, torch.device("cpu"))
        query = torch.randn(81, heads, dim)
        got = kernels.prefill(query, keys, values, plan, **options)
        assert_close_to_norm(got, paged_attention.prefill_reference(query, keys, values, plan, **options))
print("equal")
"""


@has_interpreter
def test_the_kernels_compute_what_torch_computes() -> None:
    """In Triton's interpreter, which needs no GPU; in a separate process, because it is chosen at the first import."""
    done = subprocess.run(
        [sys.executable, "-c", KERNELS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.stdout.strip() == "equal", done.stderr


def test_a_row_without_tokens_gives_zeros() -> None:
    pools = paged_attention.KVPools(3, [(torch.ones(1, 2, 1, 8),) * 2])
    keys, values = pools.layers[0]
    values.normal_()
    query = torch.randn(2, 4, 8)
    table = torch.tensor([[1], [2]], dtype=torch.int32)
    out = paged_attention.decode_reference(
        query, keys, values, table, torch.tensor([3, 0]), scale=1.0, window=None, softcap=None
    )
    assert torch.isfinite(out).all()
    assert out[1].abs().max() == 0
    assert out[0].abs().max() > 0


ROWS = """
import asyncio
from agentfly.engines.local import decode_batch, paged_scheduler
from agentfly.kernels import decode
from tests.engines.tiny import ask, make_model, prompt_of, run

DRAWS = [{"temperature": 1.0}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}]
paged_scheduler.LAUNCHES_AHEAD = {"cpu": 1}
model, applied = make_model(), []

async def chain(engine, number):
    said, prompt = [], prompt_of(20 + 9 * number, number)
    for turn in range(2):
        options = DRAWS[(number + turn) % 3]
        got = await ask(engine, prompt, f"chain {number}", max_tokens=12 + 60 * (number == 6), seed=number, **options)
        said.append((got.token_ids, got.stop, got.logprobs))
        prompt = [*prompt, *got.token_ids, *prompt_of(7, turn + 50)]
    return said

async def work(engine):
    return await asyncio.gather(*(chain(engine, number) for number in range(7)))

want = run(work, model, cache="pages", max_step_tokens=48, max_batch=5)
apply = decode.apply_changes
decode.apply_changes = lambda changes, counts, *rest, **names: (applied.append(counts), apply(changes, counts, *rest, **names))
decode_batch.has_kernels = lambda device: True
got = run(work, model, cache="pages", max_step_tokens=48, max_batch=5)
for mine, theirs in zip(sum(got, []), sum(want, [])):
    assert mine[:2] == theirs[:2], (mine, theirs)
    assert max(abs(a - b) for a, b in zip(mine[2], theirs[2], strict=True)) < 1e-3, (mine, theirs)
assert all(map(any, zip(*applied))), applied  # rows were added, windows and pages uploaded, rows removed
print("equal")
"""


@has_interpreter
def test_the_kernels_of_the_rows_do_what_torch_does() -> None:
    """A whole engine in Triton's interpreter: changes are applied, steps begun and ended as without kernels."""
    done = subprocess.run(
        [sys.executable, "-c", ROWS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.stdout.strip() == "equal", done.stderr
