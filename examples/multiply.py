"""An agent, a tool and a reward: eight chains of one question with the bundled model. Run: python examples/multiply.py"""

from __future__ import annotations

from agentfly import ReactAgent, RunResult, Trajectory, reward, tool


@tool(name="multiply")
def multiply(a: float, b: float) -> float:
    """Multiply two numbers.

    Args:
        a: first factor
        b: second factor
    """
    return a * b


@reward(name="exact")
def exact(prediction: str, trajectory: Trajectory, answer: str) -> float:
    return float(prediction.strip() == answer)


def main(num_chains: int = 8) -> RunResult:
    agent = ReactAgent("pocket", tools=[multiply], reward=exact)
    tasks = [{"question": "What is 12 times 7?", "answer": "84"}]
    result = agent.run_sync(tasks, num_chains=num_chains, max_turns=4, sampling={"max_tokens": 64})
    print("rewards:", result.rewards)
    for message in result.trajectories[0].messages:
        print(f"[{message.role}] {message.content}")
    return result


if __name__ == "__main__":
    main()
