"""The task set `gsm8k`: which file gives which split, and what is said where there is none."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from agentfly.build import build_agent, build_tasks
from agentfly.config import Config
from agentfly.envs.code.gsm8k import gsm8k_tasks
from agentfly.errors import AgentFlyError
from tests.published import write_gsm8k

ROOT = Path(__file__).parents[3]
REAL = ROOT.parent / "shared" / "data" / "math" / "gsm8k_train.jsonl.gz"
SPLITS = ("train", "validation", "test")


def questions(split: str, seed: int = 0) -> list[str]:
    return [row["question"] for row in gsm8k_tasks(split, None, seed)]


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GSM8K_DATA", str(tmp_path))
    return write_gsm8k(tmp_path)


def test_the_train_file_is_for_training_and_the_test_file_for_the_rest(folder: Path) -> None:
    train, validation, test = (set(questions(split)) for split in SPLITS)
    assert len(train) == lines(folder / "train.jsonl")
    assert len(validation) + len(test) == lines(folder / "test.jsonl")
    assert not train & validation and not train & test and not validation & test
    assert len({row["id"] for split in SPLITS for row in gsm8k_tasks(split)}) == len(train | validation | test)


def test_without_a_test_file_a_fixed_part_of_the_train_file_is_held_out(folder: Path) -> None:
    with (folder / "train.jsonl").open("a") as file:
        file.write((folder / "test.jsonl").read_text())
    (folder / "test.jsonl").unlink()
    parts = [set(questions(split)) for split in SPLITS]
    assert sum(map(len, parts)) == len(set.union(*parts)) == lines(folder / "train.jsonl")
    assert len(parts[0]) > len(parts[1]) + len(parts[2])
    assert [set(questions(split, seed=7)) for split in SPLITS] == parts, "whatever the seed"


def test_a_test_problem_that_is_also_trained_on_is_not_tested(folder: Path) -> None:
    known = set(questions("test")[:3])
    with (folder / "train.jsonl").open("a") as file:
        file.writelines(line for line in (folder / "test.jsonl").open() if any(f'"{asked}"' in line for asked in known))
    assert known <= set(questions("train"))
    assert not known & set(questions("test"))


def test_the_seed_orders_training_and_the_test_problems_keep_their_order(folder: Path) -> None:
    assert questions("train", 1) != questions("train", 2)
    assert questions("test", 1) == questions("test", 2)
    assert [row["id"] for row in gsm8k_tasks("train", 5, 1)] == [row["id"] for row in gsm8k_tasks("train", None, 1)][:5]


@pytest.mark.parametrize(
    "name", ["train.jsonl.gz", "gsm8k_train.jsonl", "gsm8k_train.jsonl.gz", "grade_school_math/data/train.jsonl"]
)
def test_files_may_have_other_names_and_be_gzipped_or_be_named_themselves(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = (folder / "train.jsonl").read_bytes()
    (folder / "train.jsonl").unlink()
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    whole = set(questions("train"))
    assert len(whole) == len(data.splitlines())
    monkeypatch.setenv("GSM8K_DATA", str(folder / name))
    assert set(questions("train")) < whole, "one file alone also gives the held-out problems"


def test_what_is_missing_is_said_in_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(split: str = "train", count: int | None = None) -> str:
        with pytest.raises(AgentFlyError) as caught:
            gsm8k_tasks(split, count)  # type: ignore[arg-type]
        return str(caught.value)

    assert said("dev") == "tasks: no split is called 'dev'; there are train, validation, test."
    assert said(count=0) == "tasks: count must be at least 1, not 0."
    (folder / "train.jsonl").unlink()
    assert "there is no train.jsonl beside it" in said()
    assert gsm8k_tasks("test"), "which is enough to evaluate on"
    (folder / "test.jsonl").unlink()
    assert said() == f"{folder}: there is no train.jsonl or gsm8k_train.jsonl (or either with .gz) in it"
    (folder / "train.jsonl").write_text('{"question": "Two and two?", "answer": "<<2+2=4>>4\\n#### 4"}\n')
    assert "none is left for the split 'validation'" in said("validation")
    monkeypatch.setenv("GSM8K_DATA", str(folder / "nowhere"))
    assert "no such file or folder; set GSM8K_DATA to the folder that holds GSM8K's train.jsonl" in said()
    monkeypatch.delenv("GSM8K_DATA")
    assert said().startswith("GSM8K_DATA is not set: it names the folder with GSM8K's files")


def test_the_recipe_reads_and_its_names_are_known(folder: Path) -> None:
    config = Config.load(ROOT / "recipes" / "smollm2_gsm8k.toml", ["data.validation_count=5"])
    agent = build_agent(config)
    train, validation = build_tasks(config)
    agent.check(train)
    assert (len(train), len(validation)) == (lines(folder / "train.jsonl"), 5)


@pytest.mark.skipif(not REAL.is_file(), reason=f"no file {REAL}")
def test_the_real_train_file_has_problems_enough_for_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GSM8K_DATA", str(REAL.parent))
    parts = [set(questions(split)) for split in SPLITS]
    assert [len(part) for part in parts] == [6680, 404, 389]
    assert not parts[0] & (parts[1] | parts[2])
