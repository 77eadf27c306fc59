"""Arguments that agents add to a call because the schema of its tool has a default for them.

Claude Code sends ``replace_all: false`` back with each call of its tool Edit. Take defaults out on both sides, of what
the model wrote and of what came back, before messages are compared; what is rendered keeps them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from verl_tool.gateway.conversation import AgentMessage, canonical_arguments


def find_defaults(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Schemas of the tools that have a default somewhere, by name."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    return {name: schema for name, schema in schemas.items() if '"default"' in json.dumps(schema)}


def drop_defaults(message: AgentMessage, schemas: Mapping[str, Mapping[str, Any]]) -> AgentMessage:
    """`message` without the arguments of its calls that equal a default of `schemas`."""
    if not any(call.name in schemas for call in message.calls):
        return message
    calls = tuple(
        dataclasses.replace(call, arguments=_without_defaults(call.arguments, schemas[call.name]))
        if call.name in schemas and not call.is_text
        else call
        for call in message.calls
    )
    return dataclasses.replace(message, calls=calls)


def _without_defaults(arguments: str, schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(_prune(json.loads(arguments), schema))
    except (ValueError, RecursionError):
        return arguments


def _prune(value: Any, schema: Any) -> Any:
    """`value` without the fields that equal their default, at any depth."""
    if not isinstance(schema, Mapping):
        return value
    if isinstance(value, list):
        return [_prune(each, schema.get("items")) for each in value]
    properties = schema.get("properties")
    if not isinstance(value, dict) or not isinstance(properties, Mapping):
        return value
    pruned = {}
    for name, each in value.items():
        field = properties.get(name)
        # Compared as JSON: to Python, False is 0.
        if isinstance(field, Mapping) and "default" in field and _as_json(each) == _as_json(field["default"]):
            continue
        pruned[name] = _prune(each, field)
    return pruned


def _as_json(value: Any) -> str:
    return canonical_arguments(json.dumps(value))
