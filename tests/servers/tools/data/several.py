from verl_tool.servers.tools import tool
from verl_tool.servers.tools.calculator import calculator

sums = calculator
"""Of another file, so no tool of this one."""


@tool
async def double(number: int) -> int:
    """Doubles a number."""
    return number * 2


@tool
async def half(number: float) -> float:
    """Halves a number."""
    return number / 2


twice = double
