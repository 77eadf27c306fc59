"""``python -m verl_tool.servers.tests.test_sql_tool sql --url=http://localhost:5000/get_observation --db_id singers``

Any database under the server's root will do: nothing is known of its tables.
"""

from __future__ import annotations

from typing import Annotated

import typer

from verl_tool.protocol import FaultKind, StepRequest
from verl_tool.servers.tests.live_check import DEFAULT_URL, ApiKey, CheckFailed, LiveCase, Probe, Url, check

BATCH = 64
BOMB_SECONDS = 120.0
"""Deadline of the cases that wait for the server's own limits."""
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


class _Checks:
    """The cases, of one database."""

    def __init__(self, db_id: str) -> None:
        self._row = {"db_id": db_id}

    async def queries(self, probe: Probe) -> None:
        """In tags, in a fence and as Hermes JSON."""
        query = "SELECT 6 * 7 AS answer, 'a' AS b"
        for action in (
            f"<sql>{query}</sql>",
            f"```sql\n{query}\n```",
            f'<tool_call>\n{{"name": "sql", "arguments": {{"query": "{query}"}}}}\n</tool_call>',
        ):
            await probe.expect(action, "answer | b\n42 | a", extra=self._row)

    async def schema(self, probe: Probe) -> None:
        """Any table's statement."""
        await probe.expect("<describe/>", "CREATE ", extra=self._row)
        await probe.expect("<describe>no such table</describe>", "no such table", extra=self._row)

    async def reminder(self, probe: Probe) -> None:
        """The turns that the client tells of."""
        words = "<reminder>You have 3 turns left to complete the task.</reminder></observation>"
        await probe.expect("<sql>SELECT 1</sql>", words, extra={**self._row, "turns_left": 3})

    async def only_reads(self, probe: Probe) -> None:
        """Nothing but a SELECT is run."""
        for query in _WRITES:
            await probe.expect(f"<sql>{query}</sql>", "Error: ", extra=self._row)

    async def bombs(self, probe: Probe) -> None:
        """Time, memory and depth."""
        await probe.expect(f"<sql>{_ENDLESS}</sql>", "timed out", extra=self._row)
        for query in _BOMBS:
            await probe.expect(f"<sql>{query}</sql>", "Error: ", extra=self._row)

    async def batch(self, probe: Probe) -> None:
        """Each entry gets its own answer."""
        requests = [StepRequest(probe.new_id(), f"<sql>SELECT {i} + 1000</sql>", extra=self._row) for i in range(BATCH)]
        for i, result in enumerate(await probe.answers(requests)):
            if f"\n{i + 1000}</observation>" not in result.observation:
                raise CheckFailed(f"entry {i} of the batch got {result.observation!r:.100}")

    async def ends(self, probe: Probe) -> None:
        """A solution is not run."""
        result = await probe.answer("<solution>SELECT 1</solution>", extra=self._row)
        if not result.done or result.observation:
            raise CheckFailed(f"a solution was answered done={result.done}, {result.observation!r:.200}")

    async def databases(self, probe: Probe) -> None:
        """A row that names none, or one that is not there, is no model's doing."""
        for extra in ({}, {"db_id": "verl_tool_no_such"}, {"db_id": "../../etc/passwd"}):
            [result] = await probe.client.step([StepRequest(probe.new_id(), "<sql>SELECT 1</sql>", extra=extra)])
            if result.fault is None or result.fault.kind is not FaultKind.MISCONFIGURED:
                raise CheckFailed(f"{extra} was answered {result.fault or result.observation!r:.200}")


def cases(db_id: str) -> tuple[LiveCase, ...]:
    """What must hold of a server that has the database `db_id`."""
    of = _Checks(db_id)
    return (
        LiveCase("queries in tags, fences and Hermes JSON", of.queries),
        LiveCase("the schema", of.schema),
        LiveCase("the reminder", of.reminder),
        LiveCase("nothing is written, and one statement run", of.only_reads),
        LiveCase("bombs end", of.bombs, BOMB_SECONDS),
        LiveCase(f"a batch of {BATCH} trajectories", of.batch),
        LiveCase("a solution ends the trajectory", of.ends),
        LiveCase("a missing database is a fault", of.databases),
    )


app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.callback()
def keep_the_command_name() -> None:
    """Typer would leave out the name of a single command."""


@app.command("sql")
def run(
    db_id: Annotated[str, typer.Option("--db_id", help="A database under the server's root.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Check the tool sql of a live server, case by case."""
    check(url, api_key, "sql", cases(db_id))


if __name__ == "__main__":
    app()
