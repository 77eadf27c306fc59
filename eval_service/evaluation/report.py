"""The figures of an evaluation, as data and as a table."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from eval_service.evaluation.record import Record
from eval_service.evaluation.statistics import Estimate, estimate, pass_at_k


@dataclass
class ToolUsage:
    """One tool, by the name that the model called it."""

    calls: int = 0
    invalid: int = 0
    answers: int = 0
    """Answers that called it."""
    seconds: float = 0.0
    """Of the actions that called it."""


@dataclass(frozen=True)
class Summary:
    problems: int
    samples: int
    """Answers wanted of each problem."""
    answers: int
    """Answers with a score."""
    errors: int
    """Answers that did not come; they count nowhere else."""
    unscored: int
    """Answers that the reward manager could not score; they count nowhere else."""
    accuracy: Estimate
    """avg@n: the mean over problems of the share of right answers."""
    mean_score: float | None
    passes: dict[int, Estimate]
    """pass@k by k, over the problems with at least `k` answers."""
    stops: dict[str, int]
    tokens: dict[str, float]
    """Mean of an answer, by who wrote them."""
    seconds: float
    """Mean of an answer."""
    tools: dict[str, ToolUsage] = field(default_factory=dict)


def summarise(records: Sequence[Record], problems: int, samples: int, ks: Sequence[int]) -> Summary:
    """The figures of all records. Raises ValueError for a `k` above `samples`."""
    scored = [record for record in records if record.scored]
    by_problem: dict[int, list[bool]] = defaultdict(list)
    for record in scored:
        by_problem[record.index].append(bool(record.correct))
    passes = {}
    for k in ks:
        if not 1 <= k <= samples:
            raise ValueError(f"pass@{k} needs at least {k} answers a problem; ask for them with --n {k}")
        values = [pass_at_k(len(right), sum(right), k) for right in by_problem.values() if len(right) >= k]
        passes[k] = estimate(values)
    scores = [record.score for record in scored if record.score is not None]
    return Summary(
        problems=problems,
        samples=samples,
        answers=len(scored),
        errors=sum(record.error is not None for record in records),
        unscored=sum(record.error is None and record.correct is None for record in records),
        accuracy=estimate([sum(right) / len(right) for right in by_problem.values()]),
        mean_score=sum(scores) / len(scores) if scores else None,
        passes=passes,
        stops=dict(Counter(r.stop_reason or r.finish_reason or "unknown" for r in records if r.error is None)),
        tokens=_tokens(scored),
        seconds=_mean([record.seconds for record in scored]),
        tools=_tools(scored),
    )


def as_markdown(summary: Summary, title: str) -> str:
    lines = [f"# {title}", "", "| figure | value (95% interval) |", "|---|---|"]
    lines.append(f"| avg@{summary.samples} | {summary.accuracy} |")
    lines += [f"| pass@{k} | {value} |" for k, value in summary.passes.items()]
    if summary.mean_score is not None:
        lines.append(f"| mean reward | {summary.mean_score:.4f} |")
    lines.append(f"| problems | {summary.problems} |")
    lines.append(f"| answers scored | {summary.answers} of {summary.problems * summary.samples} |")
    lines.append(f"| errors, without score | {summary.errors}, {summary.unscored} |")
    lines += [f"| {name} tokens an answer | {value:.1f} |" for name, value in summary.tokens.items()]
    lines.append(f"| seconds an answer | {summary.seconds:.2f} |")
    lines.append(f"| ends | {', '.join(f'{stop} {n}' for stop, n in sorted(summary.stops.items()))} |")
    if summary.tools:
        lines += ["", "| tool | calls | an answer | invalid | answers that called it | seconds a call |"]
        lines.append("|---|---|---|---|---|---|")
        lines += [_tool_line(name, tool, summary.answers) for name, tool in sorted(summary.tools.items())]
    return "\n".join([*lines, ""])


def _tool_line(name: str, tool: ToolUsage, answers: int) -> str:
    return (
        f"| {name} | {tool.calls} | {tool.calls / max(1, answers):.2f} | {tool.invalid} | {tool.answers} "
        f"| {tool.seconds / max(1, tool.calls):.4f} |"
    )


def _tools(records: Sequence[Record]) -> dict[str, ToolUsage]:
    tools: dict[str, ToolUsage] = defaultdict(ToolUsage)
    for record in records:
        seen: set[str] = set()
        for call in record.trajectory.calls if record.trajectory is not None else ():
            names = call.names or ("(no call found)",)
            for name in names:
                tools[name].calls += 1
                tools[name].invalid += not call.valid
                tools[name].seconds += call.seconds / len(names)
            seen.update(names)
        for name in seen:
            tools[name].answers += 1
    return dict(tools)


def _tokens(records: Sequence[Record]) -> dict[str, float]:
    names = {"prompt": "prompt_tokens", "model": "completion_tokens", "tool": "tool_tokens"}
    return {
        author: _mean([record.usage[name] for record in records if name in record.usage])
        for author, name in names.items()
        if any(name in record.usage for record in records)
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
