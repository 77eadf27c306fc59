r"""`reward.reward_manager.name=reasoning_gym`: grade problems from `examples/data_preprocess/reasoning.py`.

The last ``\boxed{…}`` of the model's text must be the ground truth: the same number, or the same text except for case
and surrounding space. A countdown answer is an expression that uses each of the given numbers at most once and has the
target as its value. Score: `right` (1) or `wrong` (0).
"""

from __future__ import annotations

import ast
import json
import operator
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager, ScoreOptions
from verl_tool.agent_workers.reward_manager.grade import Grade
from verl_tool.agent_workers.reward_manager.grading.answers import as_number, last_boxed
from verl_tool.agent_workers.reward_manager.grading.sample import Sample

COUNTDOWN = "reasoning_gym/countdown"
MAX_EXPRESSION_CHARS = 500
"""A longer expression is wrong."""
_OPERATORS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@register("reasoning_gym")
class ReasoningGymRewardManager(GradingRewardManager[ScoreOptions]):
    """Compares answers, and evaluates countdown expressions without running them as Python."""

    Options = ScoreOptions
    details = ("answered",)

    async def grade(self, sample: Sample) -> Grade:
        """Grade the answer. Raises ValueError if countdown's ground truth is not JSON with its numbers and target."""
        answer = last_boxed(sample.text)
        if answer is None:
            return Grade(self.options.wrong, False, {"answered": 0.0})
        if sample.data_source == COUNTDOWN:
            task = json.loads(sample.ground_truth)
            right = solves_countdown(answer, task["numbers"], task["target"])
        else:
            right = same_answer(answer, str(sample.ground_truth))
        return Grade(self.options.score(right), right, {"answered": 1.0})


def same_answer(answer: str, gold: str) -> bool:
    """Return whether two answers are the same number, or the same text."""
    numbers = as_number(answer), as_number(gold)
    if None not in numbers:
        return numbers[0] == numbers[1]
    return bool(answer.strip()) and answer.strip().casefold() == gold.strip().casefold()


def solves_countdown(expression: str, numbers: list[int], target: int) -> bool:
    """Return whether the expression has the value `target` and uses each of `numbers` at most as often as given."""
    if len(expression) > MAX_EXPRESSION_CHARS:
        return False
    used: list[int] = []
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    return value == target and not Counter(used) - Counter(numbers)


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Evaluate an arithmetic expression and add its integers to `used`. Raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError(f"{ast.dump(node)[:80]} is not arithmetic")
