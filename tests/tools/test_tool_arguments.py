"""What becomes of the arguments a model writes: converted, or refused in words that help it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentfly.tools import Tool
from agentfly.tools.signature import BadArguments, Signature


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass
class Point:
    x: float
    y: float = 0.0

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("x is negative")


@dataclass
class Node:
    value: int
    children: list[Node] = field(default_factory=list)


@dataclass
class Left:
    child: Left | Right | None = None
    bad: int = 0


@dataclass
class Right:
    child: Left | Right | None = None
    bad: int = 0


class Item(TypedDict):
    name: str
    price: float


def signature(annotation: Any) -> Signature:
    def f(x): ...

    f.__annotations__ = {"x": annotation}
    return Signature(f)


def bind(annotation: Any, value: Any) -> Any:
    return signature(annotation).bind({"x": value}, None)["x"]


def refusal(annotation: Any, value: Any) -> str:
    with pytest.raises(BadArguments) as caught:
        bind(annotation, value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (str, "a", "a"),
        (float, 12, 12),
        (float, 1.5, 1.5),
        (float, "12", 12),
        (float, " 1.5 ", 1.5),
        (int, 1.0, 1),
        (int, "12", 12),
        (int, "12.0", 12),
        (bool, True, True),
        (bool, "False", False),
        (int | None, None, None),
        (int | str, "12", "12"),
        (int | None, "12", 12),
        (Literal[1, 2], 1.0, 1),
        (Literal[1, 2], "2", 2),
        (Literal["Paris", "Rome"], "paris", "Paris"),
        (Color, "red", Color.RED),
        (Color, "BLUE", Color.BLUE),
        (Level, 2, Level.HIGH),
        (Level, "LOW", Level.LOW),
        (list[int], ["1", 2], [1, 2]),
        (list[int], "[1, 2]", [1, 2]),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[int, ...], [1, 2], (1, 2)),
        (set[int], [1, 1, 2], {1, 2}),
        (dict[str, int], {"a": "1"}, {"a": 1}),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (Point, {"x": 1}, Point(1, 0.0)),
        (Point, '{"x": 1}', Point(1, 0.0)),
        (list[Point], [{"x": 1}, {"x": 2, "y": 3}], [Point(1), Point(2, 3)]),
        (Node, {"value": 1, "children": [{"value": 2}]}, Node(1, [Node(2)])),
        (Point | str, {"x": 1}, Point(1)),
        (Point | str, "x", "x"),
        (Item, {"name": "a", "price": 1}, {"name": "a", "price": 1}),
        (str, "a\ud800b", "a\ufffdb"),
        (str, "\ud83d\ude00", "\U0001f600"),
        (Any, {"deep": [None]}, {"deep": [None]}),
    ],
)
def test_what_is_meant_is_taken(annotation, value, expected):
    made = bind(annotation, value)
    assert made == expected
    assert type(made) is type(expected)


@pytest.mark.parametrize(
    ("annotation", "value", "said"),
    [
        (str, 5, '"x" must be a string, got the number 5'),
        (int, "abc", '"x" must be an integer, got the string "abc"'),
        (int, 1.5, '"x" must be an integer, got the number 1.5'),
        (int, True, '"x" must be an integer, got true'),
        (float, False, '"x" must be a number, got false'),
        (float, None, '"x" must be a number, got null'),
        (float, math.nan, '"x" must be a finite number, got the number nan'),
        (float, "nan", '"x" must be a number, got the string "nan"'),
        (float, math.inf, '"x" must be a finite number, got the number inf'),
        (float, [], '"x" must be a number, got a list'),
        (bool, 1, '"x" must be true or false, got the number 1'),
        (bool, 0, '"x" must be true or false, got the number 0'),
        (int, "9" * 5000, f'"x" must be an integer, got the string "{"9" * 40}..."'),
        (int | None, [], '"x" must be an integer or null, got a list'),
        (Literal["a", "b"], "c", '"x" must be one of "a", "b", got the string "c"'),
        (Literal[1, 2], True, '"x" must be one of 1, 2, got true'),
        (Color, {}, '"x" must be one of "red", "blue", got an object'),
        (list[int], 5, '"x" must be a list, got the number 5'),
        (list[int], [1, "a"], '"x[1]" must be an integer, got the string "a"'),
        (dict[str, list[int]], {"a": [1, None]}, '"x.a[1]" must be an integer, got null'),
        (tuple[int, str], [1], '"x" must be a list of 2 values, got 1'),
        (set[Any], [[]], '"x" must be a list of values that can be compared, got a list'),
        (Point, 5, '"x" must be an object with x, y, got the number 5'),
        (Point, {}, '"x" has no field "x"'),
        (Point, {"x": 1, "yy": 2}, '"x" has an unknown field "yy" (did you mean "y"?)'),
        (Point, {"x": "a"}, '"x.x" must be a number, got the string "a"'),
        (Point, {"x": -1}, '"x" is refused: ValueError: x is negative'),
        (Point | None, {"x": "a"}, '"x.x" must be a number, got the string "a"'),
        (Item, {"name": "a"}, '"x" has no field "price"'),
    ],
)
def test_what_does_not_fit_is_refused_in_words(annotation, value, said):
    assert refusal(annotation, value) == said


def test_missing_and_unknown_arguments_are_named(call):
    def search(query: str, limit: int = 10) -> str:
        """Search."""
        return query

    result = call(Tool(search), qeury="shoes")
    assert result.error == "bad_arguments"
    assert result.observation == (
        'Bad arguments for search: missing argument "query"; unknown argument "qeury" (did you mean "query"?). '
        "Expected search(query: string, limit: integer = 10)."
    )


def test_what_the_framework_passes_cannot_be_passed_by_the_model(call):
    def check(guess: str, answer: str, task: Any) -> str:
        """Check."""
        return f"{guess} {answer} {task.id}"

    made = Tool(check, inject=("answer",))
    assert call(made, guess="1").observation == "1 84 t0"
    refused = call(made, guess="1", answer="1", task=2)
    assert refused.error == "bad_arguments"
    assert 'unknown argument "answer"' in refused.observation
    assert 'unknown argument "task"' in refused.observation


def test_extra_keyword_arguments_are_passed_on_where_a_tool_takes_them(call):
    def note(title: str, answer: str, **rest: int) -> dict[str, Any]:
        """Note."""
        return rest

    made = Tool(note, inject=("answer",))
    assert call(made, title="a", b="1").observation == '{"b": 1}'
    assert call(made, title="a", b="x").error == "bad_arguments"
    assert call(made, title="a", answer="x").error == "bad_arguments"


@pytest.mark.parametrize("arguments", [None, [], "text", 5])
def test_arguments_that_are_no_object_are_refused(arguments):
    with pytest.raises(BadArguments, match="must be a JSON object"):
        signature(int).bind(arguments, None)


def test_messages_stay_short_whatever_the_model_sends():
    huge = {f"k{i}" * 100: "v" * 10_000 for i in range(10_000)}
    with pytest.raises(BadArguments) as caught:
        signature(int).bind(huge, None)
    assert len(str(caught.value)) < 1_000
    assert len(refusal(Literal["a"], "b" * 1_000_000)) < 200
    assert len(refusal(int, [10**5000])) < 200
    assert refusal(str, 10**5000) == '"x" must be a string, got a very large integer'


def nested(depth: int, wrap: Any, innermost: Any) -> Any:
    value = innermost
    for _ in range(depth):
        value = wrap(value)
    return value


def test_thousands_of_levels_are_refused_or_passed_but_never_raise():
    tree = nested(100_000, lambda inner: {"value": 1, "children": [inner]}, {"value": 1})
    assert refusal(Node, tree) == '"x" is nested too deeply'
    assert isinstance(bind(Any, tree), dict)
    assert isinstance(bind(dict[str, Any], tree), dict)
    assert "must be a list" in refusal(list[int], "[" * 100_000)


def test_a_recursive_union_takes_linear_time_even_when_every_member_fails():
    # Without a memory of what was tried this is 2 ** 60 attempts.
    tree = nested(60, lambda inner: {"child": inner}, {"bad": "x"})
    assert "must be" in refusal(Left | Right, tree)
    assert isinstance(bind(Left | Right, nested(60, lambda inner: {"child": inner}, {"bad": 1})), Left)


def test_pydantic_models_are_built_and_their_refusals_are_short():
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed: pip install 'pydantic'")

    class Query(pydantic.BaseModel):
        text: str
        tags: list[int] = pydantic.Field(default_factory=list)

    assert bind(Query, {"text": "a", "tags": [1]}) == Query(text="a", tags=[1])
    assert bind(Query | None, None) is None
    said = refusal(Query, {"text": "a", "tags": [1, "x"]})
    assert said.startswith('"x.tags[1]" is refused: ')
    assert len(said) < 200


# Random JSON against random annotations: nothing but BadArguments is raised, and what passes has the type that was asked for.

SCALARS: list[Any] = [str, int, float, bool, None, Literal["a", "b"], Literal[1, "1"], Color, Level]


def build(kind: str, inner: Any) -> Any:
    return {"list": list[inner], "dict": dict[str, inner], "tuple": tuple[inner, ...]}[kind]


annotations = st.recursive(
    st.sampled_from([*SCALARS, Point, Node, Item]),
    lambda inner: (
        st.builds(build, st.sampled_from(["list", "dict", "tuple"]), inner)
        | st.builds(lambda kind: kind | None, st.sampled_from([str, int, float, Color, Point]))
        | st.builds(lambda a, b: tuple[a, b], inner, inner)
    ),
    max_leaves=4,
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["a", "1", "red", "true", "[1]", "{}", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["x", "y", "value", "children", "name", "price"]) | st.text(max_size=3), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def fits(value: Any, annotation: Any) -> bool:
    """An independent reading of the annotations above."""
    origin, args = getattr(annotation, "__origin__", None), getattr(annotation, "__args__", ())
    if annotation is None:
        return value is None
    if annotation is float:
        return type(value) in (int, float) and math.isfinite(value)
    if annotation in (str, int, bool):
        return type(value) is annotation
    if origin is Literal:
        return any(value == option and type(value) is type(option) for option in args)
    if origin is list:
        return type(value) is list and all(fits(part, args[0]) for part in value)
    if origin is dict:
        return type(value) is dict and all(type(key) is str and fits(part, args[1]) for key, part in value.items())
    if origin is tuple and args[-1] is Ellipsis:
        return type(value) is tuple and all(fits(part, args[0]) for part in value)
    if origin is tuple:
        return type(value) is tuple and all(fits(part, arg) for part, arg in zip(value, args, strict=True))
    if annotation is Item:
        return type(value) is dict and fits(value["name"], str) and fits(value["price"], float)
    if isinstance(annotation, type):
        if not isinstance(value, annotation):
            return False
        if annotation is Node:
            return fits(value.value, int) and fits(value.children, list[Node])
        return annotation is not Point or (fits(value.x, float) and fits(value.y, float))
    return any(fits(value, arg if arg is not type(None) else None) for arg in args)


@settings(max_examples=400, deadline=None)
@given(annotations, json_values)
@example(list[Node], [{"value": 1, "children": "[]"}])
def test_random_json_against_random_annotations(annotation, value):
    try:
        made = bind(annotation, value)
    except BadArguments as refused:
        text = str(refused)
        assert text.encode()
        assert len(text) < 2_000
    else:
        assert fits(made, annotation)


valid = st.sampled_from(
    [
        (list[int], st.lists(st.integers())),
        (
            dict[str, float],
            st.dictionaries(
                st.text(st.characters(exclude_categories=["Cs"])),
                st.integers() | st.floats(allow_nan=False, allow_infinity=False),
            ),
        ),
        (str | int | None, st.none() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]))),
        (Literal["a", 1, True], st.sampled_from(["a", 1, True])),
    ]
).flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1]))


@given(valid)
def test_exact_values_pass_unchanged(case):
    annotation, value = case
    assert bind(annotation, value) == value
