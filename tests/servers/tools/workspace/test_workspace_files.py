"""Files that requests bring into workspaces, and verifiers that look at what is left there, as the server runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.protocol import FILES_FIELD, VERIFY_FIELD, FaultKind, StepRequest, StepResult
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import load_tools

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

OPTIONS = {"workers": 1, "warm_modules": (), "max_sessions": 2, "max_disk_mb": 1}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[ToolSet]:
    made = ToolSet(load_tools("bash_terminal,finish", shared=OPTIONS))
    await made.start()
    yield made
    await made.close()


async def sent(served: ToolSet, step: int, action: str = "", finish: bool = False, **extra: object) -> StepResult:
    """The answer to one step of the trajectory ``t``."""
    [result] = await served.step([StepRequest("t", action, step, finish, extra=extra)], timeout_seconds=60)
    return result


def verification(script: str) -> dict[str, object]:
    return {VERIFY_FIELD: {"files": pack_files({"test.sh": PackedFile(script.encode())})}}


FILES = {FILES_FIELD: [{"path": "in/a.txt", "text": "given"}, {"path": "say", "text": "echo said", "executable": True}]}


async def test_files_are_there_before_the_first_call_and_a_verifier_comes_after_the_last(served: ToolSet) -> None:
    seen = await sent(served, 0, "<bash>cat in/a.txt; ./say; cat /tests/test.sh</bash>", keep_state=True, **FILES)
    assert "givensaid\n" in seen.observation
    assert "/tests/test.sh: No such file" in seen.observation
    over = await sent(served, 1, "<finish>1</finish>", keep_state=True)
    assert over.done
    counts = (
        "in_workspace bash -c 'echo x >> runs; wc -l < runs' > /tmp/runs;"
        ' printf \'{"reward": 0.%s, "style": 1}\' $(cat /tmp/runs) > /logs/verifier/reward.json'
    )
    first = await sent(served, 2, **verification(counts))
    assert (first.reward, first.metrics, first.observation, first.fault) == (0.1, {"style": 1.0}, "", None)
    assert await sent(served, 2, **verification(counts)) == first, "it runs once"
    assert (await sent(served, 3, **verification(counts))).reward == 0.2
    await sent(served, 4, finish=True)
    assert len(served) == 0


async def test_a_workspace_that_no_call_was_made_in_can_be_verified(served: ToolSet) -> None:
    script = "test -f in/a.txt && echo 0.5 > /logs/verifier/reward.txt"
    assert (await sent(served, 0, **FILES, **verification(script))).reward == 0.5
    await sent(served, 1, finish=True)
    assert (await sent(served, 0, "no call", **FILES)).valid is False
    assert (await sent(served, 1, **verification(script))).reward == 0.5, (
        "files come with the first request, call or not"
    )
    await sent(served, 2, finish=True)


async def test_without_keep_state_a_call_that_ends_the_trajectory_frees_its_workspace(served: ToolSet) -> None:
    await sent(served, 0, "<bash>true</bash><finish>1</finish>")
    result = await sent(served, 1, **verification("true"))
    assert result.fault is not None
    assert result.fault.kind is FaultKind.BAD_REQUEST
    await sent(served, 2, finish=True)


@pytest.mark.parametrize(
    ("extra", "kind", "told"),
    [
        ({FILES_FIELD: [{"path": "../a", "text": ""}]}, FaultKind.BAD_REQUEST, "'../a' must be a plain one"),
        ({FILES_FIELD: [{"path": "a", "text": "x" * (1 << 20 | 1)}]}, FaultKind.SANDBOX, "disk_bytes is 1048576"),
        ({VERIFY_FIELD: {"files": "%"}}, FaultKind.BAD_REQUEST, "is not base64"),
    ],
)
async def test_what_cannot_be_laid_out_is_a_fault(
    served: ToolSet, extra: dict[str, object], kind: FaultKind, told: str
) -> None:
    result = await sent(served, 0, "<bash>true</bash>", **extra)
    assert result.fault is not None
    assert (result.fault.kind, result.fault.retryable, told in result.fault.message) == (kind, False, True)
    await sent(served, 1, finish=True)


@pytest.mark.parametrize("extra", [FILES, verification("true")])
async def test_a_server_without_workspaces_says_so(extra: dict[str, object]) -> None:
    served = ToolSet(load_tools("calculator"))
    await served.start()
    try:
        result = await sent(served, 0, "<calculator>1 + 1</calculator>", **extra)
        assert result.fault is not None
        assert result.fault.kind is FaultKind.SANDBOX
        assert "needs a tool with a workspace; serve one" in result.fault.message
    finally:
        await served.close()
