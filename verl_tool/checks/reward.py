"""What a reward manager gives to answers that are the same for every problem.

`constant_cases` and `gold_cases` make them, whoever has the manager grades them, and `constant_answers` judges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from verl_tool.agent_loop.trajectory import RAISES_ON_EMPTY
from verl_tool.agent_workers.reward_manager.grading.manager_process import (
    CRASHES,
    STAND_IN_TOKENIZER,
    GradedCase,
    GradingCase,
    ManagerAnswer,
)
from verl_tool.agent_workers.reward_manager.redteam.attacks import FORMS, golden_text
from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.setup import Row

ROWS = 6
CONSTANTS = ("", "0", "1", "yes", "\\boxed{0}", "<answer>0</answer>", "I do not know.")
_GOLD = "gold"
"""Name of the gold answer of the row itself, in one form after another."""
_MIN_GOLDS = 10
"""Rows from which on it means something that they have one gold answer."""
_WORTH_REPORTING, _NEARLY_ALL, _MIN_ROWS = 0.3, 0.9, 3


def constant_cases(rows: Sequence[Row]) -> list[GradingCase]:
    """The constant answers to `ROWS` of the rows, no two of which have the same gold."""
    return [
        GradingCase(content, ManagerAnswer(text, (("model", text),)))
        for _, content in _problems(rows)
        for text in CONSTANTS
    ]


def gold_cases(rows: Sequence[Row]) -> list[GradingCase]:
    """The gold answers to the same rows in each form: what a right answer scores, where no ``acc`` tells."""
    return [
        GradingCase(content, ManagerAnswer(_GOLD, (("model", form.format(gold)),)))
        for gold, content in _problems(rows)
        for form in FORMS.values()
    ]


def _problems(rows: Sequence[Row]) -> list[tuple[str, dict[str, Any]]]:
    """Gold answers, and the rows as managers are given them."""
    by_gold: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.ground_truth is not None:
            content = {name: value for name, value in row.content.items() if name != "reward_model"}
            by_gold.setdefault(golden_text(row.ground_truth), {**content, "ground_truth": row.ground_truth})
    return list(by_gold.items())[:ROWS]


def decides_correctness(graded: Sequence[GradedCase]) -> bool:
    """Whether the manager itself says which answers are right, so that no `gold_cases` are needed."""
    return any("acc" in each.extra for each in graded)


def grading_failed(graded: Sequence[GradedCase]) -> bool:
    """Whether the manager has failed on all answers to a whole problem, so that no more need be asked."""
    return len(graded) >= len(CONSTANTS) and all(each.failure for each in graded)


def constant_answers(cases: Sequence[GradingCase], graded: Sequence[GradedCase]) -> Iterator[Finding]:
    """Constant answers that score like right ones on a considerable share of the rows.

    `graded`: of the first of `cases`, as many as there was time for.
    """
    pairs = list(zip(cases, graded, strict=False))
    yield from _failures(pairs)
    golds = [str(case.row["ground_truth"]) for case, _ in pairs]
    min_right_score = {gold: _min_right_score(gold, pairs) for gold in golds}
    for text in CONSTANTS:
        of_text = [(case, each) for case, each in pairs if case.answer.name == text and not each.failure]
        paid = [case for case, each in of_text if _is_right(each, min_right_score[str(case.row["ground_truth"])])]
        apt = sum(golden_text(case.row["ground_truth"]).strip() in text for case in paid if text)
        share = len(paid) / len(of_text) if of_text else 0.0
        if share < _WORTH_REPORTING or len(paid) < 2:
            continue
        what = f"the answer {text!r} scores like a right one on {len(paid)} of {len(of_text)} rows with different golds"
        doomed = share >= _NEARLY_ALL and not apt and decides_correctness(graded) and len(of_text) >= _MIN_ROWS
        remedy = (
            "fix the reward manager, or a policy learns to write just that "
            "(python -m verl_tool.agent_workers.reward_manager.redteam shows more)"
        )
        yield Finding("constant_answers", Severity.ERROR if doomed else Severity.WARNING, what, remedy)


def most_frequent_gold(rows: Sequence[Row]) -> Iterator[Finding]:
    """Says how often the most frequent gold answer is right."""
    golds = Counter(golden_text(row.ground_truth) for row in rows if row.ground_truth is not None)
    if golds.total() < _MIN_GOLDS:
        return
    gold, n = golds.most_common(1)[0]
    if n >= _WORTH_REPORTING * golds.total():
        what = f"the gold answer {gold[:80]!r} is that of {n} of {golds.total()} rows: to write it always earns as much"
        severity = Severity.WARNING if n >= _NEARLY_ALL * golds.total() else Severity.NOTE
        yield Finding("most_frequent_gold", severity, what, "mix the data, or compare the policy with that")


def _failures(pairs: Sequence[tuple[GradingCase, GradedCase]]) -> Iterator[Finding]:
    """That the manager fails on plain answers, such as for want of a column. An error where the manager said so."""
    failed = [(case, each) for case, each in pairs if each.failure and not each.failure.startswith("hangs")]
    raised = [(case, each) for case, each in failed if RAISES_ON_EMPTY in each.failure]
    if failed and len(failed) >= _NEARLY_ALL * len(pairs):
        case, each = failed[0]
        what = f"the reward manager gives no score to {len(failed)} of {len(pairs)} plain answers: {each.failure[:300]}"
        remedy = (
            "see that the rows have what it reads, and that its judge or server answers; the ground truth of one is "
            f"{case.row['ground_truth']!r:.80}"
        )
    elif raised:
        case, each = raised[0]
        what = (
            f"the reward manager raises on {len(raised)} of {len(pairs)} plain answers, such as {case.answer.name!r}: "
            f"{each.failure[:300]}"
        )
        remedy = (
            "let it give what it cannot read the score of a wrong answer: such answers are left out of the loss, so "
            "that nothing teaches the policy to write the right form"
        )
    else:
        return
    # For want of the real tokenizer or batch, both of which this check has stand-ins for.
    if each.failure.startswith(CRASHES) or STAND_IN_TOKENIZER in each.failure:
        remedy += "; or it reads what this check lacks: the model's tokenizer, or a column that verl adds in a training"
        yield Finding("constant_answers", Severity.WARNING, what, remedy)
    else:
        yield Finding("constant_answers", Severity.ERROR, what, remedy)


def _min_right_score(gold: str, pairs: Sequence[tuple[GradingCase, GradedCase]]) -> float | None:
    """The score from which on an answer to the row counts as right: the best that its own gold earns in some form.

    None if nothing tells: no form is graded, or none earns more than what earns least.
    """
    of_row = ((case, each) for case, each in pairs if str(case.row["ground_truth"]) == gold and not each.failure)
    graded = [(case.answer.name, each.score) for case, each in of_row]
    best = max((score for name, score in graded if name == _GOLD), default=None)
    minimum = min((score for _, score in graded), default=0.0)
    return best if best is not None and best > min(minimum, 0.0) else None


def _is_right(graded: GradedCase, min_right_score: float | None) -> bool:
    """By the manager's own ``acc``; one that tells none takes for right what scores as the gold answer does."""
    if "acc" in graded.extra:
        return graded.acc > 0.5
    return min_right_score is not None and graded.score >= min_right_score
