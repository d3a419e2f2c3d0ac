"""The tool and the reward of the task."""

from typing import Any

from agentfly import FromTask, ToolError, reward, tool


@tool
def lookup(key: str, prices: FromTask[dict[str, int]]) -> int:
    """Look up a fact."""
    # `prices` is a field of the row. It is hidden from the model, which sees lookup(key: string).
    item = key.removeprefix("price of ").strip()
    if item not in prices:
        raise ToolError(f"nothing is known about {key!r}")  # the model reads this sentence, and the chain goes on
    return prices[item]


@reward
def right(prediction: str, answer: int) -> dict[str, Any]:
    """1 for the right number; whether the reply is a number at all is logged beside it."""
    number = prediction.strip().removesuffix(".0")
    return {"reward": float(number == str(answer)), "is_number": number.isdigit()}
