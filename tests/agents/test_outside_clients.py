"""Agents written with the frameworks of others: a scripted policy, three calls, one row; and one that learns.

Each test is skipped where its packages are missing: pip install openai anthropic langgraph langchain-openai openai-agents
'pydantic-ai-slim[openai]'
"""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentfly import OutsideAgent, ReactAgent, train
from agentfly.agents.outside import Llm
from agentfly.learn.samples import check_tokens, to_samples
from agentfly.testing import ByteRenderer, ScriptedEngine
from agentfly.types import Request, Task

QUESTION = "2 + 3, and then times 6?"
TOOLS = {"add": lambda a, b: a + b, "multiply": lambda a, b: a * b}


def called(name: str, a: int, b: int) -> str:
    """A reply with a thought, and blank space and an order of arguments that no client keeps."""
    return f'\n\nLet me  see.\n<tool_call>\n{{"name": "{name}", "arguments": {{"b":{b},  "a": {a}}}}}\n</tool_call>'


def policy(request: Request) -> str:
    """Adds, multiplies, and answers."""
    seen = [message.content for message in request.messages if message.role == "tool"]
    return [called("add", 2, 3), called("multiply", 5, 6), "\nIt is **30**."][len(seen)]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def schema(name: str) -> dict[str, Any]:
    number = {"type": "integer"}
    parameters = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
    return {"name": name, "description": f"{name} two numbers", "parameters": parameters}


async def openai_chat(task: Task, llm: Llm) -> str:
    openai = pytest.importorskip("openai", reason="pip install openai")
    client = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    tools = [{"type": "function", "function": schema(name)} for name in TOOLS]
    messages: list[Any] = [{"role": "user", "content": task.messages[0].content}]
    while True:
        done = await client.chat.completions.create(model=llm.model, messages=messages, tools=tools)
        message = done.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            said = TOOLS[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(said)})


async def openai_responses(task: Task, llm: Llm) -> str:
    openai = pytest.importorskip("openai", reason="pip install openai")
    client = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    tools = [{"type": "function", **schema(name)} for name in TOOLS]
    items: list[Any] = [{"role": "user", "content": task.messages[0].content}]
    while True:
        done = await client.responses.create(model=llm.model, input=items, tools=tools)
        items += done.output
        calls = [item for item in done.output if item.type == "function_call"]
        if not calls:
            return str(done.output_text)
        for call in calls:
            said = TOOLS[call.name](**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": str(said)})


async def anthropic_messages(task: Task, llm: Llm) -> str:
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")
    client = anthropic.AsyncAnthropic(base_url=llm.anthropic_url, api_key=llm.api_key)
    tools = [{"input_schema": made.pop("parameters"), **made} for made in map(schema, TOOLS)]
    messages: list[Any] = [{"role": "user", "content": task.messages[0].content}]
    while True:
        async with client.messages.stream(model=llm.model, messages=messages, tools=tools, max_tokens=200) as stream:
            done = await stream.get_final_message()
        messages.append({"role": "assistant", "content": done.content})
        calls = [block for block in done.content if block.type == "tool_use"]
        if not calls:
            return "".join(block.text for block in done.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": str(TOOLS[call.name](**call.input))} for call in calls
        ]
        messages.append({"role": "user", "content": results})


async def langgraph(task: Task, llm: Llm) -> str:
    pytest.importorskip("langgraph", reason="pip install langgraph langchain-openai")
    models = pytest.importorskip("langchain_openai", reason="pip install langgraph langchain-openai")
    from langgraph.prebuilt import create_react_agent

    model = models.ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)
    graph = create_react_agent(model, [add, multiply])
    state = await graph.ainvoke({"messages": [("user", task.messages[0].content)]})
    return str(state["messages"][-1].content)


async def openai_agents(task: Task, llm: Llm) -> str:
    agents = pytest.importorskip("agents", reason="pip install openai-agents")
    openai = pytest.importorskip("openai", reason="pip install openai")
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    model = agents.OpenAIResponsesModel(model=llm.model, openai_client=client)
    agent = agents.Agent(name="a", model=model, tools=[agents.function_tool(add), agents.function_tool(multiply)])
    return str((await agents.Runner.run(agent, task.messages[0].content)).final_output)


async def pydantic_ai(task: Task, llm: Llm) -> str:
    made = pytest.importorskip("pydantic_ai", reason="pip install 'pydantic-ai-slim[openai]'")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(llm.model, provider=OpenAIProvider(base_url=llm.base_url, api_key=llm.api_key))
    agent = made.Agent(model, tools=[add, multiply])
    return str((await agent.run(task.messages[0].content)).output)


CLIENTS = [openai_chat, openai_responses, anthropic_messages, langgraph, openai_agents, pydantic_ai]


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_an_agent_of_a_framework_is_one_row_without_a_break(client: Any) -> None:
    skipped: list[BaseException] = []

    async def run(task: Task, llm: Llm) -> str:
        try:
            said: str = await client(task, llm)
        except pytest.skip.Exception as missing:
            skipped.append(missing)
            raise RuntimeError("skipped") from missing
        return said.strip()

    agent = OutsideAgent(
        ScriptedEngine(policy, record=True), run, renderer=ByteRenderer(), parser="hermes", reward="exact_match",
        sampling={"max_tokens": 200},
    )  # fmt: skip
    result = agent.run_sync([{"question": QUESTION, "answer": "It is **30**."}], num_chains=3)
    if skipped:
        raise skipped[0]
    assert result.rewards == [1.0] * 3, [chain.error for chain in result]
    for chain in result:
        assert [turn.why for turn in chain] == ["first", "", ""]
        assert chain.tool_counts == {"add": 1, "multiply": 1}
        assert [turn.results[0].observation for turn in chain.turns[:2]] == ["5", "30"]
        rows = to_samples(chain)
        check_tokens(chain, rows, versions=range(1))
        assert len(rows) == 1 and agent.renderer.decode(rows[0].token_ids.tolist()).count('{"b":3,  "a": 2}') == 1  # type: ignore[union-attr]


# ---- learning ------------------------------------------------------------------------------------------------------------

ARITHMETIC = {**TOOLS, "subtract": lambda a, b: a - b}
PROMPT = ReactAgent("pocket", tools=list(ARITHMETIC)).prompt


async def loop(task: Task, say: Any) -> str:
    """A loop that knows nothing of training: `say` takes messages and returns the reply."""
    messages = [("system", PROMPT), ("user", task.messages[0].content)]
    for _ in range(4):
        reply = await say(messages)
        found = re.search(r"Action: *(\w+)\s+Input: *(\{.*?\})", reply, re.DOTALL)
        if not found:
            answer = re.search(r"Answer: *(.*)", reply)
            return answer[1].strip() if answer else ""
        try:
            said = str(ARITHMETIC[found[1]](**json.loads(found[2])))
        except Exception as error:
            said = f"error: {type(error).__name__}"
        messages += [("assistant", reply), ("user", f"Observation: {said}")]
    return ""


async def with_httpx(task: Task, llm: Llm) -> str:
    async with httpx.AsyncClient(trust_env=False, timeout=600, headers={"Authorization": f"Bearer {llm.api_key}"}) as client:

        async def say(messages: list[tuple[str, str]]) -> str:
            body = {"model": llm.model, "messages": [{"role": role, "content": text} for role, text in messages]}
            response = await client.post(f"{llm.base_url}/chat/completions", json=body)
            return str(response.raise_for_status().json()["choices"][0]["message"]["content"])

        return await loop(task, say)


async def with_langgraph(task: Task, llm: Llm) -> str:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    model = ChatOpenAI(model=llm.model, base_url=llm.base_url, api_key=llm.api_key)

    async def reply(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("reply", reply)
    graph.add_edge(START, "reply")
    graph.add_edge("reply", END)
    compiled = graph.compile()

    async def say(messages: list[tuple[str, str]]) -> str:
        return str((await compiled.ainvoke({"messages": messages}))["messages"][-1].content)

    return await loop(task, say)


@pytest.mark.parametrize("function", [with_httpx, with_langgraph], ids=lambda function: function.__name__)
def test_an_agent_with_a_loop_of_its_own_learns_the_task_of_the_quick_start(function: Any, tmp_path: Path) -> None:
    if function is with_langgraph:
        for name in ("langgraph", "langchain_openai"):
            pytest.importorskip(name, reason="pip install langgraph langchain-openai")
    agent = OutsideAgent("pocket", function, reward="exact_match", sampling={"max_tokens": 64})
    result = train(
        agent, data="arithmetic", train_count=400, validation_count=60, steps=6, lr=2e-4, num_tasks=8, num_chains=8,
        clip_high=0.28, **{"run.dir": str(tmp_path)},
    )  # fmt: skip
    before, after = result.before["validation/success"], result.after["validation/success"]
    assert before < 0.5 and after > before + 0.25
    assert result.history[-1]["train/splits"] == 0, "no client of these breaks a row"
    assert asyncio.run(agent.close()) is None
