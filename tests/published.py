"""Miniatures of the published data sets, in their own formats: small enough for the bundled model, made from nothing else."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

from tests.envs.alfworld.house import GOALS, problem

COLOURS = ("red", "blue", "green", "white", "black", "grey")
SIZES = ("s", "m", "l", "xl", "2xl", "3xl", "4xl")


def write_games(folder: Path) -> Path:
    """A household with tasks of every kind, as files of many games: train and valid_seen."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, kinds in (("train", list(GOALS)), ("valid_seen", list(GOALS)[:2])):
        rows = [
            {"game": f"{split}/{kind}-{number}/trial_T{number}", "task": f"task {kind}", "pddl_problem": problem(kind)}
            for number, kind in enumerate(kinds)
        ]
        (folder / f"games_{split}.jsonl.gz").write_bytes(
            gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode())
        )
    return folder


def write_shop(folder: Path) -> Path:
    """Products whose names share no word, each in every colour and size: goals enough for all three splits."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["".join(parts) for parts in itertools.islice(itertools.product("bdfgk", "aeiou", ("lmo", "rna")), 40)]
    options = {"color": [{"value": value} for value in COLOURS], "size": [{"value": value} for value in SIZES]}
    records = [
        {
            "asin": f"B0000000{number:02d}",
            "name": f"{name} hat",
            "full_description": "",
            "small_description": ["made of wool"],
            "pricing": "$10.00",
            "customization_options": options,
            "images": [],
            "category": "fashion",
            "query": name,
            "product_category": "Fashion › Hats",
        }
        for number, name in enumerate(names)
    ]
    extras = {
        record["asin"]: {"attributes": ["wool"], "instruction": f"Find me {name}", "instruction_attributes": ["wool"]}
        for record, name in zip(records, names, strict=True)
    }
    (folder / "items_shuffle_1000.json").write_text(json.dumps(records), encoding="utf-8")
    (folder / "items_ins_v2_1000.json").write_text(json.dumps(extras), encoding="utf-8")
    return folder


def write_questions(folder: Path) -> Path:
    """Questions about people and towns, in HotpotQA's format, and the passages that answer them."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["".join(parts) for parts in itertools.product("BDKL", "ae", ("rin", "lom", "sto", "vek", "gad"))]
    questions = [
        {"_id": f"q{n}", "question": f"Where was {name} born?", "answer": f"{name}ton", "supporting_facts": [[name, 0]]}
        for n, name in enumerate(names)
    ]
    passages = [{"id": f"{n}", "title": name, "text": f"{name} was born in {name}ton."} for n, name in enumerate(names)]
    for stem, rows in (("questions", questions), ("passages", passages)):
        (folder / f"{stem}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def write_gsm8k(folder: Path) -> Path:
    """Word problems with worked answers that mark their steps: train.jsonl and test.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, people, numbers in (("train", ("Ann", "Bob", "Eve"), range(3, 18)), ("test", ("Tim", "Zoe"), range(20, 40))):
        rows = [
            {
                "question": f"{person} has {n} boxes of 4 pens and buys 5 more pens. How many pens has {person}?",
                "answer": f"The boxes hold {n} * 4 = <<{n}*4={4 * n}>>{4 * n} pens.\n"
                f"With the new ones {person} has {4 * n} + 5 = <<{4 * n}+5={4 * n + 5}>>{4 * n + 5} pens.\n#### {4 * n + 5}",
            }
            for person in people
            for n in numbers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder
