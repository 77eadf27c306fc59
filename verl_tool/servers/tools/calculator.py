"""Decimal arithmetic: ``<calculator>13.1-3</calculator>`` gives ``10.1``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from verl_tool.formats import Call
from verl_tool.servers.tools._arithmetic import ExpressionError, as_text, evaluate
from verl_tool.servers.tools.base import Context, Tool, ToolOptions, ToolResult


class CalculatorOptions(ToolOptions):
    """Bounds of one calculation."""

    max_expression_chars: int = Field(default=1000, ge=1, le=10_000)
    digits: int = Field(default=15, ge=1, le=50)
    """Significant digits of an answer that is not a whole number."""


class CalculatorTool(Tool):
    """One expression a call. What cannot be calculated is answered with the reason."""

    name = "calculator"
    aliases = ("SimpleCalculatorTool", "calc")
    description = "Calculates an expression: + - * / // % **, parentheses, sqrt, log, sin, round, max, pi and the like."
    parameters: ClassVar = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "such as 2*(13.1-3)"}},
        "required": ["expression"],
    }
    example_actions = (
        "<calculator>13.1-3</calculator>",
        "<request><SimpleCalculatorTool>13.1-3<call>",
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "13.1-3"}}\n</tool_call>',
        "```calculator\n13.1-3\n```",
    )
    Options = CalculatorOptions
    options: CalculatorOptions

    async def run(self, call: Call, context: Context) -> ToolResult:
        limit = self.options.max_expression_chars
        if len(call.input) > limit:
            return _failed(f"the expression has {len(call.input)} characters; at most {limit} are calculated")
        try:
            return ToolResult(as_text(evaluate(call.input), self.options.digits))
        except ExpressionError as error:
            return _failed(str(error))


def _failed(reason: str) -> ToolResult:
    return ToolResult(f"Error: {reason}", error=True)
