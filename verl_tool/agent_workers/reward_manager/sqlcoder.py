"""`reward.reward_manager.name=sqlcoder`: grade SQL queries by their results, as in SkyRL-SQL.

The last ``<solution>…</solution>`` of the model's text and the gold query (`ground_truth`) are run on the row's
database. `match` says how their results are compared: ``set``, as in BIRD, ignores order and repetition, ``bag``
ignores order only, and ``ordered`` ignores neither. Score: `right` (1), `wrong` (0), or `bad_format` (-1) if a turn
does not begin with ``<think>…</think>`` or there is not exactly one ``<solution>``, as in SkyRL-SQL (NovaSky, 2025;
`compute_score_single`). With ``published=False``, `bad_format` is 0, thoughts are not required, and the last of several
solutions counts.

If the gold query reads a table, a query that reads none is wrong whatever its result: ``SELECT 42`` is a guess. A gold
query that fails, or whose result is empty (`empty_gold`), is a fault that names the row.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

from pydantic import Field
from verl.experimental.reward_loop.reward_manager import register

from verl_tool.agent_workers.reward_manager.base import GradingRewardManager, ScoreOptions
from verl_tool.agent_workers.reward_manager.grade import Grade, GraderFault
from verl_tool.agent_workers.reward_manager.grading.answers import last_tagged
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.sql.database import database_file
from verl_tool.sql.executor import Digest, Match, QueryError, SqlExecutor
from verl_tool.sql.statement import statement_in

MAX_STORED = 4096
"""Maximum number of cached gold results."""
_THOUGHT = re.compile(r"\s*<think>.*?</think>", re.DOTALL)


class SqlOptions(ScoreOptions):
    """Options of the databases, the comparison and the format."""

    root: Path | None = None
    """Folder of the databases, the same as for the tool `sql`. Required."""
    match: Match = "set"
    published: bool = True
    """Whether to reward the format like SkyRL-SQL. `bad_format` and `require_think` override it."""
    bad_format: float | None = None
    """Score of a wrong format. Defaults to -1 if `published`, else 0."""
    require_think: bool | None = None
    """Whether turns must begin with a thought. Defaults to `published`."""
    empty_gold: bool = False
    """Whether to grade rows whose gold query returns no rows. Any query that returns none is right there."""
    query_seconds: float = Field(30.0, gt=0)
    """CPU time of one query, also of the gold query. The wall-clock limit is four times as long plus 10 seconds."""
    max_memory_mb: int = Field(512, ge=64)
    """Memory of one query, in megabytes of 2**20 bytes."""
    max_query_chars: int = Field(10_000, ge=1)
    """A longer solution is wrong without being run."""
    processes: int = Field(2, ge=1)
    """Maximum number of concurrent queries of one reward worker."""
    queue_seconds: float = Field(600.0, gt=0)
    """A query that waits longer for a free process is a fault. `timeout_seconds` does not apply to queries."""


@register("sqlcoder")
class SQLCoderRewardManager(GradingRewardManager[SqlOptions]):
    """Compares the results of queries, which run in read-only processes."""

    Options = SqlOptions
    details = ("answered", "executed", "well_formed")
    keeps_deadlines = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError if `root` is not a folder."""
        super().__init__(*args, **kwargs)
        options = self.options
        if options.root is None or not options.root.is_dir():
            problem = "is not set" if options.root is None else f"is {str(options.root)!r}, which is not a folder"
            raise ConfigError(
                f"reward.reward_kwargs.root {problem}; give the folder of the databases (DATABASES of recipe skysql)"
            )
        self._root = options.root
        self._executor = SqlExecutor(
            options.processes, options.query_seconds, options.max_memory_mb << 20, options.queue_seconds
        )
        self._gold: OrderedDict[tuple[Path, str], Digest] = OrderedDict()

    async def grade(self, sample: Sample) -> Grade:
        """Grade the query. Raises GraderFault that names the row if its database or gold query is unusable, or if no
        process starts."""
        try:
            return await self._grade_on(database_file(self._root, _db_id(sample)), sample)
        except ConfigError as error:
            raise GraderFault(f"{_row(sample)}: {error}") from error
        except (SandboxError, ToolFault) as error:
            raise GraderFault(str(error)) from error

    async def close(self) -> None:
        await self._executor.close()

    async def _grade_on(self, path: Path, sample: Sample) -> Grade:
        gold = await self._gold_result(path, sample)
        solution = last_tagged(sample.text, "solution")
        query = statement_in(solution or "")
        found = None
        if query and len(query) <= self.options.max_query_chars:
            found = await self._result(path, query)
        right = found is not None and found.digest == gold.digest and found.reads_tables >= gold.reads_tables
        well_formed = bool(query) and self._has_format(sample)
        score = self.options.score(right) if well_formed else self._bad_format
        details = {"answered": solution is not None, "executed": found is not None, "well_formed": well_formed}
        return Grade(score, right, details)

    @property
    def _bad_format(self) -> float:
        score = self.options.bad_format
        return score if score is not None else -1.0 if self.options.published else 0.0

    def _has_format(self, sample: Sample) -> bool:
        """Return whether each turn begins with a thought and there is one solution, where this is required."""
        options = self.options
        think = options.published if options.require_think is None else options.require_think
        once = all(sample.text.count(tag) == 1 for tag in ("<solution>", "</solution>"))
        return (once or not options.published) and (not think or all(map(_THOUGHT.match, sample.turns)))

    async def _result(self, path: Path, query: str) -> Digest | None:
        """Run a query. Returns None if it fails."""
        try:
            return await self._executor.digest(path, query, self.options.match)
        except QueryError:
            return None

    async def _gold_result(self, path: Path, sample: Sample) -> Digest:
        """Run the gold query of a row, or return its cached result. Raises GraderFault that names the row."""
        query = statement_in(str(sample.ground_truth))
        known = self._gold.get((path, query))
        if known is not None:
            return known
        try:
            found = await self._executor.digest(path, query, self.options.match)
        except QueryError as error:
            raise GraderFault(f"{_row(sample)}: the gold query {query[:200]!r} fails: {error}; correct it") from error
        if found.rows == 0 and not self.options.empty_gold:
            raise GraderFault(
                f"{_row(sample)}: the gold query {query[:200]!r} gives no row, as do many wrong queries; leave the row "
                "out, or set reward.reward_kwargs.empty_gold=true"
            )
        self._gold[path, query] = found
        if len(self._gold) > MAX_STORED:
            self._gold.popitem(last=False)
        return found


def _db_id(sample: Sample) -> object:
    """Return the database's id, from the tool's arguments or from the row."""
    kwargs = sample.extra_info.get("tools_kwargs") or {}
    return kwargs.get("db_id") or sample.extra_info.get("db_id")


def _row(sample: Sample) -> str:
    return f"row {sample.extra_info.get('index', '?')} of {sample.data_source!r} (database {_db_id(sample)!r})"
