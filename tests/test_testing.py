"""The public fakes keep the contracts of the real things."""

from __future__ import annotations

import asyncio

import pytest

from agentfly.errors import ConfigError, EngineError, WorldError
from agentfly.protocols import Engine, Renderer
from agentfly.testing import END_ID, ByteRenderer, GuessEnv, ScriptedEngine
from agentfly.types import Completion, Message, Request, Sampling, Task


def ask(engine: ScriptedEngine, session: str = "a", prompt: str = "x", **sampling) -> Completion:
    request = Request(list(prompt.encode()), Sampling(**sampling), session)
    return asyncio.run(engine.generate(request))


def test_the_fakes_implement_the_protocols():
    assert isinstance(ScriptedEngine([]), Engine)
    assert isinstance(ByteRenderer(), Renderer)


def test_a_conversation_is_laid_out_like_chatml():
    renderer = ByteRenderer()
    ids = renderer.start([Message("system", "S"), Message("user", "é")], [])
    assert renderer.decode(ids) == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"


def test_tools_stand_in_the_prompt():
    renderer = ByteRenderer()
    assert '"name": "add"' in renderer.decode(renderer.start([Message("user", "hi")], [{"name": "add"}]))


@pytest.mark.parametrize("limit", [100, 2])
def test_extending_gives_the_same_ids_as_rendering_all_at_once(limit):
    renderer = ByteRenderer()
    opening = [Message("user", "Hi")]
    completion = ask(ScriptedEngine(["Hello"]), max_tokens=limit)
    messages = [*opening, Message("assistant", completion.text), Message("tool", "ok"), Message("user", "go")]
    extension = renderer.extend(messages, 2, completion, [])
    assert not extension.restarts
    assert renderer.start(opening) + completion.token_ids + extension.ids == renderer.start(messages)


def test_marks_spelled_out_in_a_text_are_not_marks():
    renderer = ByteRenderer()
    assert END_ID not in renderer.encode("<|im_end|>")


def test_any_text_can_be_encoded_even_a_lone_surrogate():
    assert ByteRenderer().encode("\ud800") == [ord("?")]


def test_each_session_plays_the_script_from_its_beginning():
    engine = ScriptedEngine(["one", "two"])
    assert [ask(engine, "a").text, ask(engine, "b").text, ask(engine, "a").text] == ["one", "one", "two"]


def test_a_script_that_is_played_out_is_an_engine_error():
    engine = ScriptedEngine(["one"])
    ask(engine)
    with pytest.raises(EngineError, match="1 replies"):
        ask(engine)
    engine.release("a")
    assert ask(engine).text == "one"


def test_a_reply_is_its_bytes_and_the_end_mark():
    completion = ask(ScriptedEngine(["hi"]))
    assert completion.token_ids == [104, 105, END_ID]
    assert completion.logprobs == [-0.5] * 3
    assert completion.stop == "stop"


def test_max_tokens_cuts_a_reply():
    completion = ask(ScriptedEngine(["hello"]), max_tokens=2)
    assert (completion.text, completion.stop, len(completion.token_ids)) == ("he", "length", 2)


def test_a_stop_string_ends_a_reply_and_stays_in_it():
    completion = ask(ScriptedEngine(["a STOP b"]), stop=("STOP",))
    assert (completion.text, completion.stop, len(completion.token_ids)) == ("a STOP", "stop", 6)


def test_a_function_may_answer_with_text_ids_a_completion_or_an_exception():
    whole = Completion(text="whole")
    by_prompt = {"t": "text", "i": [65, END_ID], "c": whole, "e": EngineError("down")}
    engine = ScriptedEngine(lambda request: by_prompt[chr(request.prompt_ids[0])])
    assert ask(engine, prompt="t").text == "text"
    assert ask(engine, prompt="i").text == "A"
    assert ask(engine, prompt="c") is whole
    with pytest.raises(EngineError, match="down"):
        ask(engine, prompt="e")


def test_tokens_carry_the_published_version():
    engine = ScriptedEngine(lambda request: "a")
    before = ask(engine)
    engine.publish(3)
    assert (before.versions, ask(engine).versions) == ([0, 0], [3, 3])


def test_recorded_requests_keep_the_prompt_as_it_was():
    engine = ScriptedEngine(["a", "b"], record=True)
    prompt = [1, 2]
    asyncio.run(engine.generate(Request(prompt, Sampling())))
    prompt.append(3)
    assert engine.requests[0].prompt_ids == [1, 2]


def test_a_prompt_longer_than_the_context_is_refused():
    with pytest.raises(EngineError, match="3 tokens; the context holds 3"):
        ask(ScriptedEngine(["a"], max_context=3), prompt="abc")


def test_text_is_streamed_to_on_text():
    heard: list[str] = []
    asyncio.run(ScriptedEngine(["hi"]).generate(Request([1], Sampling(), on_text=heard.append)))
    assert heard == ["hi"]


def test_one_string_is_not_a_script():
    with pytest.raises(ConfigError, match="a list of replies"):
        ScriptedEngine("hi")


def test_guessing_leads_to_the_secret():
    env = GuessEnv(8)
    env.reset(Task("t", (), {"secret": 3}))
    assert [env.guess(5), env.guess(2), env.solved, env.guess(3), env.solved] == ["lower", "higher", False, "correct", True]
    env.close()
    env.close()
    with pytest.raises(WorldError):
        env.guess(3)


def test_a_task_without_a_secret_is_refused():
    with pytest.raises(ConfigError, match="secret"):
        GuessEnv().reset(Task("t", (), {}))
