"""A shop's orders: the domain of the recipe."""

from __future__ import annotations

from typing import Any

from verl_tool.servers.tools import tool


@tool
def order(database: dict[str, Any], item: str, colour: str, town: str) -> str:
    """Order an item for the user."""
    if item not in database["prices"]:
        raise ValueError(f"there is no {item}")
    database["orders"].append({"item": item, "colour": colour, "town": town})
    return f"price {database['prices'][item]}"
