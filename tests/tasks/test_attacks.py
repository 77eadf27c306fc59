"""Attacks on the verifiers of `examples/tasks` get nothing, right solutions everything, in the real sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import cycle
from pathlib import Path

import pytest
import pytest_asyncio

from tests.tasks.right_solutions import RIGHT
from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import ConfigError
from verl_tool.sandbox import SandboxPool
from verl_tool.servers.tools.workspace.verifier import verify
from verl_tool.tasks.attacks import SHIPPED, TaskAttack, attempt, read_attacks
from verl_tool.tasks.check import TaskFinding, check_attacks
from verl_tool.tasks.task import Task, read_task
from verl_tool.tasks.task_workspace import TaskWorkspaces, lay_out_solution
from verl_tool.verification import Verdict, Verification

TASKS = {folder.name: read_task(folder) for folder in (Path(__file__).parents[2] / "examples" / "tasks").iterdir()}
AT_ONCE = 6
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SandboxPool]:
    async with SandboxPool(workers=2, warm_modules=(), for_sessions=True) as made:
        yield made


async def test_there_are_many_attacks_and_right_solutions() -> None:
    assert len({attack.name for attack in read_attacks(SHIPPED)}) >= 60
    assert len({(task, name) for task, name, _ in RIGHT}) == len(RIGHT) >= 60


@pytest.mark.parametrize("file", sorted(SHIPPED.glob("*.toml")), ids=lambda file: file.stem)
async def test_no_attack_gets_a_reward(pool: SandboxPool, file: Path) -> None:
    """Each on one task, so that they take no minutes; ``tasks check --attack shipped`` tries each on all."""
    of_code = cycle([TASKS["repair-function"], TASKS["failing-test"]])
    of_files = cycle([TASKS["parse-log"], TASKS["find-value"], TASKS["repair-function"], TASKS["fill-csv"]])
    at_once = asyncio.Semaphore(AT_ONCE)

    async def verdict(attack: TaskAttack) -> Verdict:
        async with at_once:
            return await attempt(attack, next(of_code if attack.code else of_files), TaskWorkspaces(pool))

    attacks = read_attacks(file)
    verdicts = dict(zip((attack.name for attack in attacks), await asyncio.gather(*map(verdict, attacks)), strict=True))
    assert {name: verdict for name, verdict in verdicts.items() if verdict.score != 0.0} == {}


async def test_right_solutions_get_the_reward(pool: SandboxPool) -> None:
    at_once = asyncio.Semaphore(AT_ONCE)

    async def verdict(task: Task, script: str) -> Verdict:
        async with at_once, TaskWorkspaces(pool).open(task) as workspace:
            await lay_out_solution(task, workspace)
            await workspace.exec(script)
            return await verify(workspace, task.verification)

    verdicts = await asyncio.gather(*(verdict(TASKS[task], script) for task, _, script in RIGHT))
    wrong = {(task, name): v for (task, name, _), v in zip(RIGHT, verdicts, strict=True) if v.score != 1.0}
    assert wrong == {}


async def test_a_verifier_that_runs_the_code_itself_is_found_out(pool: SandboxPool) -> None:
    check = "import sys; sys.path.insert(0, '.'); import statistics_of as s; s.median([]) or exit(1)"
    weak = f'cd /app; python3 -c "{check}"'
    script = f"{weak} && echo 1 > /logs/verifier/reward.txt; true"
    verification = Verification(files=pack_files({"test.sh": PackedFile(script.encode())}))
    task = Task("weak", "", {"statistics_of.py": PackedFile(b"def median(v): pass")}, verification, {})
    attacks = [attack for attack in read_attacks(SHIPPED) if attack.name in ("ends with success", "a fork bomb")]
    finding = await check_attacks(TaskFinding("weak"), task, TaskWorkspaces(pool), attacks)
    assert (finding.attacks, finding.problem) == (1, "ends with success got 1.0")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[x]\nshell = 'a'\ncode = 'b'", "give either shell or code"),
        ("[x]\nperl = 'a'", "Extra inputs"),
        ("[x", "cannot be read"),
        (None, "holds no file of attacks"),
    ],
)
async def test_attacks_that_cannot_be_read(tmp_path: Path, text: str | None, told: str) -> None:
    if text is not None:
        (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=told):
        read_attacks(tmp_path)
