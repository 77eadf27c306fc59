"""Decimal arithmetic: ``<calculator>13.1-3</calculator>`` gives ``10.1``."""

from __future__ import annotations

import asyncio

from pydantic import Field

from verl_tool.servers.tools import CallError, ToolOptions, tool
from verl_tool.servers.tools._arithmetic import ExpressionError, as_text, evaluate

_LONG_CHARACTERS = 300


class CalculatorOptions(ToolOptions):
    max_expression_chars: int = Field(default=1000, ge=1, le=10_000)
    digits: int = Field(default=15, ge=1, le=50)
    """Significant digits of an answer that is not a whole number."""


@tool(
    aliases=("SimpleCalculatorTool", "calc"),
    example_actions=(
        "<calculator>13.1-3</calculator>",
        "<request><SimpleCalculatorTool>13.1-3<call>",
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "13.1-3"}}\n</tool_call>',
        "```calculator\n13.1-3\n```",
    ),
)
async def calculator(expression: str, options: CalculatorOptions) -> str:
    """Calculates an expression: + - * / // % **, parentheses, sqrt, log, sin, round, max, pi and the like.

    Args:
        expression: such as 2*(13.1-3)
    """
    limit = options.max_expression_chars
    if len(expression) > limit:
        raise CallError(f"the expression has {len(expression)} characters; at most {limit} are calculated")
    try:
        # As many operations as a long expression holds take tens of milliseconds.
        long = len(expression) > _LONG_CHARACTERS
        value = await asyncio.to_thread(evaluate, expression) if long else evaluate(expression)
        return as_text(value, options.digits)
    except ExpressionError as error:
        raise CallError(str(error)) from error
