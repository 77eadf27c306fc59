"""Types whose check takes time that grows with 2 to the power of how deep an argument is nested.

A union is read as each of its types in turn. If two of them hold such a union again, each level doubles the time, and
a short argument that a model wrote holds up the server. A discriminator says which of the types it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def ambiguous_unions(definitions: Mapping[str, Any]) -> list[str]:
    """Names of the JSON schema's definitions that hold a union without a discriminator, of which two types that JSON
    writes alike hold the definition again."""
    direct = {name: set(_references(schema)) for name, schema in definitions.items()}
    return [
        name
        for name, schema in definitions.items()
        for union in _unions(schema)
        if _is_ambiguous(union, name, definitions, direct)
    ]


def _is_ambiguous(union: list[Any], name: str, definitions: Mapping[str, Any], direct: Mapping[str, set[str]]) -> bool:
    kinds = [
        definitions.get(_named(branch), branch).get("type", "any")
        for branch in union
        if name in _reached(set(_references(branch)), direct)
    ]
    return len(kinds) > len(set(kinds))


def _reached(names: set[str], direct: Mapping[str, set[str]]) -> set[str]:
    """These definitions, and all that they hold."""
    found: set[str] = set()
    while names:
        found |= names
        names = {inner for name in names for inner in direct.get(name, ())} - found
    return found


def _unions(schema: Any) -> Iterator[list[Any]]:
    for part in _parts(schema):
        # A union with a discriminator is a "oneOf".
        if isinstance(part.get("anyOf"), list):
            yield part["anyOf"]


def _references(schema: Any) -> Iterator[str]:
    for part in _parts(schema):
        if isinstance(part.get("$ref"), str):
            yield _named(part)


def _named(part: Mapping[str, Any]) -> str:
    return str(part.get("$ref", "")).rpartition("/")[2]


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """All objects in a schema."""
    if isinstance(schema, Mapping):
        yield schema
    if isinstance(schema, (Mapping, list)):
        for child in schema.values() if isinstance(schema, Mapping) else schema:
            yield from _parts(child)
