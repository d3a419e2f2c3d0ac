"""Writes train.jsonl and held_out.jsonl: one row per line, `question` and the fields that the tool and the reward ask for."""

import json
import random
from pathlib import Path

FOLDER = Path(__file__).parent


def make_rows(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Questions that need the price of an item and a subtraction."""
    rng = random.Random(seed)

    def name() -> str:
        return "".join(rng.choice("bdgklmnprst") + rng.choice("aeiou") for _ in range(2)).capitalize()

    rows: dict[str, dict[str, object]] = {}
    while len(rows) < count:
        item, other = name(), name()
        price, coins = rng.randint(2, 30), rng.randint(40, 60)
        question = f"What is {coins} minus the price of {item}?"
        rows[question] = {"question": question, "prices": {item: price, other: price + 1}, "answer": coins - price}
    return list(rows.values())


if __name__ == "__main__":
    made = make_rows(240)
    for file_name, part in (("train.jsonl", made[:200]), ("held_out.jsonl", made[200:])):
        with (FOLDER / file_name).open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in part)
