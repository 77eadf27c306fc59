"""Runs the model's SQL on a SQLite database: ``<sql>SELECT count(*) FROM singer</sql>``.

The row says which one: ``extra_info.tools_kwargs.db_id``, a name under the folder `SqlOptions.root`. Queries run in
processes of their own, which can only read (`verl_tool.sql`). ``<describe>singer</describe>`` shows a table,
``<describe/>`` all of them; ``<solution>…</solution>`` is the model's answer and ends the trajectory: no gold query
comes here, the reward manager `sqlcoder` compares.

The observation has SkyRL-SQL's form, with the turns that are left, as the loop tells them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.formats import ALL_FORMATS, Call, Tag, guard
from verl_tool.formats.tags import NAME_TAGS, OwnTagFormat
from verl_tool.protocol import TURNS_LEFT_FIELD, FaultKind
from verl_tool.servers.tools.base import Context, InvalidCall, Tool, ToolOptions, ToolResult
from verl_tool.sql.database import database_file
from verl_tool.sql.executor import QueryError, SqlExecutor, SqlRows, TableView
from verl_tool.sql.statement import statement_in

SOLUTION, DESCRIBE = "solution", "describe"
SQL_TAGS = OwnTagFormat(
    NAME_TAGS,
    [Tag.named(name) for name in ("sql", DESCRIBE, SOLUTION)],
    ("<observation>", "</observation>"),
    ("\n\n", ""),
)
guard(SQL_TAGS)
_REMINDER = "<reminder>You have {} turns left to complete the task.</reminder>"
_SAMPLE_ROWS = 3
"""Rows of a table that is described."""
_QUERY_KEYS = ("query", "sql", "input")


class SqlToolOptions(ToolOptions):
    """Where the databases are, and the limits of one query."""

    root: Path | None = None
    """Folder of the databases: ``ROOT/ID/ID.sqlite`` or ``ROOT/ID.sqlite``, also ``.db``. It must be given."""
    timeout_seconds: float = Field(default=5.0, gt=0)
    """CPU time of one query; on the clock it may take four times as long and 10 seconds."""
    max_rows: int = Field(default=50, ge=1, le=10_000)
    """Rows of an observation; no more are read."""
    max_cell_chars: int = Field(default=200, ge=10)
    """Characters of one value."""
    max_output_length: int = Field(default=8000, ge=100, le=1_000_000)
    """Characters of all values of an observation."""
    max_memory_mb: int = Field(default=256, ge=64)
    """Memory of one query, megabytes of 2**20 bytes."""
    workers: int | None = Field(default=None, ge=1)
    """Queries that run at once; None: two a core, at least 4."""


class SqlTool(Tool):
    """One executor; each call is a query of its own."""

    name = "sql"
    aliases = (DESCRIBE, SOLUTION)
    description = (
        "Runs one SQLite query on the task's database, which can only be read, and shows the first rows of its result."
    )
    parameters: ClassVar = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "one SELECT statement"},
            "describe": {"type": "string", "description": "in place of a query: a table to show, or * for all tables"},
        },
    }
    example_actions = (
        "<sql>SELECT count(*) FROM singer</sql>",
        "<describe>singer</describe>",
        "```sql\nSELECT count(*) FROM singer\n```",
        '<tool_call>\n{"name": "sql", "arguments": {"query": "SELECT count(*) FROM singer"}}\n</tool_call>',
        '<tool_call>\n{"name": "sql", "arguments": {"describe": "singer"}}\n</tool_call>',
        "<solution>SELECT count(*) FROM singer</solution>",
    )
    formats = (SQL_TAGS, *ALL_FORMATS)
    Options = SqlToolOptions
    options: SqlToolOptions

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        chosen = self.options
        self._view = TableView(chosen.max_rows, chosen.max_cell_chars, chosen.max_output_length)
        self._executor: SqlExecutor | None = None

    async def start(self) -> None:
        root = self.options.root
        if root is None or not root.is_dir():
            problem = "is not set" if root is None else f"is {str(root)!r}, which is no folder"
            raise ConfigError(
                f"tool sql: option root {problem}; give the folder of the databases in --tool_config: "
                '{"tools": [{"name": "sql", "root": "/data/databases"}]}'
            )
        chosen = self.options
        self._executor = SqlExecutor(chosen.workers, chosen.timeout_seconds, chosen.max_memory_mb << 20)
        await self._executor.start()

    async def close(self) -> None:
        if self._executor is not None:
            await self._executor.close()

    async def run(self, call: Call, context: Context) -> ToolResult:
        if call.name == SOLUTION:
            return ToolResult(done=True)
        table = _described(call)
        query = "" if table is not None else _query(call)
        try:
            path = self._database(context.extra)
            if table is None:
                text = as_text(await self._running().rows(path, query, self._view))
            else:
                sample = TableView(_SAMPLE_ROWS, self._view.cell_chars, self._view.chars)
                text = as_text(await self._running().schema(path, table, sample))
        except QueryError as error:
            return ToolResult(self._reminded(self._failure(error), context), error=True)
        except ConfigError as error:
            raise ToolFault(FaultKind.MISCONFIGURED, f"tool sql: {error}", retryable=False) from error
        return ToolResult(self._reminded(text, context))

    def _running(self) -> SqlExecutor:
        if self._executor is None:
            raise SandboxError("sql has not been started", retryable=True)
        return self._executor

    def _database(self, extra: Mapping[str, Any]) -> Path:
        """Raises ConfigError: no model can choose the database, so none is to blame."""
        if "db_id" not in extra:
            raise ConfigError(
                "the row names no database; set extra_info.tools_kwargs.db_id (on the wire: extra_fields)"
            )
        assert self.options.root is not None  # start() refuses
        return database_file(self.options.root, extra["db_id"])

    def _failure(self, error: QueryError) -> str:
        if error.kind == "time":
            return f"Execution timed out: the query ran longer than {self.options.timeout_seconds:g} seconds."
        if error.kind == "memory":
            return f"Memory limit exceeded: a query may use {self.options.max_memory_mb} MB."
        return f"Error: {error}"

    def _reminded(self, text: str, context: Context) -> str:
        """`text`, and the turns that are left, if the client tells. No value of a database can forge that line."""
        left = context.extra.get(TURNS_LEFT_FIELD)
        harmless = text.replace("<reminder>", "< reminder>").replace("</reminder>", "< /reminder>")
        return f"{harmless}\n{_REMINDER.format(left)}" if type(left) is int else harmless


def as_text(result: SqlRows) -> str:
    """Statements one a line, then a line of columns and one a row, values between bars."""
    lines = [f"{statement.rstrip().rstrip(';')};" for statement in result.statements]
    if result.columns:
        lines += [" | ".join(cells) for cells in (result.columns, *result.rows)]
        if not result.rows:
            lines.append("(no rows)")
        if result.more and not result.statements:
            lines.append(f"(the first {len(result.rows)} rows; there are more)")
    return "\n".join(lines) or "(nothing)"


def _described(call: Call) -> str | None:
    """The table that a call wants to see, empty for all; None if it is a query."""
    arguments = call.arguments or {}
    if call.name == DESCRIBE:
        table = (
            call.input if call.arguments is None else next((v for v in arguments.values() if isinstance(v, str)), "")
        )
    elif "describe" in arguments and not any(arguments.get(key) for key in _QUERY_KEYS):
        table = str(arguments["describe"])
    else:
        return None
    return table.strip().removesuffix(";").strip("*\"'` ")


def _query(call: Call) -> str:
    """Raises InvalidCall."""
    query = call.input
    if call.arguments is not None:
        named = (call.arguments.get(key) for key in _QUERY_KEYS)
        query = next((value for value in named if isinstance(value, str)), "")
    if not query.strip():
        raise InvalidCall('give one SELECT statement as the argument "query", or a table as "describe"')
    return statement_in(query)
