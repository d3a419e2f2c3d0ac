"""Training steps beside TRL: both sides are counted alike, and a side that did other work or could not run is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentfly.types import Completion, Outcome, Task, Trajectory, Turn

TINY = ["--device", "cpu", "--threads", "1", "--chains", "8", "--steps", "1", "--warmup", "1", "--timeout-s", "240"]


def chain(task: str, prompt: int, replies: list[int], observation: int, reward: float) -> Trajectory:
    turns = []
    for number, length in enumerate(replies):
        completion = Completion(text="", token_ids=[1] * length, logprobs=[0.0] * length, versions=[0] * length)
        turns.append(Turn([1] * (observation if number else prompt), not number, completion))
    return Trajectory("c", Task(task, ()), 0, turns=turns, outcome=Outcome.FINISHED, reward=reward)


def record(**changes: Any) -> dict[str, Any]:
    phases = {"time/rollout_s": 0.5, "time/learn_s": 0.25}
    tokens = {"sampled": 800, "prompts": 3200, "learned": 2000, "learned_sampled": 700, "learned_groups": 2}
    figures = {"seconds": 1.0, "cpu_s": 0.5, "rollout_tokens_per_s": 1600.0, "chains": 16, "reward": 0.5, "calls": 2.0}
    return tokens | figures | {"phases": phases} | changes


def row(name: str, *records: dict[str, Any], warmup: int = 0, device: str = "cuda") -> dict[str, Any]:
    import step

    size = {"weights": 1000, "body": 800, "head": 200}
    head = {"size": size, "limits": {"matmul_tflops": 1e-12 * 96e6}, "options": {"device": device}}
    return step.summarize(name, {"records": list(records or [record()]), "first_update_s": 1.0, "peak_gib": None}, warmup, head)


def test_ours_trains_in_a_process_of_its_own_and_a_missing_trl_is_said(tmp_path: Path, monkeypatch, capsys) -> None:
    import step

    # A child that finds no module of this name behaves as where TRL is not installed, whatever is installed here.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'trl' else find(name, *rest)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = tmp_path / "step.json"
    assert step.main([*TINY, "--trl", "generate", "--json", str(path)]) == 0
    found = json.loads(path.read_text())
    ours, trl = found["rows"]
    assert found["card"].startswith("CPU") and found["size"]["weights"] > 1e6 and found["template"] == "own"
    assert trl["missing"] == f"trl is not installed in {sys.executable}" and "seconds" not in trl
    assert ours["chains"] == 8 and ours["times_ours"] == ours["times_our_cpu"] == 1.0 and len(ours["steps"]) == 2
    assert ours["seconds"] == ours["steps"][1]["seconds"] >= ours["rollout_s"] + ours["learn_s"] > 0
    assert ours["prompt_tokens"] > ours["tokens_per_chain"] > 5
    assert ours["first_update_s"] > ours["steps"][0]["seconds"]
    shown = capsys.readouterr().out
    assert "| TRL, generate | - |" in shown and "trl is not installed" in shown and "| time/learn_s |" in shown


@pytest.mark.skipif("not __import__('importlib.util').util.find_spec('trl')", reason="TRL is not installed: pip install trl")
def test_trl_plays_the_same_prompts(tmp_path: Path) -> None:
    import step

    path = tmp_path / "step.json"
    assert step.main([*TINY, "--trl", "generate", "--json", str(path)]) == 0
    ours, trl = json.loads(path.read_text())["rows"]
    assert [each["prompts"] for each in trl["steps"]] == [each["prompts"] for each in ours["steps"]]
    assert trl["calls"] > 0.5 and trl["rollout_s"] + trl["learn_s"] == pytest.approx(trl["seconds"], rel=0.01)


def test_tokens_are_counted_alike_on_both_sides() -> None:
    from step_sides import our_tokens, trl_tokens

    chains = [
        chain("a", 10, [3, 4], 5, 0.0),
        chain("a", 10, [2], 5, 1.0),
        chain("b", 7, [6], 5, 1.0),
        chain("b", 7, [1], 5, 0.0),
    ]
    prompts = [[1] * 10, [1] * 10, [1] * 7, [1] * 7]
    masks = [[1] * 3 + [0] * 5 + [1] * 4, [1] * 2, [1] * 6, [1]]
    found = our_tokens(chains)
    assert found == {
        "sampled": 16,
        "prompts": 34,
        "learned": 12 + 2 + 6 + 1 + 10 + 7,
        "learned_sampled": 16,
        "learned_groups": 2,
    }
    assert trl_tokens(prompts, masks, masks, 2) == found | {"chains": 4}


def test_a_group_of_equal_rewards_is_not_counted_as_learned() -> None:
    from step_sides import our_tokens

    found = our_tokens([chain("a", 10, [3], 5, 0.0), chain("a", 10, [2], 5, 1.0), chain("b", 7, [6], 5, 1.0)])
    assert (found["sampled"], found["learned"], found["learned_sampled"], found["learned_groups"]) == (11, 15, 5, 1)


def test_the_phases_of_trl_add_up_to_its_step() -> None:
    from step_sides import trl_phases

    found = trl_phases(10.0, {"generate": 5.0, "sample": 4.0, "sync": 1.0, "rewards": 0.5, "score": 6.5})
    assert found["time/rollout_s"] == 4.5 and found["time/sample_s"] == 3.0 and found["time/old_logprobs_s"] == 1.0
    assert found["time/rollout_s"] + found["time/handover_s"] + found["time/learn_s"] == 10.0


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([{"role": "assistant", "content": " 84 "}], "84"),
        ([{"role": "assistant", "content": "", "tool_calls": [{}]}], None),
        ([{"role": "assistant", "content": ""}, {"role": "tool", "content": "84"}], None),
        ([], None),
    ],
)
def test_the_answer_of_a_chain_is_a_reply_without_a_call(messages: list[dict[str, Any]], answer: str | None) -> None:
    from step_sides import final_answer

    assert final_answer(messages) == answer


def test_medians_leave_the_warm_up_out_and_shares_count_what_was_learned() -> None:
    found = row("x", record(seconds=9.0), record(seconds=1.0), record(seconds=2.0), record(seconds=4.0), warmup=1)
    assert (found["seconds"], found["slowest_s"], found["rest_s"]) == (2.0, 4.0, 1.25)
    assert found["tokens_per_s"] == 400 and found["rollout_tokens_per_s"] == 1600
    assert found["matrix_share"] == pytest.approx(6 * 1000 * 2000 / 0.25 / 96e6)
    assert found["matrix_share_strict"] == pytest.approx(6 * (800 * 2000 + 200 * 700) / 0.25 / 96e6)
    assert "matrix_share" not in row("x", device="cpu")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"chains": 15}, "other played 15 chains a step, ours 16"),
        ({"sampled": 1000}, "other has 62.5 sampled tokens per chain, ours 50.0"),
        ({"prompts": 2500}, "other has 156.2 prompt tokens per chain, ours 200.0"),
        ({"learned_groups": 3}, "other learned from 3.0 groups a step, ours 2.0: groups of equal rewards have no gradient"),
        ({"reward": 0.9}, "other starts with a reward of 0.900, ours 0.500"),
        ({"sampled": 900, "reward": 0.58}, None),
    ],
)
def test_a_side_that_did_other_work_is_named(changes: dict[str, Any], sentence: str | None) -> None:
    import step

    ours, other = row("ours", *[record()] * 3), row("other", *[record(**changes)] * 3)
    found = step.compare(ours, other)
    assert found[0].startswith(sentence) and len(found) == 1 if sentence else not found


def test_the_command_that_is_kept_names_no_place_of_this_machine() -> None:
    import step

    words = [
        "--work",
        "/x",
        "--chains",
        "16",
        "--json=/y/z.json",
        "--steps",
        "3",
        "--trl-python",
        "/p",
        "--set",
        "train.lr=1e-5",
    ]
    assert step.command_of(words) == "python benchmarks/step.py --chains 16 --steps 3 --set train.lr=1e-5"


def test_further_rows_of_ours_keep_the_other_keys() -> None:
    import step

    words = ["--set", "train.lr=1e-5", "--max-lag", "1", "--also", "sampler.place=process", "--trl", "off", "--device", "cpu"]
    ahead = "rollout.max_lag=2 rollout.depth=2"
    assert step.sides_of(step.read_options([*words, "--also", ahead])) == [
        ("agentfly", {}),
        ("agentfly, max_lag 1", {"max_lag": 1}),
        ("agentfly, sampler.place=process", {"set": ["train.lr=1e-5", "sampler.place=process"]}),
        (f"agentfly, {ahead}", {"set": ["train.lr=1e-5", "rollout.max_lag=2", "rollout.depth=2"]}),
    ]


def test_a_micro_batch_that_does_not_fit_is_halved(tmp_path: Path, monkeypatch) -> None:
    import step

    tried = []

    def fail(side: str, settings: dict[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
        tried.append(settings["trl_batch"])
        return {"error": "torch.OutOfMemoryError: CUDA out of memory."} if settings["trl_batch"] > 32 else {"records": []}

    monkeypatch.setattr(step, "run_side", fail)
    found = step.run_trl({"trl_batch": 128, "group": 8}, tmp_path, "trl", python="python", timeout_s=1)
    assert tried == [128, 64, 32] and found == {"records": [], "trl_batch": 32}


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    import step

    found = step.run_side("ours", {}, tmp_path, "ours", python=sys.executable, timeout_s=60)
    assert found["error"].startswith("KeyError: ") and str(tmp_path / "ours.log") in found["error"]
    assert "| ours | - |" in "\n".join(step.lines([{"name": "ours"} | found]))


def test_a_template_that_shows_no_tools_is_replaced_by_one_that_our_parser_reads() -> None:
    from step_sides import FUNCTIONS, HERMES, shows_tools
    from transformers import AutoTokenizer

    from agentfly import pocket
    from agentfly.render import HFRenderer
    from agentfly.render.parsers import find_parser

    loaded: Any = AutoTokenizer
    tokenizer = loaded.from_pretrained(pocket.model_dir())
    assert shows_tools(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    assert not shows_tools(tokenizer)
    tokenizer.chat_template = HERMES
    assert shows_tools(tokenizer)
    import step_sides

    tools = {function.__name__: getattr(step_sides, f"{function.__name__}_tool") for function in FUNCTIONS}
    reply = find_parser(HFRenderer(tokenizer), tools)(
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    )
    assert [(call.name, call.arguments) for call in reply.calls] == [("add", {"a": 1, "b": 2})]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--chains", "12"], "--chains is a multiple of 8"),
        (["--steps", "0"], "--steps, --max-tokens and --max-turns are at least 1"),
        (["--chains", "64", "--trl-batch", "48"], "--trl-batch must divide --chains"),
        (["--max-lag", "0"], "the row with 0 is always measured"),
        (["--trl", "sglang"], "invalid choice"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], sentence: str, capsys) -> None:
    import step

    with pytest.raises(SystemExit) as stopped:
        step.main(["--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err
