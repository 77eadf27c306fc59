"""What a model is told about problems of mathematics."""

from __future__ import annotations

TOOL_PROMPT = """\
Solve the problem. You may use a Python interpreter as often as you like: write a program between ```python and ``` and
put ```output on the next line; it is run, and what it prints follows. Print what you want to see. Reason about the
output before you go on. Put the final answer, and nothing else, into \\boxed{}."""
PLAIN_PROMPT = "Solve the problem. Reason step by step, and put the final answer, and nothing else, into \\boxed{}."


def system_prompt(tool: bool) -> str:
    """The system message, with or without an interpreter."""
    return TOOL_PROMPT if tool else PLAIN_PROMPT
