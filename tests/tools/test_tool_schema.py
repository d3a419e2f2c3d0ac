"""The JSON schema of each form of annotation, under postponed annotations."""

from __future__ import annotations

import enum
import subprocess
import sys
import typing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, Optional, Required, TypedDict, Union

import pytest

from agentfly.errors import ConfigError
from agentfly.tools import FromTask, Tool
from agentfly.tools.definition import tool

if typing.TYPE_CHECKING:
    from agentfly.tools import Context  # what only a type checker imports must not break a tool


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Shape(enum.Enum):
    ROUND = (1, 1)
    SQUARE = (1, 2)


@dataclass
class Point:
    """A place.

    Args:
        x: to the right
    """

    x: float
    y: float = 0.0


@dataclass
class Node:
    value: int
    children: list[Node] = field(default_factory=list)


class Item(TypedDict):
    name: str
    price: NotRequired[float]


class Loose(TypedDict, total=False):
    name: Required[str]
    price: float


def schema_of(annotation: Any) -> dict[str, Any]:
    def f(x): ...

    f.__annotations__ = {"x": annotation}
    return Tool(f, description="d").schema["function"]["parameters"]["properties"]["x"]


POINT = {
    "type": "object",
    "description": "A place.",
    "properties": {
        "x": {"type": "number", "description": "to the right"},
        "y": {"type": "number", "default": 0.0},
    },
    "required": ["x"],
}
ITEM = {"type": "object", "properties": {"name": {"type": "string"}, "price": {"type": "number"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (str, {"type": "string"}),
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (None, {"type": "null"}),
        (Any, {}),
        (object, {}),
        (Optional[int], {"type": ["integer", "null"]}),  # noqa: UP045
        (str | None, {"type": ["string", "null"]}),
        ("str | None", {"type": ["string", "null"]}),
        (Union[int, str], {"type": ["integer", "string"]}),  # noqa: UP007
        (int | float, {"type": "number"}),
        (list[int] | None, {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (Literal[1, "a"], {"enum": [1, "a"]}),
        (Color, {"type": "string", "enum": ["red", "blue"]}),
        (Shape, {"type": "string", "enum": ["ROUND", "SQUARE"]}),
        (list, {"type": "array"}),
        (list[int], {"type": "array", "items": {"type": "integer"}}),
        (typing.Sequence[str], {"type": "array", "items": {"type": "string"}}),
        (set[str], {"type": "array", "items": {"type": "string"}, "uniqueItems": True}),
        (tuple[int, ...], {"type": "array", "items": {"type": "integer"}}),
        (
            tuple[int, str],
            {"type": "array", "minItems": 2, "maxItems": 2, "prefixItems": [{"type": "integer"}, {"type": "string"}]},
        ),
        (dict, {"type": "object"}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (
            dict[Literal["a"], int],
            {"type": "object", "additionalProperties": {"type": "integer"}, "propertyNames": {"enum": ["a"]}},
        ),
        (Point, POINT),
        (list[Point], {"type": "array", "items": POINT}),
        (Item, ITEM),
        (Loose, ITEM),
        (Annotated[int, "how many"], {"type": "integer", "description": "how many"}),
        (typing.NewType("UserId", int), {"type": "integer"}),
        (typing.TypeVar("T", bound=int), {"type": "integer"}),
    ],
)
def test_each_form_of_annotation_has_its_schema(annotation, schema):
    assert schema_of(annotation) == schema


def test_a_record_that_contains_itself_is_referred_to():
    def f(tree: Node): ...

    parameters = Tool(f, description="d").schema["function"]["parameters"]
    assert parameters["properties"]["tree"] == {"$ref": "#/$defs/Node"}
    children = parameters["$defs"]["Node"]["properties"]["children"]
    assert children == {"type": "array", "items": {"$ref": "#/$defs/Node"}}


def test_pydantic_models_bring_their_own_schema():
    pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed: pip install 'pydantic'")

    class Inner(pydantic.BaseModel):
        title: str

    class Query(pydantic.BaseModel):
        """What to look for."""

        text: str = pydantic.Field(description="words", min_length=1)
        inner: Inner | None = None

    def f(query: Query, count: Annotated[int, pydantic.Field(ge=1, description="how many")]): ...

    parameters = Tool(f, description="d").schema["function"]["parameters"]
    query = parameters["properties"]["query"]
    assert query["properties"]["text"] == {"type": "string", "description": "words", "minLength": 1}
    assert parameters["$defs"]["Inner"]["properties"] == {"title": {"type": "string"}}
    assert parameters["properties"]["count"] == {"type": "integer", "minimum": 1, "description": "how many"}


def test_pydantic_is_not_imported_for_tools_that_do_not_use_it():
    code = (
        "import sys\nfrom agentfly.tools import tool\n@tool\ndef f(x: list[int] | None = None) -> str:\n    'Do.'\n"
        "print(sorted({'pydantic', 'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_defaults_descriptions_and_hidden_parameters():
    @tool(register=False, inject=("difficulty",))
    def look(
        query: str,
        answer: FromTask[str],
        difficulty: int,
        context: Context,
        env=None,
        limit: int = 10,
        color: Color = Color.RED,
        marker: Any = ...,
        place: str | None = None,
    ) -> str:
        """Look something up.

        Args:
            query: what to look for
            limit: how many
            answer: not shown
        """

    assert look.schema == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look something up.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for"},
                    "limit": {"type": "integer", "description": "how many", "default": 10},
                    "color": {"type": "string", "enum": ["red", "blue"], "default": "red"},
                    "marker": {"description": "optional, any value"},
                    "place": {"type": ["string", "null"], "default": None},
                },
                "required": ["query"],
            },
        },
    }
    assert look.needs == {"answer", "difficulty"}
    assert str(look) == ('look(query: string, limit: integer = 10, color: "red"|"blue" = "red", marker?: any, place?: string)')


def test_a_class_that_is_local_to_a_function_can_be_named():
    @dataclass
    class Local:
        other: Other

    @dataclass
    class Other:
        x: int

    def f(it: Local): ...

    schema = Tool(f, description="d").schema["function"]["parameters"]["properties"]["it"]
    assert schema["properties"]["other"]["properties"] == {"x": {"type": "integer"}}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the type statement is new in Python 3.12")
def test_type_aliases_are_followed_and_recursive_ones_refused():
    names: dict[str, Any] = {}
    exec("type Ids = list[int]\ntype Json = list[Json]", names)
    assert schema_of(names["Ids"]) == {"type": "array", "items": {"type": "integer"}}
    with pytest.raises(ConfigError, match="contains itself"):
        schema_of(names["Json"])


@pytest.mark.parametrize(
    ("annotation", "said"),
    [
        (complex, "complex has no JSON form"),
        (type, "no JSON form"),
        ([int], r"write list\[int\]"),
        (dict[tuple, int], "keys of a dict"),
        ("Nowhere", "names 'Nowhere'"),
        ("list[", "cannot be read"),
    ],
)
def test_a_type_without_a_json_form_is_refused_and_named(annotation, said):
    with pytest.raises(ConfigError, match=said) as caught:
        schema_of(annotation)
    assert "tool 'f'" in str(caught.value)
    assert "'x'" in str(caught.value)
