"""Training from a server: ids, log-probs and weights over the wires of vLLM and SGLang, against servers on loopback."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest
import torch

import agentfly
from agentfly.engines import open_engine
from agentfly.engines.openai_served import ServedEngine
from agentfly.engines.openai_server import ModelServer
from agentfly.errors import ConfigError, EngineError, InvariantError
from agentfly.net.client import RetryPolicy, Transient
from agentfly.protocols import Engine, TrainableEngine
from agentfly.types import Completion, Request, Sampling
from tests.close import assert_close_to_norm
from tests.tiny import ROWS, save_tiny_model, tiny_agent

from .fake_served import served

KEY = "sk-canary-4712"
PROMPT = [5, 9, 200, 31, 77, 12]
BOTH = pytest.mark.parametrize("kind", ["vllm", "sglang"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def engine_on(folder, tmp_path):
    made = []

    def make(server, kind="vllm", **options) -> ServedEngine:
        options = {
            "served_model": "tiny", "weights_dir": tmp_path / "weights", "device": "cpu", "api_key": KEY, "retry_s": 0.001,
            "deadline_s": 60.0, "handover_s": 60.0, "max_retries": 2, **options,
        }  # fmt: skip
        engine, _ = open_engine(str(folder), kind="openai", base_url=server.url, server=kind, **options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        asyncio.run(engine.close())


def until(happened) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def ask(engine, prompt=PROMPT, **sampling):
    return asyncio.run(engine.generate(Request(list(prompt), Sampling(**sampling))))


def change(engine, by=0.01, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weights in engine.model.parameters():
            weights.add_(by * torch.randn(weights.shape, generator=generator))


def full_logprobs(model, prompt, sampled, temperature):
    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


@BOTH
def test_ids_go_in_and_come_out_with_the_log_probs_of_the_temperature(folder, engine_on, kind):
    with served(folder) as server:
        engine = engine_on(server, kind)
        done = ask(engine, temperature=0.6, max_tokens=9, seed=4)
        want = full_logprobs(engine.model, PROMPT, done.token_ids, 0.6)
    assert isinstance(engine, Engine) and engine.reads == "ids"
    assert_close_to_norm(done.logprobs, want, scale=1.0)
    assert done.versions == [0] * len(done.token_ids)
    assert done.stop in ("stop", "length")
    kept = done.token_ids[:-1] if done.stop == "stop" else done.token_ids
    assert done.text == engine.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_vllm_is_sent_every_option_because_it_may_have_defaults_of_its_own(folder, engine_on):
    with served(folder) as server:
        engine = engine_on(server)
        ask(engine, temperature=0.5, max_tokens=3, seed=4, stop=("X",), stop_ids=(7,))
    body = server.bodies[-1]
    stops = sorted({*engine.stop_ids, 7})
    assert body == {
        "model": "tiny", "prompt": PROMPT, "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": 4,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "max_tokens": 3,
        "ignore_eos": True, "stop_token_ids": stops,
        "stop": ["X"], "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": 0,
        "return_token_ids": True,
    }  # fmt: skip
    assert server.headers[-1]["Authorization"] == f"Bearer {KEY}"


def test_sglang_is_sent_every_option_too(folder, engine_on):
    with served(folder) as server:
        engine = engine_on(server, "sglang")
        ask(engine, temperature=0.5, max_tokens=3, seed=4, stop=("X",))
    body = server.bodies[-1]
    assert (body["input_ids"], body["return_logprob"]) == (PROMPT, True)
    assert body["sampling_params"] == {
        "temperature": 0.5, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "max_new_tokens": 3, "ignore_eos": False, "stop_token_ids": sorted(engine.stop_ids),
        "no_stop_trim": True, "skip_special_tokens": False, "stop": ["X"], "sampling_seed": 4,
    }  # fmt: skip


@BOTH
def test_a_stop_id_ends_a_reply_and_stays_in_it(folder, engine_on, kind):
    with served(folder) as server:
        engine = engine_on(server, kind)
        free = ask(engine, max_tokens=20, seed=3).token_ids
        stop = free[4]
        assert stop not in free[:4]
        done = ask(engine, max_tokens=20, seed=3, stop_ids=(stop,))
        last = ask(engine, max_tokens=5, seed=3, stop_ids=(stop,))
    assert (done.token_ids, done.stop) == (free[:5], "stop")
    assert done.text == engine.tokenizer.decode(free[:4], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert (last.token_ids, last.stop, last.text) == (done.token_ids, "stop", done.text), "also as the last that it may have"


def test_sglang_ends_at_the_models_own_end_ids_and_vllm_only_at_ours(folder, engine_on):
    with served(folder) as server:
        free = ask(engine_on(server), max_tokens=20, seed=3).token_ids
        server.ends = {free[4]}
        assert ask(engine_on(server), max_tokens=20, seed=3).token_ids == free
        engine = engine_on(server, "sglang")
        done = ask(engine, max_tokens=20, seed=3)
    assert free[4] not in engine.stop_ids
    assert (done.token_ids, done.stop) == (free[:5], "stop")
    assert done.text == engine.tokenizer.decode(free[:4], skip_special_tokens=False, clean_up_tokenization_spaces=False)


@BOTH
def test_after_publishing_the_server_samples_from_the_learners_weights(folder, engine_on, tmp_path, kind):
    with served(folder) as server:
        engine = engine_on(server, kind)
        engine.publish(0)
        change(engine)
        engine.publish(1)
        assert (engine.version, engine.proof.version) == (1, 1)
        assert engine.proof.gap < 1e-4 < engine.proof.moved
        done = ask(engine, temperature=1.0, max_tokens=8, seed=2)
        assert_close_to_norm(done.logprobs, full_logprobs(engine.model, PROMPT, done.token_ids, 1.0), scale=1.0)
        assert set(done.versions) == {1}
        assert len(list((tmp_path / "weights").iterdir())) == 1, "the folder of the version before is gone"
        asyncio.run(engine.close())
        assert list((tmp_path / "weights").iterdir()) == []


def test_what_did_not_change_is_not_sent_again(folder, engine_on):
    with served(folder) as server:
        engine = engine_on(server)
        engine.publish(0)
        engine.publish(0)
        assert server.paths.count("/collective_rpc") == 1
        change(engine)
        engine.publish(0)
        assert server.paths.count("/collective_rpc") == 2, "the number is the same, the weights are not"


@BOTH
@pytest.mark.parametrize("by", [0.3, 0.001])
def test_a_server_that_keeps_its_old_weights_is_caught(folder, engine_on, kind, by):
    with served(folder, "deaf") as server:
        engine = engine_on(server, kind)
        engine.publish(0)
        change(engine, by)
        with pytest.raises(InvariantError, match=r"does not sample from the learner's weights|still samples from the old"):
            engine.publish(1)


def test_log_probs_that_ignore_the_temperature_are_caught(folder, engine_on):
    with served(folder, "raw_logprobs") as server, pytest.raises(InvariantError, match="processed_logprobs"):
        engine_on(server).publish(0)


def test_a_server_that_says_it_has_another_version_is_caught(folder, engine_on):
    with served(folder, "bad_label") as server, pytest.raises(InvariantError, match="samples from version '17'"):
        engine_on(server, "sglang").publish(0)


@BOTH
def test_a_server_without_ids_is_refused_for_training(folder, engine_on, tmp_path, kind):
    with served(folder, "no_ids") as server:
        engine = engine_on(server, kind)
        with pytest.raises(ConfigError, match="cannot be trained from: the server does not return token ids"):
            engine.model  # noqa: B018
        with pytest.raises(ConfigError, match="cannot be trained from"):
            agentfly.train(
                agentfly.BaseAgent(engine, reward="exact_match"), data=ROWS, steps=1, **{"run.dir": str(tmp_path / "runs")}
            )


def test_a_vllm_server_without_its_controls_is_refused(folder, engine_on):
    with served(folder, "no_dev_mode") as server, pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
        engine_on(server).publish(0)


@pytest.mark.parametrize(
    ("kind", "match"), [("vllm", "could not empty its cache"), ("sglang", "not take the new weights: not now")]
)
def test_a_server_that_will_not_update_is_an_engine_error(folder, engine_on, kind, match):
    with served(folder, "unwilling") as server, pytest.raises(EngineError, match=match):
        engine_on(server, kind).publish(0)


def test_a_folder_for_the_weights_is_asked_for_before_anything_is_trained(folder, engine_on):
    with served(folder) as server, pytest.raises(ConfigError, match="weights_dir"):
        engine_on(server, weights_dir=None).model  # noqa: B018


def test_a_server_that_drips_its_answer_is_given_up(folder, engine_on):
    import socket

    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                try:
                    while not done.wait(0.05):
                        connection.sendall(b" ")
                except OSError:  # the other side has hung up, as it should
                    done.set()

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        server = ModelServer("m", f"http://127.0.0.1:{listening.getsockname()[1]}/v1", None, 120.0, 256, RetryPolicy())
        with pytest.raises(EngineError, match=r"did not answer /slow: .* 0\.3 s"):
            server.call("POST", f"{server.root}/slow", {}, timeout_s=0.3)
        done.set()
        thread.join(60)


def test_a_model_that_the_server_does_not_have_is_named(folder, engine_on):
    with served(folder) as server, pytest.raises(ConfigError, match="no model 'other' but 'tiny'"):
        engine_on(server, served_model="other").publish(0)


def test_a_context_that_the_server_does_not_hold_is_refused(folder, engine_on):
    with served(folder, context=64) as server, pytest.raises(ConfigError, match="--max-model-len 512"):
        engine_on(server).publish(0)


@pytest.mark.parametrize("faults", [(), ("untold",)])
def test_a_context_that_sglang_does_not_hold_is_refused(folder, engine_on, faults):
    with served(folder, *faults, context=64) as server:
        with pytest.raises(ConfigError, match=r"holds 64 tokens and max_context is 512.*--context-length 512"):
            engine_on(server, "sglang").publish(0)
        engine_on(server, "sglang", max_context=64).publish(0)


def test_an_sglang_that_does_not_say_what_it_holds_is_taken_at_our_word(folder, engine_on):
    with served(folder, "old", context=64) as server:
        engine = engine_on(server, "sglang")
        engine.publish(0)
    assert engine.version == 0
    assert engine.proof is not None
    assert engine.proof.version == 0


def test_a_server_that_is_not_there_is_a_sentence(folder, engine_on):
    with served(folder) as server:
        engine = engine_on(server)
    with pytest.raises(EngineError, match="failed 3 times, the last time: ConnectError"):
        ask(engine)
    with pytest.raises(ConfigError, match=r"cannot train from the server: .*ConnectError"):
        engine.publish(0)


@BOTH
def test_a_server_that_died_under_a_run_is_a_typed_failure(folder, engine_on, kind):
    with served(folder) as server:
        engine = engine_on(server, kind)
        engine.publish(0)
    with pytest.raises(EngineError, match="ConnectError"):
        ask(engine)
    change(engine)
    with pytest.raises(EngineError, match="did not answer"):
        engine.publish(1)


def test_a_server_that_came_back_with_its_first_weights_is_not_sampled_from(folder, engine_on):
    with served(folder) as first:
        engine = engine_on(first)
        engine.publish(0)
        change(engine)
        engine.publish(1)
    with pytest.raises(EngineError, match="ConnectError"):
        ask(engine)
    with served(folder, port=first.port), pytest.raises(EngineError, match="came back with other weights"):
        ask(engine)


def test_a_server_that_came_back_with_our_weights_is_trusted_again(folder, engine_on):
    with served(folder) as first:
        engine = engine_on(first)
        engine.publish(0)
    with pytest.raises(EngineError, match="ConnectError"):
        ask(engine)
    with served(folder, port=first.port):
        assert ask(engine, max_tokens=3).versions[0] == 0


def restarted_unnoticed(folder, engine_on, kind, by, label="default"):
    """Nothing fails: the idle connection is closed, and the next request silently opens a new one."""
    sampling = Sampling(max_tokens=4, seed=1)

    async def main() -> Completion:
        with served(folder) as first:
            engine = engine_on(first, kind, max_retries=0)
            engine.publish(0)
            change(engine, by)
            engine.publish(1)
            assert set((await engine.generate(Request(PROMPT, sampling))).versions) == {1}
        with served(folder, port=first.port) as second:
            second.label = label
            return await engine.generate(Request(PROMPT, sampling))

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("kind", "label", "sentence"),
    [
        ("vllm", "default", "came back with other weights than those of version 1"),
        ("sglang", "default", "sampled from its version 'default', not from 1"),
        ("sglang", "1", "came back with other weights than those of version 1"),
    ],
)
def test_a_server_that_was_started_again_between_two_requests_is_noticed(folder, engine_on, kind, label, sentence):
    with pytest.raises(EngineError, match=sentence):
        restarted_unnoticed(folder, engine_on, kind, 0.01, label)


def test_one_that_has_our_weights_is_sampled_from(folder, engine_on):
    assert set(restarted_unnoticed(folder, engine_on, "vllm", 0.0).versions) == {1}


def test_sglangs_first_label_is_fine_before_any_weights_were_handed_over(folder, engine_on):
    with served(folder) as server:
        assert ask(engine_on(server, "sglang"), max_tokens=3).versions[0] == 0
        assert server.label == "default"


def test_weights_are_shown_again_for_new_connections_and_not_for_every_reply(folder, engine_on):
    sampling = Sampling(max_tokens=4, seed=1)

    async def main(engine, server) -> list[int]:
        engine.publish(0)
        counts = []
        for together in (8, 1, 8, 1):
            asked = len(server.bodies)
            await asyncio.gather(*(engine.generate(Request(PROMPT, sampling)) for _ in range(together)))
            counts.append(sum("prompt_logprobs" in body for body in server.bodies[asked:]))
        return counts

    with served(folder) as server:
        counts = asyncio.run(main(engine_on(server), server))
    assert counts[0] >= 1
    assert sum(counts) <= 6, "replies that end together share one question, and kept connections need none"


def test_a_busy_server_is_asked_for_its_weights_again_and_not_for_the_reply(folder, engine_on, monkeypatch):
    asked = []

    async def main(engine) -> None:
        engine.publish(0)
        post = engine._server.post

        async def busy(url, body):
            asked.append("probe" if "prompt_logprobs" in body else "reply")
            if asked[-1] == "probe" and asked.count("probe") < 3:
                raise Transient("HTTP 503", 0.01)
            return await post(url, body)

        monkeypatch.setattr(engine._server, "post", busy)
        await engine.generate(Request(PROMPT, Sampling(max_tokens=4, seed=1)))

    with served(folder) as server:
        asyncio.run(main(engine_on(server)))
    assert asked == ["reply", "probe", "probe", "probe"]


def test_weights_do_not_change_under_a_reply_and_later_requests_wait_for_them(folder, engine_on):
    with served(folder) as server:
        engine = engine_on(server)
        engine.publish(0)
        server.faults = ("slow",)
        published = threading.Event()
        replies = {}

        def play(name) -> None:
            replies[name] = ask(engine, max_tokens=4, seed=1)

        def publish() -> None:
            with engine.hold():
                change(engine)
                engine.publish(1)
            published.set()

        work = [(play, ("early",)), (publish, ()), (play, ("late",)), (play, ("later",))]
        threads = [threading.Thread(target=target, args=args, daemon=True) for target, args in work]
        threads[0].start()
        until(lambda: engine._in_flight == 1)
        threads[1].start()
        until(lambda: engine._changing)
        threads[2].start()
        threads[3].start()
        until(lambda: len(engine._waiting) == 2)
        assert not published.is_set()
        server.gate.set()
        for thread in threads:
            thread.join(60)
        assert published.is_set()
        assert {name: set(reply.versions) for name, reply in replies.items()} == {"early": {0}, "late": {1}, "later": {1}}
        want = full_logprobs(engine.model, PROMPT, replies["late"].token_ids, 1.0)
        assert_close_to_norm(replies["late"].logprobs, want, scale=1.0)
        stats = engine.stats()
        assert stats["sampled_tokens"] == sum(len(reply.token_ids) for reply in replies.values())
        assert stats["decode_s"] > 0 <= stats["idle_s"]


def test_a_server_finishes_replies_before_weights_change_and_can_do_nothing_else(folder, engine_on):
    with served(folder) as server:
        engine = engine_on(server)
        assert isinstance(engine, TrainableEngine)
        assert engine.at_update == "finish"
        engine.at_update = "finish"
        for mode in ("recompute", "keep"):
            with pytest.raises(
                ConfigError, match=f"at_update must be 'finish' for ServedEngine, not {mode!r}: the server tells one"
            ):
                engine.at_update = mode


def test_the_key_is_never_shown(folder, engine_on, caplog):
    caplog.set_level("DEBUG")
    with served(folder) as server:
        engine = engine_on(server)
        engine.publish(0)
    with pytest.raises(EngineError) as caught:
        ask(engine)
    assert KEY not in f"{caught.value!r} {engine!r} {engine._server!r} {caplog.text}"


def test_with_a_cut_vllms_log_probs_are_unknown_and_sglangs_are_not(folder, engine_on):
    with served(folder) as server:
        assert all(math.isnan(x) for x in ask(engine_on(server, "vllm"), max_tokens=3, top_p=0.9).logprobs)
        assert all(math.isfinite(x) for x in ask(engine_on(server, "sglang"), max_tokens=3, top_p=0.9).logprobs)


@BOTH
def test_a_prompt_that_does_not_fit_is_not_sent(folder, engine_on, kind):
    with served(folder) as server:
        engine = engine_on(server, kind, max_context=8)
        with pytest.raises(EngineError, match="the context holds 8"):
            ask(engine, [1] * 8)
        assert server.paths == []
        assert len(ask(engine, [1] * 6, max_tokens=50).token_ids) <= 2


@pytest.mark.parametrize(
    "answer", ["[]", '{"choices": []}', '{"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-1]}}]}']
)
def test_an_answer_that_makes_no_sense_is_an_engine_error(folder, engine_on, answer):
    from .fake_server import chat_server

    with chat_server((200, {}, answer)) as server, pytest.raises(EngineError, match="not a completion|not one good number"):
        ask(engine_on(server))


@pytest.mark.parametrize(("kind", "lora"), [("vllm", {}), ("sglang", {"lora.rank": 2})])
def test_a_run_trains_from_a_server(folder, tmp_path, kind, lora):
    with served(folder) as server:
        options = {
            "kind": "openai", "server": kind, "base_url": server.url, "served_model": "tiny", "device": "cpu",
            "weights_dir": tmp_path / "weights",
        }  # fmt: skip
        agent = tiny_agent(folder, engine=options)
        settings = {
            "run.dir": str(tmp_path / "runs"),
            "train.lr": 1e-2,
            "rollout.num_tasks": 2,
            "rollout.num_chains": 3,
            **lora,
        }
        result = agentfly.train(
            agent, data=ROWS[:-2], validation=ROWS[-2:], steps=2, **{"train.validate_at_start": False}, **settings
        )
        asyncio.run(agent.close())
    assert [row["handover/gap"] < 1e-4 for row in result.history] == [True, True]
    assert all(row["handover/moved"] > 0 for row in result.history)
    assert all(row["train/logprob_gap"] < 1e-4 for row in result.history)
    assert result.steps == 2
