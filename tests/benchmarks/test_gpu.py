"""The benchmark for an accelerator runs whole on a CPU, in miniature, and counts what it says it counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

TINY = [
    "--device", "cpu", "--shapes", "tiny", "--chains", "2", "--steps", "6", "--context", "24", "--reply", "2", "4",
    "--latency-ms", "2", "--generate-steps", "2", "--learn-tokens", "256", "--longest", "48", "--repeats", "1",
]  # fmt: skip


def run(path: Path, *more: str) -> dict[str, Any]:
    import gpu

    assert gpu.main([*TINY, "--json", str(path), *more]) == 0
    return json.loads(path.read_text())


def test_every_part_runs_on_a_cpu_and_is_saved_with_date_card_and_versions(tmp_path: Path, capsys) -> None:
    found = run(tmp_path / "gpu.json", "--caches", "slots,pages")
    assert found["card"].startswith("CPU")
    assert found["versions"]["torch"] == torch.__version__
    assert found["date"][:2] == "20"
    (decode,), (agent,), (gap,) = found["decode"], found["agent"], found["gap"]
    for row in (decode, agent):
        assert row["chains"] == 2
        assert all(row[name] > 0 for name in ("generate_tokens_per_s", "slots_tokens_per_s", "pages_tokens_per_s"))
    assert decode["roofline_tokens_per_s"] == min(decode["memory_tokens_per_s"], decode["compute_tokens_per_s"])
    assert decode["pages_device_busy"] is None  # a CPU has no kernels to watch
    assert agent["pages_share_of_decode"] == pytest.approx(agent["pages_tokens_per_s"] / decode["pages_tokens_per_s"])
    assert agent["pages_full_in_flight"] == 4
    assert agent["pages_full_share_of_decode"] == agent["pages_full_tokens_per_s"] / decode["pages_tokens_per_s"] > 0
    assert agent["slots_reused_tokens"] > 0
    assert gap["dtype"] == "float32"
    assert max(gap["slots_mean_gap"], gap["pages_mean_gap"]) < 1e-4
    ways = {row["way"]: row for row in found["learner"]}
    assert list(ways) == ["plain transformers", "padded", "packed", "packed, layers again", "packed, LoRA 32"]
    assert all(row["tokens_per_s"] > 0 and row["mfu"] > 0 for row in ways.values())
    assert ways["packed"]["padding"] == 0.0 < ways["padded"]["padding"]
    shown = capsys.readouterr().out
    assert "| tiny | 2 |" in shown and "| tiny | packed, LoRA 32 |" in shown


def test_adding_keeps_what_is_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"card": "another card"}))
    with pytest.raises(SystemExit, match="holds figures of another card"):
        run(path, "--only", "decode", "--add")
    path.unlink()
    first = run(path, "--only", "decode")
    assert first["learner"] == [] and "pages_tokens_per_s" not in first["decode"][0]
    second = run(path, "--only", "decode", "--caches", "pages", "--chains", "3", "--add")
    assert [row["chains"] for row in second["decode"]] == [2, 3]
    assert second["decode"][0] == first["decode"][0]


def test_a_row_that_fails_says_why_and_the_others_go_on(tmp_path: Path, monkeypatch, capsys) -> None:
    import gpu_models

    import gpu

    def break_down(model: Any, *_: Any, **__: Any) -> dict[str, Any]:
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(gpu, "decode_row", break_down)
    monkeypatch.setattr(gpu, "gap_of", lambda *_: {"tokens": 1})
    monkeypatch.setattr(gpu, "measure_limits", lambda *_: gpu_models.Limits(1.0, 1.0))
    path = tmp_path / "gpu.json"
    assert gpu.main([*TINY, "--only", "decode,gap", "--json", str(path)]) == 1
    found = json.loads(path.read_text())
    assert found["decode"][0]["error"] == "RuntimeError: out of memory"
    assert found["gap"][0]["tokens"] == 1
    assert "1 rows failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shapes", "7B"], "'7B' is not one of 135M"),
        (["--only", "decoding"], "'decoding' is not one of decode"),
        (["--chains", "0"], "at least 1 chain"),
        (["--reply", "8", "4"], "LOW is at most HIGH"),
        (["--add"], "--add needs --json"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_measured(arguments, sentence, capsys) -> None:
    import gpu

    with pytest.raises(SystemExit) as stopped:
        gpu.main(["--device", "cpu", *arguments])
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_the_operations_of_an_update_are_those_that_torch_counts() -> None:
    from gpu_models import SHAPES, make_model, num_body, update_flops
    from torch.utils.flop_counter import FlopCounterMode

    shape, length = SHAPES["tiny"], 8
    model = make_model(shape, torch.device("cpu"), torch.float32)
    with FlopCounterMode(display=False) as counter:
        model(torch.arange(length)[None], labels=torch.arange(length)[None], use_cache=False).loss.backward()
    # torch counts all pairs of tokens in attention, we those that attend; with so few tokens that is little.
    assert update_flops(num_body(model), shape, [length], length) == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize("name", ["135M", "0.5B", "3B"])
def test_a_shape_has_as_many_weights_as_the_model_it_is_named_after(name: str) -> None:
    from gpu_models import SHAPES, make_model

    published = {"135M": 134_515_008, "0.5B": 494_032_768, "3B": 3_085_938_688}
    model = make_model(SHAPES[name], torch.device("meta"), torch.bfloat16)
    assert sum(tensor.numel() for tensor in model.parameters()) == published[name]


def test_the_roofline_reads_every_weight_once_and_every_key_of_every_chain() -> None:
    from gpu_models import SHAPES, Limits, decode_limits, make_model

    shape = SHAPES["tiny"]
    model = make_model(shape, torch.device("cpu"), torch.bfloat16)
    weights = 2 * sum(tensor.numel() for tensor in model.parameters())
    keys = 2 * 2 * (2 * 16) * 2  # keys and values, layers, heads x size, bytes
    found = decode_limits(model, shape, Limits(1e6, 1e30), 8, 100)
    assert found["roofline_tokens_per_s"] == pytest.approx(8 * 1e6 / (weights + 8 * 100 * keys))


def test_the_time_that_spans_cover_is_counted_once() -> None:
    from gpu_models import covered

    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0
