"""What rows of the data lack, and what they send to the tools that should stay with the trainer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from verl_tool.checks.finding import Finding, Severity
from verl_tool.checks.setup import Row
from verl_tool.errors import ConfigError
from verl_tool.protocol import TOOLS_FIELD

_TRIVIAL = frozenset({"true", "false", "yes", "no", "none", "null", "python", "math", "code"})
"""Golds that stand anywhere."""
_MAX_TRIVIAL = 2
"""A gold of so many characters, such as ``A`` or ``42``, stands anywhere too."""
_MIN_WITHIN = 8
"""Characters of a gold from which on it is told where it is part of a longer text."""


def columns_are_there(rows: Sequence[Row], for_reward: Sequence[str]) -> Iterator[Finding]:
    """Each row has a prompt, and the columns `for_reward`, which the reward manager reads."""
    lacking: dict[str, list[Row]] = {}
    for row in rows:
        for name in (row.prompt_key, *for_reward):
            if row.content.get(name) is None:
                lacking.setdefault(name, []).append(row)
        graded_by = row.content.get("reward_model")
        if isinstance(graded_by, Mapping) and "ground_truth" not in graded_by:
            lacking.setdefault("reward_model.ground_truth", []).append(row)
        if row.content.get(row.prompt_key) is not None:
            try:
                _ = row.messages, row.sent
            except ConfigError as error:
                yield Finding("columns_are_there", Severity.ERROR, str(error), "")
                return
    for name, those in lacking.items():
        if name == "reward_model.ground_truth" and "reward_model" not in for_reward:
            continue
        has = ", ".join(sorted(name for name, value in those[0].content.items() if value is not None))
        what = f"{len(those)} of {len(rows)} rows have no {name!r}, {those[0].where} the first; it has {has}"
        remedy = "make the data as examples/data_preprocess/ does"
        yield Finding("columns_are_there", Severity.ERROR, what, remedy)
    unread = next((row for row in rows if row.content.get("tools_kwargs") is not None), None)
    if unread is not None:
        what = f"{unread.where} has a column 'tools_kwargs', which is not read: verl takes it from extra_info"
        yield Finding("columns_are_there", Severity.WARNING, what, "put it into extra_info.tools_kwargs")


def ground_truth_leak(rows: Sequence[Row]) -> Iterator[Finding]:
    """No gold answer is among what calls send to the tools. Never an error: an environment may need it, as a game does
    that keeps the word which the model has to guess."""
    golden, equal, within = 0, [], []
    for row in rows:
        try:
            golds = set(_golds(row.ground_truth))
            sent = dict(_leaves({name: value for name, value in row.sent.items() if name != TOOLS_FIELD}))
        except ConfigError:
            continue  # `columns_are_there` tells of it
        golden += bool(golds)
        same = [name for name, text in sent.items() if text in golds]
        part = [name for name, text in sent.items() if any(len(g) >= _MIN_WITHIN and g in text for g in golds)]
        if same:
            equal.append((row, same[0]))
        elif part:
            within.append((row, part[0]))
    remedy = (
        "leave it out of extra_info.tools_kwargs (the reward manager reads reward_model and extra_info), unless the "
        "tool needs it and no observation shows it"
    )
    if equal:
        row, name = equal[0]
        what = f"{len(equal)} of {golden} rows send their gold answer to the tools, {row.where} as tools_kwargs.{name}"
        yield Finding("ground_truth_leak", Severity.WARNING, what, remedy)
    if within:
        row, name = within[0]
        what = (
            f"{len(within)} of {golden} rows send a text that holds their gold answer, {row.where} in "
            f"tools_kwargs.{name}"
        )
        yield Finding("ground_truth_leak", Severity.WARNING, what, f"see that the model cannot read it; else {remedy}")


def _golds(ground_truth: object) -> Iterator[str]:
    """The texts of a gold answer that tell something: itself, and what it holds if it is JSON, a list or a mapping."""
    value = ground_truth
    if isinstance(value, str):
        if _describes(value):
            yield value.strip()
        try:
            value = json.loads(value)
        except ValueError:
            return
    if not isinstance(value, str):
        yield from (text.strip() for _, text in _leaves({"gold": value}) if _describes(text))


def _describes(text: str) -> bool:
    plain = text.strip()
    return len(plain) > _MAX_TRIVIAL and plain.lower() not in _TRIVIAL


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Texts and numbers in nested data, by their dotted names."""
    if hasattr(value, "tolist"):
        value = value.tolist()  # numpy's, as pandas reads parquet
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{name}.{number}")
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield name, str(value).strip()
