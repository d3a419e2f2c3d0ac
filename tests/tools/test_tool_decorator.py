"""What can be decorated, what comes of it, and what is refused at once."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from agentfly import plugins
from agentfly.errors import ConfigError, UnknownName, WorldError
from agentfly.tools import Context, Tool, as_tool, call_tools, tool, tools_of
from agentfly.types import ToolCall


@tool
def double(x: float) -> float:
    """Double a number."""
    return 2 * x


@tool(name="triple-it", description="Triple a number.", max_length=50, timeout_s=2)
async def triple(x: float) -> float:
    return 3 * x


def test_a_decorated_function_still_is_that_function():
    assert double(4) == 8
    assert asyncio.run(triple(4)) == 12
    assert double.__name__ == "double"
    assert double.__doc__ == "Double a number."
    assert repr(double) == "<Tool double(x: number)>"


def test_options_are_kept():
    assert (double.name, double.max_length, double.timeout_s, double.stateful) == ("double", 10_000, 30.0, False)
    assert (triple.name, triple.description, triple.max_length, triple.timeout_s) == ("triple-it", "Triple a number.", 50, 2.0)


def test_a_tool_is_found_by_its_name():
    assert as_tool("double") is double
    assert as_tool("triple-it") is triple
    with pytest.raises(UnknownName, match="did you mean 'double'"):
        as_tool("duoble")


def test_every_builtin_tool_can_be_had_by_name_under_that_name():
    for name in plugins.BUILTIN["tools"]:
        assert as_tool(name).name == name


def test_importing_the_builtin_tools_does_not_hide_a_tool_of_the_same_name():
    @tool
    def divide(a: int) -> int:
        """Mine."""
        return a

    try:
        as_tool("add")
        assert as_tool("divide") is divide
    finally:
        del plugins._registered["tools"]["divide"]


def test_undecorated_things_become_tools_without_being_registered(call):
    def halve(x: float) -> float:
        """Halve a number."""
        return x / 2

    class Adder:
        """Add a fixed number."""

        def __init__(self, by: int):
            self.by = by

        def __call__(self, x: int) -> int:
            return x + self.by

        def method(self, x: int) -> int:
            """Take a fixed number away."""
            return x - self.by

    assert call(as_tool(halve), x=3).observation == "1.5"
    assert call(tool(Adder(5), name="adder", register=False), x=3).observation == "8"
    assert call(as_tool(Adder(5).method), x=3).observation == "-2"
    assert call(Tool(functools.partial(halve, x=4))).observation == "2.0"
    assert "halve" not in plugins.names("tools")


def test_decorating_again_changes_the_options():
    again = tool(double, name="twice", timeout_s=1, register=False)
    assert (again.name, again.timeout_s, again(2)) == ("twice", 1.0, 4)
    assert tool(double) is double


class Shop:
    def __init__(self, stock: str) -> None:
        self.stock = stock

    @tool
    def search(self, query: str) -> str:
        """Search the shop."""
        return f"{query} in {self.stock}"

    @tool(timeout_s=3)
    async def buy(self, item: str, context: Context) -> str:
        """Buy."""
        return f"bought {item} of {self.stock} for {context.task.id}"

    @tool
    @staticmethod
    def help() -> str:
        """Explain."""
        return "help"

    @staticmethod
    @tool
    def motto() -> str:
        """The motto."""
        return "motto"


def test_a_tool_in_a_class_body_binds_to_its_instance(call):
    shoes, hats = Shop("shoes"), Shop("hats")
    assert isinstance(shoes.search, Tool)
    assert shoes.search("red") == "red in shoes"
    assert call(shoes.search, query="red").observation == "red in shoes"
    assert call(hats.search, query="red").observation == "red in hats"
    assert call(hats.buy, item="fez").observation == "bought fez of hats for t0"
    assert call(shoes.help).observation == "help"
    assert call(shoes.motto).observation == "motto"
    assert shoes.search.schema["function"]["parameters"]["required"] == ["query"]
    assert (shoes.buy.timeout_s, shoes.buy.owner is shoes) == (3.0, True)


def test_tools_of_an_object_are_bound_and_a_subclass_may_take_one_away():
    class Closed(Shop):
        buy = None

    assert [t.name for t in tools_of(Shop("shoes"))] == ["search", "buy", "help"]
    assert [t.name for t in tools_of(Closed("shoes"))] == ["search", "help"]


def test_a_method_that_is_not_bound_is_a_failure_of_the_world_and_is_not_registered(call):
    with pytest.raises(WorldError, match="pass it bound"):
        call(Shop.search, query="red")
    assert plugins._registered["tools"].get("search") is not Shop.search


class Counter:
    """Count the calls."""

    made = 0
    closed: list[int] = []  # noqa: RUF012

    def __init__(self) -> None:
        type(self).made += 1
        self.count = 0

    def __call__(self, by: int = 1) -> int:
        self.count += by
        return self.count

    def close(self) -> None:
        self.closed.append(self.count)


def test_a_stateful_class_has_one_instance_per_chain_and_the_context_closes_it(context):
    counter = Tool(type("Mine", (Counter,), {"made": 0, "closed": []}), name="counter", stateful=True)
    other = Context(context.task, context.trajectory)

    async def main() -> list[str]:
        seen = []
        for chain in (context, context, other):
            (result,) = await call_tools({"counter": counter}, [ToolCall("counter")], chain)
            seen.append(result.observation)
        await context.close()
        await context.close()
        await other.close()
        return seen

    assert asyncio.run(main()) == ["1", "2", "1"]
    assert counter.cls.made == 2
    assert counter.cls.closed == [2, 1]


def test_a_class_that_is_not_stateful_has_one_instance_for_all(context):
    counter = Tool(type("Mine", (Counter,), {"made": 0}), name="counter")
    other = Context(context.task, context.trajectory)

    async def main() -> None:
        for chain in (context, other):
            await call_tools({"counter": counter}, [ToolCall("counter")] * 3, chain)
            await chain.close()

    asyncio.run(main())
    assert counter.cls.made == 1
    assert counter() == 7


def test_a_stateful_class_may_ask_for_its_chain(call):
    class Judge:
        """Judge a guess."""

        def __init__(self, task: Any, answer: str, tries: int = 3) -> None:
            self.answer, self.tries = answer, tries

        async def __call__(self, guess: str) -> bool:
            return guess == self.answer

    judge = Tool(Judge, stateful=True, inject=("answer",))
    assert judge.needs == {"answer"}
    assert call(judge, guess="84").observation == "true"


def test_closing_goes_on_when_one_instance_will_not_close(context, caplog):
    closed = []

    class Bad:
        def close(self) -> None:
            raise OSError("no")

    class Good:
        async def close(self) -> None:
            closed.append(True)

    context.instances.update(bad=Bad(), good=Good(), plain=object())
    asyncio.run(context.close())
    assert closed == [True]
    assert "closing Bad failed: OSError: no" in caplog.text


def nothing() -> None: ...


def refuses(said: str, target: Any, **options: Any) -> None:
    with pytest.raises(ConfigError, match=said):
        Tool(target, **options)


def test_what_cannot_be_a_tool_is_refused_when_it_is_decorated():
    class NoCall:
        """Cannot be called."""

    class NeedsMore:
        """Needs an argument."""

        def __init__(self, index: str) -> None: ...

        def __call__(self) -> None: ...

    class AsksChain:
        """Asks for its chain."""

        def __init__(self, task: Any) -> None: ...

        def __call__(self) -> None: ...

    def positional(*args: int) -> None: ...

    def generator(x: int):
        yield x

    async def asyncgen(x: int):
        yield x

    def named_task(task: str) -> None: ...

    refuses("has no description", nothing)
    refuses("not int", 5)
    refuses("no __call__", NoCall)
    refuses("needs 'index'", NeedsMore)
    refuses("stateful=True", AsksChain)
    refuses("class method", classmethod(nothing))
    refuses("cannot be a tool's name", lambda: 1, description="d")
    refuses("cannot be a tool's name", nothing, description="d", name="two words")
    refuses("positional", positional, description="d")
    refuses("generator", generator, description="d")
    refuses("generator", asyncgen, description="d")
    refuses("rename it", named_task, description="d")
    refuses("inject names 'answer'", nothing, description="d", inject=("answer",))
    refuses("list of names", nothing, description="d", inject="answer")
    refuses("max_length", nothing, description="d", max_length=0)
    refuses("timeout_s", nothing, description="d", timeout_s=0)
    refuses("timeout_s", nothing, description="d", timeout_s=None)
