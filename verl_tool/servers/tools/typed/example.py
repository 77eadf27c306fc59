"""A call of a typed tool, for prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from verl_tool.formats.hermes import CLOSING, OPENING

_DEPTH = 4
_VALUES: Mapping[str, Any] = {"string": "…", "integer": 1, "number": 1.5, "boolean": True, "array": []}


def example_call(name: str, parameters: Mapping[str, Any]) -> str:
    """``<name>…</name>`` for a tool of one text, else a Hermes call with the arguments that must be given."""
    properties = parameters["properties"]
    if len(properties) < 2 and all(schema.get("type") == "string" for schema in properties.values()):
        return f"<{name}>…</{name}>" if properties else f"<{name}/>"
    call = {"name": name, "arguments": example_arguments(parameters)}
    return f"{OPENING}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSING}"


def example_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that must be given, by the JSON schema `parameters`, with values that it allows."""
    arguments: dict[str, Any] = _example({"type": "object", **parameters}, parameters.get("$defs", {}), _DEPTH)
    return arguments


def _example(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> Any:
    """A value that the schema allows, as far as its types say."""
    if "$ref" in schema:
        schema = definitions.get(schema["$ref"].rpartition("/")[2], {})
    for choice in ("anyOf", "oneOf", "allOf"):
        if schema.get(choice):
            return _example(schema[choice][0], definitions, depth)
    if "const" in schema or "enum" in schema:
        return schema.get("const", (schema.get("enum") or [None])[0])
    if "default" in schema:
        return schema["default"]
    kind = schema.get("type", "string")
    if kind == "object":
        names = schema.get("required", ()) if depth else ()
        return {name: _example(schema["properties"][name], definitions, depth - 1) for name in names}
    return schema.get("minimum", _VALUES.get(kind)) if kind in ("integer", "number") else _VALUES.get(kind)
