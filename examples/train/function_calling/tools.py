"""Four typed tools. A question needs the answer of one of them, which no model knows by itself.

python -m verl_tool.servers.ray_serve --embedded --tool_type examples/train/function_calling/tools.py
"""

from datetime import date, timedelta
from typing import Annotated, Literal, get_args

from pydantic import Field

from verl_tool.servers.tools import tool

UNITS = {"miles": 0.6214, "pounds": 2.2046, "gallons": 0.2642}
Month = Literal["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


@tool
async def convert(amount: float, unit: Literal["miles", "pounds", "gallons"]) -> float:
    """Kilometres, kilograms or litres in another unit."""
    return round(amount * UNITS[unit], 1)


@tool
async def percentage(percent: float, total: float) -> float:
    """A share of a total."""
    return round(percent * total / 100, 1)


@tool
async def day_of_year(day: Annotated[int, Field(ge=1, le=31)], month: Month) -> int:
    """The number of a day in 2025."""
    return (date(2025, get_args(Month).index(month) + 1, 1) + timedelta(day - 1) - date(2024, 12, 31)).days


@tool
async def letter_sum(factor: Annotated[int, Field(ge=1, le=99)], word: str) -> int:
    """The places of a word's letters in the alphabet, added up and multiplied."""
    return factor * sum(ord(letter) - ord("a") + 1 for letter in word)
