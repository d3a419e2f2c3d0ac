"""A tool whose parameters are given as a JSON schema: what the model sees, what is refused, and what the function gets."""

from __future__ import annotations

import json

import pytest

from agentfly.errors import ConfigError
from agentfly.tools import Tool
from agentfly.types import Task

SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {
        "path": {"type": "string", "minLength": 1, "description": "where"},
        "lines": {"type": "integer"},
        "mode": {"enum": ["text", "hex", None]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/place"},
        "either": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "maybe": {"type": ["boolean", "null"]},
        "point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False},
        "odd-name": {},
    },
    "required": ["path"],
    "$defs": {
        "place": {"type": "object", "properties": {"name": {"type": "string"}, "inside": {"$ref": "#/$defs/place"}}},
    },
}


def made(schema=SCHEMA, seen=None) -> Tool:
    def read(**arguments):
        if seen is not None:
            seen.append(arguments)
        return json.dumps(arguments)

    return Tool(read, parameters=schema, name="read-file", description="Reads a file.")


def test_the_model_sees_the_schema_as_it_was_given_and_in_its_order():
    shown = made().schema["function"]
    assert shown == {"name": "read-file", "description": "Reads a file.", "parameters": SCHEMA}
    assert list(shown["parameters"]["properties"]) == list(SCHEMA["properties"])
    assert shown["parameters"] is not SCHEMA, "a copy: a change of the given one does not change the tool"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, 'missing argument "path"'),
        ({"path": "a", "colour": 1}, 'unknown argument "colour"'),
        ({"path": 3}, '"path" must be a string, got the number 3'),
        ({"path": "a", "lines": "many"}, '"lines" must be an integer, got the string "many"'),
        ({"path": "a", "lines": True}, '"lines" must be an integer, got true'),
        ({"path": "a", "mode": "octal"}, '"mode" must be one of "text", "hex", null'),
        ({"path": "a", "tags": ["a", 1]}, '"tags[1]" must be a string'),
        ({"path": "a", "tags": "a"}, '"tags" must be a list'),
        ({"path": "a", "where": {"inside": {"inside": {"name": 4}}}}, '"where.inside.inside.name" must be a string'),
        ({"path": "a", "either": "x"}, '"either" must be a number'),
        ({"path": "a", "maybe": 1}, '"maybe" must be true or false'),
        ({"path": "a", "point": {}}, '"point" has no field "x"'),
        ({"path": "a", "point": {"x": 1, "y": 2}}, '"point" has an unknown field "y"'),
        ({"path": "a", "point": [1]}, '"point" must be an object'),
    ],
)
def test_what_does_not_fit_is_the_models_mistake_and_never_reaches_the_function(call, arguments, problem):
    seen = []
    result = call(made(seen=seen), **arguments)
    assert result.error == "bad_arguments"
    assert problem in result.observation
    assert seen == []


def test_arguments_reach_the_function_converted_and_in_the_order_of_the_model(call):
    given = {
        "odd-name": {"any": [1]}, "path": "a", "lines": "12", "tags": '["x"]', "mode": None, "either": None, "maybe": "true",
        "point": {"x": 1.5}, "where": {"name": "here", "more": 1},
    }  # fmt: skip
    seen = []
    assert call(made(seen=seen), **given).error is None
    assert seen == [{**given, "lines": 12, "tags": ["x"], "maybe": True}]
    assert list(seen[0]) == list(given)


def test_other_arguments_pass_where_the_schema_allows_them(call):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    assert call(made(schema), a="x", b="3").observation == '{"a": "x", "b": 3}'
    assert call(made(schema), a="x", b="y").error == "bad_arguments"
    assert call(made({"type": "object", "additionalProperties": True}), b="y").observation == '{"b": "y"}'
    assert call(made({"type": "object"}), b="y").error == "bad_arguments"


def test_all_parts_of_an_all_of_must_fit_and_one_value_of_a_const(call):
    schema = {"properties": {"a": {"allOf": [{"type": "integer"}, {"enum": [1, 2]}]}, "b": {"const": {"k": 1}}}}
    assert call(made(schema), a=2, b={"k": 1}).error is None
    assert call(made(schema), a=3).error == "bad_arguments"
    assert call(made(schema), b={"k": 2}).error == "bad_arguments"


def test_the_framework_fills_what_the_schema_does_not_name(call):
    def ask(question: str, task: Task, answer: object = None, trajectory=None):
        return f"{question} {getattr(task, 'id', task)} {answer} {trajectory is not None}"

    schema = {"type": "object", "properties": {"question": {"type": "string"}}}
    tool = Tool(ask, parameters={**schema, "required": ["question"]}, description="Asks.", inject=("answer",))
    assert call(tool, question="why").observation == "why t0 84 True"
    assert call(tool, question="why", task="mine").error == "bad_arguments"
    own = {"properties": {**schema["properties"], "task": {"type": "string"}}, "required": ["question", "task"]}
    tool = Tool(ask, parameters=own, description="Asks.")
    assert call(tool, question="why", task="mine").observation == "why mine None True", (
        "an argument of the schema is the model's"
    )


def test_a_call_that_names_no_argument_of_a_reference_to_itself_ends(call):
    schema = {"properties": {"a": {"$ref": "#/$defs/loop"}}, "$defs": {"loop": {"$ref": "#/$defs/loop"}}}
    assert call(made(schema), a=1).error == "bad_arguments"


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ([], "the JSON schema of an object"),
        ({"type": "string"}, "the JSON schema of an object"),
        ({"properties": []}, "`properties` must be an object"),
        ({"properties": {"a": 3}}, "3 is not a schema"),
        ({"properties": {"a": {"type": "text"}}}, "unknown type 'text'"),
        ({"properties": {"a": {"$ref": "http://x/y"}}}, "only references inside it"),
        ({"properties": {"a": {"$ref": "#/$defs/x"}}}, "only references inside it"),
        ({"required": ["a"]}, "'a' is required"),
        ({"properties": {"a": {"default": float("nan")}}}, "must be a JSON schema"),
    ],
)
def test_a_schema_that_cannot_be_checked_is_refused_in_a_sentence(schema, problem):
    with pytest.raises(ConfigError, match="tool 'read-file'") as caught:
        made(schema)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda path, more: "", "parameter 'more' of the function is not in the given schema"),
        (lambda: "", "the schema has the argument 'path', which the function does not take"),
        (lambda path, lines: "", "parameter 'lines' of the function has no default"),
    ],
)
def test_a_function_that_does_not_fit_its_schema_is_refused(function, problem):
    schema = {"properties": {"path": {"type": "string"}, "lines": {"type": "integer"}}, "required": ["path"]}
    if "path" in problem:
        del schema["properties"]["lines"]
    with pytest.raises(ConfigError, match=problem):
        Tool(function, parameters=schema, name="read", description="Reads.")
