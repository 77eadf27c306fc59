"""``python -m verl_tool.servers.tests.test_sql_tool sql --url=http://localhost:5000/get_observation --db_id singers``

Any database under the server's root will do: nothing is known of its tables.
"""

from __future__ import annotations

from typing import Annotated

import typer

from verl_tool.protocol import FaultKind
from verl_tool.servers.tests.live_check import WAITS, LiveCase, LiveTurn, call, command_line, one_by_one, together

BATCH = 64
_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
_WRITES = (
    "CREATE TABLE verl_tool_check (a)",
    "CREATE VIRTUAL TABLE verl_tool_check USING fts5(a)",
    "PRAGMA user_version=7",
    "ATTACH 'verl_tool_check.db' AS other",
    "VACUUM INTO 'verl_tool_check.db'",
    "SELECT load_extension('verl_tool_check')",
    "SELECT 1; SELECT 2",
)
_BOMBS = (
    "SELECT zeroblob(1000000000)",
    "SELECT hex(randomblob(1000000000))",
    "SELECT " + "(" * 3000 + "1" + ")" * 3000,
)
_QUERY = "SELECT 6 * 7 AS answer, 'a' AS b"
_FORMS = (f"<sql>{_QUERY}</sql>", f"```sql\n{_QUERY}\n```", call("sql", query=_QUERY))
_REMINDER = "<reminder>You have 3 turns left to complete the task.</reminder></observation>"


def cases(
    db_id: Annotated[str, typer.Option("--db_id", help="A database under the server's root.")],
) -> tuple[LiveCase, ...]:
    """What must hold of a server that has the database `db_id`."""
    row = {"db_id": db_id}

    def run(query: str, *contains: str) -> LiveTurn:
        return LiveTurn(f"<sql>{query}</sql>", contains, extra=row)

    schema = (
        LiveTurn("<describe/>", ("CREATE ",), extra=row),
        LiveTurn("<describe>no such table</describe>", ("no such table",), extra=row),
    )
    bombs = (run(_ENDLESS, "timed out"), *(run(query, "Error: ") for query in _BOMBS))
    batch = (run(f"SELECT {i} + 1000", f"\n{i + 1000}</observation>") for i in range(BATCH))
    missing: tuple[dict[str, str], ...] = ({}, {"db_id": "verl_tool_no_such"}, {"db_id": "../../etc/passwd"})
    turns_left = LiveTurn("<sql>SELECT 1</sql>", (_REMINDER,), extra={**row, "turns_left": 3})
    solution = LiveTurn("<solution>SELECT 1</solution>", valid=None, done=True, extra=row)
    no_database = (LiveTurn("<sql>SELECT 1</sql>", extra=extra, fault=FaultKind.MISCONFIGURED) for extra in missing)
    return (
        LiveCase(
            "queries in tags, fences and Hermes JSON",
            one_by_one(*(LiveTurn(action, ("answer | b\n42 | a",), extra=row) for action in _FORMS)),
        ),
        LiveCase("the schema", one_by_one(*schema)),
        LiveCase("the reminder", one_by_one(turns_left)),
        LiveCase(
            "nothing is written, and one statement run", one_by_one(*(run(query, "Error: ") for query in _WRITES))
        ),
        LiveCase("bombs end", one_by_one(*bombs), WAITS),
        LiveCase(f"a batch of {BATCH} trajectories", together(*batch)),
        LiveCase("a solution ends the trajectory", one_by_one(solution), holds=lambda answers: answers == [""]),
        LiveCase("a missing database is a fault", one_by_one(*no_database)),
    )


app = command_line(__name__, "sql", "sql", cases)
