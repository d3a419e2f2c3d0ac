"""Our chains as sessions of verl, over a client that stands for its servers. verl itself is not needed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from agentfly import ConfigError, Task
from agentfly.codec import encode
from agentfly.errors import InvariantError, RolloutError
from agentfly.rollout import make_plan, open_environments
from agentfly.testing import END_ID, ByteRenderer
from agentfly.types import Message, Request, Sampling
from agentfly.verl.verl_chains import SPLIT, TASK, LoopSettings, Row, ServerEngine, SessionRunner

from .verl_world import FakeClient, Script, WordAgent, constant, dig, look, number, output, rewriting

RENDERER = ByteRenderer()
STOPS = frozenset({END_ID})


def encode_reply(text: str) -> list[int]:
    return [*RENDERER.encode(text), END_ID]


class Tokenizer:
    def decode(self, ids: list[int], **_: Any) -> str:
        return RENDERER.decode(ids)


def loop(**changes: Any) -> LoopSettings:
    values: dict[str, Any] = {
        "num_chains": 4, "validate_chains": 1, "max_prompt": 200, "max_response": 200, "max_context": 400, "server": "vllm",
        "compares": True, "seeded": True, "seed": 7, "success_at": 2.0, "window": 1000, "max_failed_share": 0.5,
    }  # fmt: skip
    return LoopSettings(**{**values, **changes})


def row(uid: str = "u", session: int = 0, split: str = "train", **more: Any) -> dict[str, Any]:
    task = Task("t1", (Message("user", "Say a number."),), {"answer": "3", "pair": (1, 2)})
    return {"uid": uid, "session_id": session, "global_steps": 5, TASK: encode(task), SPLIT: split, "raw_prompt": [], **more}


def play(
    script: Script,
    settings: LoopSettings | None = None,
    *,
    rows: list[dict[str, Any]] | None = None,
    renderer: Any = RENDERER,
    stop_file: Path | None = None,
    client: FakeClient | None = None,
    temperature: float = 1.0,
    **agent_options: Any,
) -> tuple[list[list[Row] | BaseException], FakeClient]:
    """Run the sessions together, as verl's worker does. Returns the rows or the error of each, and the client."""
    settings = settings or loop()
    client = client or FakeClient(encode_reply, script)
    options = {"tools": [look, dig], "reward": number, "max_turns": 4, **agent_options}
    rows = rows or [row(session=number) for number in range(settings.num_chains)]
    parameters = {"temperature": temperature, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}

    async def run() -> list[list[Row] | BaseException]:
        stub = ServerEngine(None, Tokenizer(), STOPS, {}, settings, 0)
        agent = WordAgent(stub, renderer=renderer, sampling={"max_tokens": 60}, **options)
        async with open_environments(agent, make_plan(agent), 64) as plan:
            runner = SessionRunner(plan, settings, Tokenizer(), STOPS, stop_file=stop_file)
            sessions = [
                runner.run(client, dict(parameters), each, f"{each['uid']}-{each.get('session_id', 0)}") for each in rows
            ]
            return await asyncio.gather(*sessions, return_exceptions=True)  # type: ignore[return-value]

    return asyncio.run(run()), client


def chain_of(session: str) -> int:
    return int(session.rpartition("-")[2])


def only(found: list[Row] | BaseException) -> Row:
    assert isinstance(found, list), found
    (one,) = found
    return one


def test_a_row_has_the_ids_of_the_chain_and_its_mask_covers_what_was_sampled() -> None:
    (found, *_), client = play(lambda session, turn: "look" if turn == 0 else "3")
    made = only(found)
    text = RENDERER.decode([*made.prompt_ids, *made.response_ids])
    carets = " " * len(RENDERER.decode(made.prompt_ids)) + "".join(
        ("^" if flag else " ") * len(RENDERER.decode([token])) for token, flag in zip(made.response_ids, made.mask, strict=True)
    )
    assert "".join(letter for letter, mark in zip(text, carets, strict=True) if mark == "^") == "look<|im_end|>3<|im_end|>"
    assert text.startswith("<|im_start|>user\nSay a number.<|im_end|>\n<|im_start|>assistant\nlook<|im_end|>")
    assert "nothing here" in text
    assert made.prompt_ids == client.calls[0].prompt_ids
    sampled = [value for value, flag in zip(made.logprobs, made.mask, strict=True) if flag]
    assert sampled[:5] == pytest.approx([-0.1, -0.11, -0.12, -0.13, -0.14])
    assert all(value == 0.0 for value, flag in zip(made.logprobs, made.mask, strict=True) if not flag)


def test_all_turns_of_a_chain_ask_with_one_request_id_and_chains_with_different_ones() -> None:
    _, client = play(lambda session, turn: "look" if turn == 0 else "1")
    assert sorted({call.session for call in client.calls}) == ["u-0", "u-1", "u-2", "u-3"]
    assert len(client.calls) == 8


def test_a_row_ends_with_a_sampled_token_though_the_chain_ended_with_an_observation() -> None:
    (found, *_), _ = play(lambda session, turn: "look", max_turns=2, reward=constant)
    made = only(found)
    assert made.mask[-1] == 1
    assert made.response_ids[-1] == END_ID
    assert made.rewards[-1] == made.reward == 1.0


def test_step_rewards_stand_on_the_tokens_that_earned_them() -> None:
    (found, *_), _ = play(lambda session, turn: "dig" if turn == 0 else "2")
    made = only(found)
    placed = {place: value for place, value in enumerate(made.rewards) if value}
    first_end = made.response_ids.index(END_ID)
    assert placed == {first_end: 0.5, len(made.rewards) - 1: 2.0}
    assert made.reward == 2.5
    assert made.extra["reward_extra_info"]["acc"] == 1.0


def test_a_lost_chain_is_an_empty_list_and_its_siblings_are_trained(caplog: pytest.LogCaptureFixture) -> None:
    def script(session: str, turn: int) -> str | Exception:
        return RuntimeError("the server fell over") if chain_of(session) == 1 else str(chain_of(session))

    with caplog.at_level(logging.WARNING):
        found, _ = play(script)
    assert [len(each) if isinstance(each, list) else each for each in found] == [1, 0, 1, 1]
    assert "the server fell over" in caplog.text


def test_an_aborted_request_is_a_lost_chain_and_not_an_empty_reply() -> None:
    def script(session: str, turn: int) -> Any:
        return output([], {}, stop_reason="aborted") if chain_of(session) == 2 else "1"

    found, _ = play(script)
    assert [len(each) if isinstance(each, list) else each for each in found] == [1, 1, 0, 1]


def test_a_group_of_which_nothing_is_left_fails_as_a_group() -> None:
    found, _ = play(lambda session, turn: RuntimeError("down"))
    assert all(isinstance(each, RolloutError) for each in found)
    assert "all 4 chains were lost" in str(found[0])


def script_one_left(session: str, turn: int) -> str | Exception:
    return "1" if chain_of(session) == 0 else RuntimeError("down")


def test_one_chain_that_is_left_is_not_trained_where_siblings_are_compared() -> None:
    found, _ = play(script_one_left)
    assert all(isinstance(each, RolloutError) for each in found)
    assert "no sibling" in str(found[0])
    found, _ = play(script_one_left, loop(compares=False))
    assert [len(each) if isinstance(each, list) else each for each in found] == [1, 0, 0, 0]


def test_rewritten_history_gives_several_rows_and_the_last_has_the_reward_of_the_chain() -> None:
    (found, *_), _ = play(lambda session, turn: "dig" if turn == 0 else "2", loop(max_prompt=399), renderer=rewriting(RENDERER))
    assert isinstance(found, list)
    first, last = found
    assert sum(first.rewards) == 0.0
    assert sum(last.rewards) == last.rewards[-1] == 2.5
    assert first.extra["reward_extra_info"].keys() == last.extra["reward_extra_info"].keys()
    assert len(last.prompt_ids) > len(first.prompt_ids)
    assert RENDERER.decode(last.response_ids) == "2<|im_end|>"


def test_rewritten_history_stops_the_run_where_verl_counts_rows(tmp_path: Path) -> None:
    stop = tmp_path / "stopped.txt"
    settings = loop(one_row="verl counts rows, not chains, for rloo", max_prompt=399)
    found, _ = play(lambda session, turn: "look" if turn == 0 else "2", settings, renderer=rewriting(RENDERER), stop_file=stop)
    assert isinstance(found[0], ConfigError)
    assert "verl counts rows, not chains, for rloo" in stop.read_text()
    found, _ = play(lambda session, turn: "2", settings, renderer=rewriting(RENDERER))  # one turn: one row
    assert only(found[0]).reward == 2.0


def test_every_row_has_the_same_extra_info_whatever_its_chain_did() -> None:
    found, _ = play(lambda session, turn: "dig" if turn == 0 and chain_of(session) else "1")
    keys = {tuple(only(each).extra["reward_extra_info"]) for each in found}
    assert len(keys) == 1


def test_a_chain_stays_within_both_length_limits() -> None:
    settings = loop(max_response=90)
    found, client = play(lambda session, turn: "look" if turn == 0 else "1" * 100, settings, reward=constant)
    for each in found:
        made = only(each)
        assert len(made.response_ids) == 90
        assert made.extra["agentfly_outcome"] == "max_tokens"
    prompt = len(client.calls[0].prompt_ids)
    assert client.calls[0].params["max_tokens"] == 60  # sampling.max_tokens
    assert all(len(call.prompt_ids) + call.params["max_tokens"] <= prompt + 90 for call in client.calls)


def test_a_row_that_is_longer_than_verl_was_told_stops_the_run(tmp_path: Path) -> None:
    stop = tmp_path / "stopped.txt"
    found, _ = play(lambda session, turn: "1", loop(max_prompt=10), stop_file=stop)
    assert isinstance(found[0], InvariantError)
    assert "its prompt has" in stop.read_text()


def test_a_reply_longer_than_allowed_and_missing_log_probs_are_noticed() -> None:
    found, _ = play(lambda session, turn: output([65] * 61, {}))
    assert "sampled 61 tokens where 60 were allowed" in str(found[0])
    found, _ = play(lambda session, turn: output([65, END_ID], {}, log_probs=None))
    assert isinstance(found[0], InvariantError)
    assert "calculate_log_probs" in str(found[0])


def test_tokens_carry_the_oldest_version_of_their_reply_and_rows_the_newest() -> None:
    extra = {"global_steps": 6, "min_global_steps": 4, "max_global_steps": 6}
    (found, *_), _ = play(lambda session, turn: "1", client=FakeClient(encode_reply, lambda s, t: "1", extra))
    made = only(found)
    assert set(made.versions) == {4}
    assert (made.extra["min_global_steps"], made.extra["max_global_steps"]) == (4, 6)
    assert made.extra["agentfly_versions"] == made.versions


def test_a_server_that_names_no_version_gives_that_of_the_step_before() -> None:
    (found, *_), _ = play(lambda session, turn: "1", client=FakeClient(encode_reply, lambda s, t: "1", {}))
    made = only(found)
    assert (made.extra["min_global_steps"], made.extra["max_global_steps"]) == (4, 4)  # verl's metrics need numbers


def test_replies_end_by_the_templates_tokens_and_seeds_differ_between_chains_turns_and_steps() -> None:
    def seeds(step: int, settings: LoopSettings) -> list[Any]:
        rows = [row(session=number, global_steps=step) for number in range(4)]
        _, client = play(lambda session, turn: "look" if turn == 0 else "1", settings, rows=rows)
        assert all(call.params["stop_token_ids"] == [END_ID] and call.params["ignore_eos"] for call in client.calls)
        return [call.params.get("seed") for call in client.calls]

    first, again, later = seeds(5, loop()), seeds(5, loop()), seeds(6, loop())
    assert sorted(first) == sorted(again)
    assert len({*first, *later}) == 16
    assert set(seeds(5, loop(seeded=False))) == {None}  # a reply that is continued by a second request
    assert set(seeds(5, loop(server="sglang"))) == {None}


def test_validation_rows_use_the_temperature_that_verl_gives_and_no_group() -> None:
    rows = [row("v1", 0, "validation"), row("v2", 0, "validation")]
    found, client = play(lambda session, turn: "3", loop(one_row="some reason"), rows=rows, temperature=0.0)
    assert [only(each).reward for each in found] == [3.0, 3.0]
    assert {call.params["temperature"] for call in client.calls} == {0.0}


def test_a_world_that_is_broken_stops_the_run(tmp_path: Path) -> None:
    stop = tmp_path / "stopped.txt"
    rows = [row(f"u{group}", number) for group in range(3) for number in range(4)]
    found, _ = play(lambda session, turn: RuntimeError("down"), loop(window=8), rows=rows, stop_file=stop)
    assert any(isinstance(each, ConfigError) for each in found)
    assert "train.max_failed_share" in stop.read_text()


def test_a_bug_in_the_reward_stops_the_run_and_no_sibling_waits_for_ever(tmp_path: Path) -> None:
    stop = tmp_path / "stopped.txt"
    found, _ = play(lambda session, turn: "a word" if chain_of(session) == 2 else "1", stop_file=stop)
    assert "RewardError" in stop.read_text()
    assert [len(each) if isinstance(each, list) else type(each).__name__ for each in found] == [1, 1, "RewardError", 1]


def test_a_group_that_takes_too_long_is_cut_off_and_trains_with_the_rest() -> None:
    class Slow(FakeClient):
        async def generate(self, request_id: str, **more: Any) -> Any:
            if chain_of(request_id) == 3:
                await asyncio.sleep(3600)
            return await super().generate(request_id, **more)

    settings = loop(group_timeout_s=0.5)
    found, _ = play(lambda s, t: "1", settings, client=Slow(encode_reply, lambda session, turn: str(chain_of(session))))
    assert [len(each) if isinstance(each, list) else each for each in found] == [1, 1, 1, 0]


def test_a_stop_string_ends_a_reply_and_is_asked_for_in_the_words_of_the_server() -> None:
    for server, word in (("vllm", "include_stop_str_in_output"), ("sglang", "no_stop_trim")):
        client = FakeClient(lambda text: RENDERER.encode(text), lambda session, turn: "abc!")
        engine = ServerEngine(client, Tokenizer(), STOPS, {"temperature": 1.0}, loop(server=server), 0)
        reply = asyncio.run(engine.generate(Request([1, 2], Sampling(stop=("!",)), "s")))
        assert reply.stop == "stop"
        assert client.calls[0].params[word] is True
        cut = asyncio.run(engine.generate(Request([1, 2], Sampling(max_tokens=2), "s")))
        assert cut.stop == "length"


def test_without_a_session_id_every_chain_is_a_group_of_its_own() -> None:
    rows = [{key: value for key, value in row().items() if key != "session_id"} | {"uid": f"u{number}"} for number in range(2)]
    found, _ = play(lambda session, turn: "1", loop(compares=False), rows=rows)
    assert [only(each).reward for each in found] == [1.0, 1.0]
