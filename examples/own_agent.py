"""An agent with a custom reply format, warm-started from demonstrations and then trained. Run: python examples/own_agent.py

The bundled model has never seen this format: `calc(12 * 7)` to calculate, `= 84` to answer. Demonstrations teach it the format,
reinforcement learning then improves its answers.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from pathlib import Path
from typing import Any

import agentfly
from agentfly import Action, BaseAgent, Completion, Config, Message, Task, ToolCall
from agentfly.training import TrainResult


class CalcAgent(BaseAgent):
    def start(self, task: Task) -> list[Message]:
        return [Message("system", "Use calc(...), then = the answer."), *task.messages]

    def parse(self, completion: Completion) -> Action:
        if found := re.fullmatch(r"calc\((.{1,40})\)", completion.text.strip()):
            return Action(calls=(ToolCall("calculator", {"expression": found[1]}),))
        if found := re.fullmatch(r"= (.+)", completion.text.strip()):
            return Action(answer=found[1])
        return Action()  # neither: `on_no_tool_call` ends the chain


def row(rng: random.Random) -> dict[str, Any]:
    a, b, c = rng.randint(2, 12), rng.randint(2, 12), rng.randint(2, 30)
    return {"question": f"What is {a} times {b}, plus {c}?", "answer": str(a * b + c), "expression": f"{a} * {b} + {c}"}


def demonstration(task: dict[str, Any]) -> dict[str, Any]:
    said = [task["question"], f"calc({task['expression']})", f"Observation: {task['answer']}", f"= {task['answer']}"]
    return {"messages": [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, said, strict=True)]}


def main(warm_steps: int = 16, steps: int = 20, num_rows: int = 400, **settings: Any) -> TrainResult:
    rng = random.Random(0)
    rows = list({task["question"]: task for task in (row(rng) for _ in range(num_rows))}.values())
    part = len(rows) // 4  # demonstrations | training tasks | held-out tasks
    agent = CalcAgent("pocket", tools=["calculator"], reward="exact_match", max_turns=3, sampling={"max_tokens": 24})
    with tempfile.TemporaryDirectory() as folder:
        demos = Path(folder) / "demos.jsonl"
        demos.write_text("".join(json.dumps(demonstration(task)) + "\n" for task in rows[:part]))
        tree = {"data": {"train": str(demos)}, "train": {"steps": warm_steps, "lr": 1e-3}, "rollout": {"num_tasks": 16}}
        agentfly.sft(Config.from_dict({**tree, "run": {"dir": folder}}), agent=agent)
    options = {"lr": 3e-4, "num_tasks": 16, "validate_every": 0, **settings}
    return agentfly.train(agent, data=rows[part:-part], validation=rows[-part:], steps=steps, **options)


if __name__ == "__main__":
    result = main()
    print(f"success on held-out tasks: {result.before['validation/success']:.2f} -> {result.after['validation/success']:.2f}")
