"""Compiles types with named fields to a `Form`: dataclasses, TypedDicts and pydantic models.

The schema of a recursive type is put into `$defs` and referenced; other schemas are written in place, which is shorter for the
model. pydantic is imported only if an annotation belongs to it.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Callable
from typing import Any

from .docstring import parse_docstring
from .scalars import Form, FormCompiler, Memo, Mismatch, Schema, convert_part, read_json
from .text import describe_error, quote

_REQUIRED, _NOT_REQUIRED = "Required", "NotRequired"


def compile_record(compiler: FormCompiler, annotation: object) -> Form | None:
    """The form of a type with fields, or None for another type."""
    if not isinstance(annotation, type):
        return None
    if hasattr(annotation, "__pydantic_validator__"):
        return compile_pydantic(compiler, annotation)
    if dataclasses.is_dataclass(annotation):
        return _once(compiler, annotation, _dataclass_fields)
    if issubclass(annotation, dict) and hasattr(annotation, "__required_keys__"):
        return _once(compiler, annotation, _typed_dict_fields)
    return None


@dataclasses.dataclass(frozen=True, slots=True)
class _Field:
    form: Form
    required: bool
    schema: Schema


def _dataclass_fields(compiler: FormCompiler, cls: type) -> dict[str, _Field]:
    hints = compiler.hints(cls)
    made: dict[str, _Field] = {}
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        form = compiler.compile(hints[field.name])
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        schema = form.schema
        if type(field.default) in (str, int, float, bool, type(None)):
            schema = {**schema, "default": field.default}
        made[field.name] = _Field(form, required, schema)
    return made


def _typed_dict_fields(compiler: FormCompiler, cls: type) -> dict[str, _Field]:
    made: dict[str, _Field] = {}
    required_keys: frozenset[str] = cls.__required_keys__  # type: ignore[attr-defined]
    for name, hint in compiler.hints(cls).items():
        required = name in required_keys
        while (mark := getattr(typing.get_origin(hint), "_name", None)) in (_REQUIRED, _NOT_REQUIRED, "ReadOnly"):
            # With postponed annotations `__required_keys__` ignores these markers, so they are read here.
            required = required if mark == "ReadOnly" else mark == _REQUIRED
            hint = typing.get_args(hint)[0]
        form = compiler.compile(hint)
        made[name] = _Field(form, required, form.schema)
    return made


def _once(compiler: FormCompiler, cls: type, fields_of: Callable[[FormCompiler, type], dict[str, _Field]]) -> Form:
    """Compiles a type with fields; a reference to it inside itself becomes a `$ref`."""
    if cls in compiler.open:
        entry = compiler.open[cls]
        entry[0] = entry[0] or _free_name(compiler, cls.__name__)
        return Form({"$ref": f"#/$defs/{entry[0]}"}, lambda value, memo: entry[1](value, memo), frozenset({"object"}))
    entry = compiler.open[cls] = [None, None]
    fields = fields_of(compiler, cls)
    del compiler.open[cls]
    entry[1] = _converter(cls, fields)
    schema = _object_schema(cls, fields)
    if entry[0] is not None:
        compiler.defs[entry[0]] = schema
        schema = {"$ref": f"#/$defs/{entry[0]}"}
    return Form(schema, entry[1], frozenset({"object"}))


def _object_schema(cls: type, fields: dict[str, _Field]) -> Schema:
    doc = cls.__doc__ or ""
    own_doc = "" if doc.startswith(f"{cls.__name__}(") else doc  # Python gives a dataclass without a docstring its signature
    summary, described = parse_docstring(own_doc if own_doc != dict.__doc__ else "")
    properties = {
        name: {**field.schema, "description": described[name]} if name in described else field.schema
        for name, field in fields.items()
    }
    schema: Schema = {"type": "object", "properties": properties, "required": [n for n, f in fields.items() if f.required]}
    return {**schema, "description": summary} if summary else schema


def _converter(cls: type, fields: dict[str, _Field]) -> Callable[[Any, Memo], Any]:
    required = [name for name, field in fields.items() if field.required]
    expected = f"an object with {', '.join(fields) or 'no fields'}"

    def convert(value: object, memo: Memo) -> Any:
        given = read_json(value, "{", dict, memo)
        if type(given) is not dict:
            raise Mismatch(expected, value)
        for name in required:
            if name not in given:
                raise Mismatch("", value, because=f"has no field {quote(name)}")
        for name in given:
            if name not in fields:
                raise Mismatch("", value, because=f"has {unknown(name, fields, 'field')}")
        made = {name: convert_part(name, fields[name].form.convert, part, memo) for name, part in given.items()}
        try:
            return cls(**made)
        except RecursionError:
            raise
        except Exception as error:  # noqa: BLE001 - the checks of a user's class may raise anything
            raise Mismatch("", value, because=f"is refused: {describe_error(error)}") from None

    return convert


def unknown(name: object, known: typing.Iterable[str], what: str) -> str:
    """`an unknown field "colour" (did you mean "color"?)`."""
    names = list(known)
    near = difflib.get_close_matches(str(name)[:64], names, n=1, cutoff=0.5)
    hint = f"did you mean {quote(near[0])}?" if near else f"known: {', '.join(names[:20]) or 'none'}"
    return f"an unknown {what} {quote(str(name))} ({hint})"


def _free_name(compiler: FormCompiler, name: str) -> str:
    taken = set(compiler.defs) | {entry[0] for entry in compiler.open.values()}
    return next(free for n in range(1, len(taken) + 3) if (free := name if n == 1 else f"{name}{n}") not in taken)


def compile_pydantic(compiler: FormCompiler, annotation: Any) -> Form:
    """The form of a type that pydantic describes and validates."""
    import pydantic

    adapter: Any = pydantic.TypeAdapter(annotation)
    schema = _untitled(adapter.json_schema())
    defs = schema.pop("$defs", {})
    if any(compiler.defs.get(name, body) != body for name, body in defs.items()):
        prefix = f"{getattr(annotation, '__name__', 'type')}{len(compiler.defs)}_"
        schema = _untitled(adapter.json_schema(ref_template=f"#/$defs/{prefix}{{model}}"))
        defs = {prefix + name: body for name, body in schema.pop("$defs", {}).items()}
    compiler.defs.update(defs)

    def convert(value: object, memo: Memo) -> Any:
        try:
            return adapter.validate_python(read_json(value, "{", dict, memo))
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            mismatch = Mismatch("", value, because=f"is refused: {first['msg'][:200]}")
            mismatch.path = [part if isinstance(part, int) else str(part) for part in reversed(first["loc"])]
            raise mismatch from None
        except RecursionError:
            raise
        except Exception as error:  # noqa: BLE001 - a validator of a user's model may raise anything
            raise Mismatch("", value, because=f"is refused: {describe_error(error)}") from None

    kind = schema.get("type", "object" if "$ref" in schema else None)
    if kind == "number":
        return Form(schema, convert, frozenset({"number", "integer"}))
    return Form(schema, convert, frozenset({kind}) if isinstance(kind, str) else None)


def _untitled(schema: object, in_properties: bool = False) -> Any:
    """The schema without the titles of pydantic, which repeat the names and lengthen every prompt."""
    if isinstance(schema, dict):
        return {
            key: _untitled(part, key in ("properties", "$defs") and not in_properties)
            for key, part in schema.items()
            if in_properties or key != "title"
        }
    return [_untitled(part) for part in schema] if isinstance(schema, list) else schema
