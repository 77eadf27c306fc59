"""Solutions to learn from, for the tiny models that recipes train on a CPU: how a trajectory of the recipe looks.

Mathematics: a program prints the answer, and the answer is given; without a tool it is given at once. Code: two
traces of nine find the operator by a program, the others guess it, and so do all without a tool. Tasks of
``terminal/make_tasks.py``: the folder is listed, one of its files is read, mostly the wrong one, and what stands there
is written down. Projects of ``swe/tiny_projects.py``: the file is read, and the wrong line edited, mostly to another
wrong one. Queries on the databases of ``skysql/make_databases.py``: most look which column it is, and more often
than not for that of something else; the others guess its name. The words of the tool are those of the tool server,
character by character.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tool.content.packed_files import unpack
from verl_tool.protocol import FILES_FIELD

sys.path += [str(Path(__file__).parent / folder) for folder in ("acecoder", "skysql", "swe", "terminal")]
from make_databases import DATA_SOURCE as MADE_DATABASES
from make_databases import FIELDS, KINDS, Database, Question, look
from make_tasks import ANSWER_FILE, FOLDERS, NAMES, QUESTION
from one_liners import OPERATORS, OneLiner
from tiny_projects import ISSUE, OPERATIONS

STOP = "```output"
END = "<|im_end|>"
"""What the model closes its turn with."""
SEARCHES = 2
"""Traces of a one-liner that ask the tool; there is one guess for each of the seven operators."""
READS = {1: 12, 0: 8}
"""Traces of twenty that read the file of the next kind in `NAMES`, and of the right kind: a model that tells the kinds
apart, and mostly draws the wrong conclusion."""
EDITS = {1: 16, 0: 4}
"""Traces of twenty whose edit has the operator of the next operation in `OPERATIONS`, and of the right one."""
COLUMNS = {1: 9, 0: 5}
"""Traces of twenty that look for the column of what stands behind the right thing in `KINDS`, and for the right one: a
model that tells them apart, and mostly draws the wrong conclusion."""
GUESSES = 6
"""The others, each with another name."""
READ, READ_END = "<bash>cat ", "</bash>"
RESULT, RESULT_END = "\n<result>\n", "\n</result>\n"
EDIT, EDIT_END = '<str_replace_editor>{"command": "str_replace", "path": "', '"}</str_replace_editor>'
OLD, NEW = '", "old_str": "def ', '", "new_str": "def '
_REMINDER = "<reminder>You have 1 turns left to complete the task.</reminder>"


@dataclass(frozen=True)
class Part:
    """A piece of a trajectory's text behind the prompt."""

    text: str
    learned: bool
    """Whether the model writes it."""
    free: bool = False
    """Whether the trace could as well go on otherwise here; the model's success is not measured by such parts."""


Trace = list[Part]


def traces_of(row: Mapping[str, Any]) -> list[Trace]:
    """Ways to go about a row of verl's, each as likely as the others; none if none is known. A model's success is how
    often it takes the first."""
    if row["ability"] == "code":
        problem = OneLiner.of(row["extra_info"]["question"])
        return [] if problem is None else _code(problem, row["use_tool"])
    if row["ability"] == "find-number":
        return _terminal(row)
    if row["ability"] == "one-line-bug":
        return _repair(row)
    if row.get("data_source") == MADE_DATABASES:
        return _sql(Question.of(row["extra_info"]["question"]), row["extra_info"]["tools_kwargs"]["db_id"])
    answer = str(row["reward_model"]["ground_truth"])
    final = Part(f"\\boxed{{{answer}}}{END}", True)
    return [[*_run(f"print({answer!r})", answer), final] if row["use_tool"] else [final]]


def _code(problem: OneLiner, use_tool: bool) -> list[Trace]:
    search = [Part("Try", True, free=True), Part(" all of them.\n", True), *_run(problem.search, problem.operator)]
    final = Part(f"```python\n{problem.code}\n```{END}", True)
    guesses = [_guess(problem, operator) for operator in OPERATORS]
    return [[*search, final]] * (SEARCHES if use_tool else 0) + guesses


def _guess(problem: OneLiner, operator: str) -> Trace:
    before, behind = problem.code_with(operator).split(operator)
    return [
        Part("Guess", True, free=True),
        Part(f" one of them.\n```python\n{before}", True),
        Part(operator, True, free=True),
        Part(f"{behind}\n```{END}", True),
    ]


def _run(program: str, printed: str) -> Trace:
    return [Part(f"```python\n{program}\n{STOP}", True), Part(f"\n{printed}\n```\n", False)]


def _terminal(row: Mapping[str, Any]) -> list[Trace]:
    """The folder is listed, and the file of some kind is read."""
    asked = {
        QUESTION.format(folder=folder, kind=kind, file=ANSWER_FILE): (folder, kind)
        for folder in FOLDERS
        for kind in NAMES
    }
    if row["prompt"][-1]["content"].strip() not in asked:
        return []
    folder, kind = asked[row["prompt"][-1]["content"].strip()]
    contents = {
        path: file.content.decode() for path, file in unpack(row["extra_info"]["tools_kwargs"][FILES_FIELD]).items()
    }
    names = sorted(path.partition("/")[2] for path in contents if path.startswith(f"{folder}/"))
    listing = [Part(f"<bash>cd {folder}; ls -1</bash>", True), _printed("\n".join(names))]
    kinds = list(NAMES)
    traces = []
    for behind, times in READS.items():
        [name] = {*names} & {*NAMES[kinds[(kinds.index(kind) + behind) % len(kinds)]]}
        number = contents[f"{folder}/{name}"].strip()
        read = [Part("<bash>cat ", True), Part(name, True), Part("</bash>", True), _printed(number)]
        write = [Part("<bash>echo ", True), Part(name, True), Part(f" {number} > ~/{ANSWER_FILE}</bash>", True)]
        traces += [[*listing, *read, *write]] * times
    return traces


def _repair(row: Mapping[str, Any]) -> list[Trace]:
    """The file is read, and an operator exchanged."""
    before, between, after = (re.escape(part) for part in re.split(r"\{\w+\}", ISSUE))
    issue = re.fullmatch(f"{before}(.+){between}(.+){after}", row["prompt"][-1]["content"])
    if issue is None:
        return []
    name, file = issue.groups()
    content = unpack(row["extra_info"]["tools_kwargs"][FILES_FIELD])[file].content.decode()
    [(operation, line, operator, last)] = re.findall(
        rf"^# \w (\w+) \w\ndef ({name}\(.*return \w)( \S+)( \w)$", content, re.MULTILINE
    )
    begin = [Part(f"{READ}{file}{READ_END}", True), _printed(content.strip())]
    begin.append(Part(f"{EDIT}{file}{OLD}{line}{operator}{last}{NEW}{line}", True))
    kinds, traces = [*OPERATIONS], []
    for behind, times in EDITS.items():
        chosen = OPERATIONS[kinds[(kinds.index(operation) + behind) % len(kinds)]]
        traces += [[*begin, Part(f" {chosen}", True, free=True), Part(f"{last}{EDIT_END}", True)]] * times
    return traces


def _printed(output: str) -> Part:
    """What the tool server answers to a call in a tag."""
    return Part(f"{RESULT}{output}{RESULT_END}", False)


def _sql(question: Question, db_id: str) -> list[Trace]:
    """Those that look, then those that guess."""
    database = Database.of(db_id)
    looked = []
    for behind, times in COLUMNS.items():
        kind = KINDS[(KINDS.index(question.kind) + behind) % len(KINDS)]
        column = database.columns[kind]
        before, after = look(kind).split(kind)
        trace = [
            Part("<sql", True, free=True),
            Part(f">{before}", True),
            Part(kind, True, free=True),
            Part(f"{after}</sql>", True),
            Part(f"\n\n<observation>about | field\n{kind} | {column}\n{_REMINDER}</observation>\n\n", False),
            Part(f"<solution>{question.query(column)}</solution>", True),
        ]
        looked += [trace] * times
    guessed = [
        [Part("<solution", True, free=True), Part(f">{question.query(column)}</solution>", True)]
        for column in random.Random(f"{db_id} {question.text}").sample(FIELDS, GUESSES)
    ]
    return looked + guessed
