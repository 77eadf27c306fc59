"""BFCL's multi-turn tasks: through the real server and loop, with a small stand-in of the package, and the package."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from environment_dialogue import Dialogues, text_of, write_call
from stand_in_bfcl import ENTRY, TRUTH, make_stand_in

from verl_tool.agent_loop.trajectory import Excluded, StopReason, Trajectory
from verl_tool.environments.bfcl import ADDED, BfclEnvironment, BfclSession, read_rows
from verl_tool.errors import ConfigError, StartError, ToolFault
from verl_tool.formats import PYTHON_TAGS, Call
from verl_tool.protocol import FaultKind

ROW = {"entry": ENTRY}
DATA = {"turns": TRUTH}
PEERS = os.environ.get("VERL_TOOL_PEERS")
"""Folder of virtual environments with packages of others."""
REAL = Path(PEERS or "", "bfcl", "bin", "python")
needs_package = pytest.mark.skipif(
    PEERS is None or not REAL.exists(), reason="VERL_TOOL_PEERS names no folder with a virtual environment bfcl"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_stand_in(tmp_path_factory.mktemp("peers") / "bfcl")


@pytest.fixture
async def dialogues(python: Path) -> AsyncIterator[Dialogues]:
    async with Dialogues([BfclEnvironment(python=python, cpu_seconds=1, memory_mb=400)]) as made:
        yield made


def call_in(text: str) -> str:
    """Write a call of the ground truth as a model does."""
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    assert not call.args
    return write_call(call.func.id, **{str(each.arg): ast.literal_eval(each.value) for each in call.keywords})


def score_of(trajectory: Trajectory) -> float | None:
    assert trajectory.verdict is not None
    return trajectory.verdict.score


async def test_the_next_message_comes_when_the_model_answers_without_a_call(dialogues: Dialogues) -> None:
    turns = [write_call("reset"), write_call("add", number=2), "Done."]
    turns += [write_call("reset"), "Done.", write_call("add", number=3), "Done."]
    played = await dialogues.play(turns, ROW, DATA)
    early, first, _, later, _, _, last = (call.observation for call in played.turn_calls)
    assert "unknown tool 'reset'" in early
    assert '{"total": 7, "label": ""}' in first
    assert "None" in later
    assert last == ""
    text = text_of(played)
    assert "<|im_start|>user\nAdd 2.<|im_end|>" in text
    assert f"{ADDED}<|im_end|>" in text
    assert "<|im_start|>user\nAdd 3.<|im_end|>" in text
    assert '"type": "number"' in text
    assert played.stop is StopReason.TOOL_DONE
    assert score_of(played) == 1.0


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        ([write_call("add", number=3), "Done.", "Done.", "Done."], "turn 0"),
        ([write_call("add", number=2), "Done.", "Done.", "Done."], "turn 1"),
        ([write_call("add", number=2)], "turn 1"),  # cut off after the first message
    ],
)
async def test_the_checker_compares_each_turn(dialogues: Dialogues, turns: list[str], words: str) -> None:
    played = await dialogues.play(turns, ROW, DATA)
    assert score_of(played) == 0.0
    assert played.verdict is not None
    assert words in played.verdict.told


HOSTILE = [
    write_call("_load_scenario", config={}),
    write_call("add", **{"number=__import__('os').system('touch /tmp/x')": 1}),
    write_call("__import__", name="os"),
    '<tool_call>\n{"name": "add", "arguments": {"number": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"number": 1e999}}\n</tool_call>',
]


@pytest.mark.parametrize("hostile", HOSTILE)
async def test_only_known_functions_are_called_with_literals(dialogues: Dialogues, hostile: str) -> None:
    played = await dialogues.play([hostile, write_call("add", number=2), "Done."], ROW, DATA)
    assert played.turn_calls[0].valid is False
    assert '{"total": 7' in played.turn_calls[1].observation


async def test_text_of_an_argument_is_never_code(dialogues: Dialogues) -> None:
    text = """'); raise SystemExit("x") + '\\"\n#{}"""
    played = await dialogues.play([write_call("add", number=2, label=text), "Done."], ROW, DATA)
    assert "SystemExit" in played.turn_calls[0].observation
    assert "total" in played.turn_calls[0].observation


async def test_an_error_of_a_function_is_read(dialogues: Dialogues) -> None:
    played = await dialogues.play([write_call("add", number="two"), "Done."], ROW, DATA)
    assert "Error during execution" in played.turn_calls[0].observation
    assert played.fault is None


async def test_one_episode_that_computes_for_ever_harms_no_other(dialogues: Dialogues) -> None:
    turns = [write_call("add", number=2), "Done.", write_call("reset"), "Done.", write_call("add", number=3), "Done."]
    bad, large, good = await asyncio.gather(
        dialogues.play([write_call("compute", seconds=100)], ROW, DATA),
        dialogues.play([write_call("allocate", megabytes=4000), "Done."], ROW, DATA),
        dialogues.play(turns, ROW, DATA),
    )
    assert bad.fault is not None
    assert bad.fault.kind is FaultKind.TOOL_CRASHED
    assert "cpu_seconds" in bad.fault.message
    assert bad.excluded is None, "the policy's doing"
    assert "Error during execution" in large.turn_calls[0].observation
    assert score_of(good) == 1.0


async def test_a_call_that_waits_too_long_is_stopped(python: Path) -> None:
    async with Dialogues([BfclEnvironment(python=python, call_seconds=1.0)]) as dialogues:
        played = await dialogues.play([write_call("sleep", seconds=60)], ROW, DATA)
    assert played.fault is not None
    assert played.fault.kind is FaultKind.TIMEOUT


async def test_too_many_calls_end_the_episode(python: Path) -> None:
    async with Dialogues([BfclEnvironment(python=python, max_calls=2)]) as dialogues:
        played = await dialogues.play([write_call("add", number=1)] * 4, ROW, DATA)
    assert played.stop is StopReason.TOOL_DONE
    assert len(played.turn_calls) == 3
    assert score_of(played) == 0.0


async def test_a_server_process_that_is_killed_is_replaced(python: Path) -> None:
    environment = BfclEnvironment(python=python)
    async with Dialogues([environment], seconds=20.0) as dialogues:
        first, _ = await environment.begin("t", ROW)
        server = environment._process
        assert server is not None
        os.kill(server.pid, signal.SIGKILL)
        await server.wait()
        turns = [write_call("add", number=2), "Done.", write_call("reset"), "Done."]
        turns += [write_call("add", number=3), "Done."]
        both = await asyncio.gather(*(dialogues.play(turns, ROW, DATA) for _ in range(2)))
        assert [score_of(played) for played in both] == [1.0, 1.0]
        first.writer.get_extra_info("socket").shutdown(socket.SHUT_WR)  # its process ends
        with pytest.raises(ToolFault) as caught:
            await environment.step(first, Call("add", "", 0, 0, PYTHON_TAGS, arguments={"number": 2}))
        assert caught.value.kind is FaultKind.STATE_LOST, "no doing of the policy"
        await environment.end(first)


async def test_a_server_process_that_cannot_be_replaced_is_no_doing_of_the_policy(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = BfclEnvironment(python=python)
    async with Dialogues([environment], seconds=5.0) as dialogues:
        assert environment._process is not None
        os.kill(environment._process.pid, signal.SIGKILL)
        await environment._process.wait()
        monkeypatch.setattr(environment, "options", environment.options.model_copy(update={"python": "/bin/false"}))
        played = await dialogues.play(["Done."], ROW, DATA)
    assert played.fault is not None
    assert played.fault.kind is FaultKind.UNREACHABLE
    assert "/bin/false cannot serve bfcl-eval" in played.fault.message
    assert played.excluded is Excluded.FAULT


@pytest.mark.parametrize("cancelled", [False, True])
async def test_an_episode_that_does_not_begin_leaves_no_connection(
    python: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    environment = BfclEnvironment(python=python)
    await environment.start()
    sessions: list[BfclSession] = []
    waits = asyncio.Event()

    async def fail(session: BfclSession, question: Mapping[str, Any]) -> dict[str, Any]:
        sessions.append(session)
        waits.set()
        if cancelled:
            await asyncio.sleep(30)
        raise ToolFault(FaultKind.TIMEOUT, "late", retryable=False)

    monkeypatch.setattr(environment, "_ask", fail)
    try:
        task = asyncio.ensure_future(environment.begin("t", ROW))
        await asyncio.wait_for(waits.wait(), 10)
        if cancelled:
            task.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else ToolFault):
            await task
        [session] = sessions
        assert session.writer.is_closing()
    finally:
        await environment.close()


@pytest.mark.parametrize(
    ("row", "data", "words"),
    [
        ({}, DATA, "wrong: entry"),
        ({"entry": {**ENTRY, "question": "x"}}, DATA, "wrong: question"),
        ({"entry": {**ENTRY, "question": [[]]}}, DATA, "wrong: question"),
        ({"entry": {**ENTRY, "involved_classes": ["WebSearchAPI"]}}, DATA, "WebSearchAPI"),
        (ROW, {}, "needs turns"),
        (ROW, {"turns": TRUTH[:2]}, "needs turns"),
        (ROW, {"turns": [["__import__('os').getcwd()"], [], []]}, "no call of a function"),
    ],
)
async def test_a_wrong_row_is_named(
    dialogues: Dialogues, row: dict[str, Any], data: dict[str, Any], words: str
) -> None:
    played = await dialogues.play([write_call("add", number=2), "Done.", "Done.", "Done."], row, data)
    fault = played.fault or (played.verdict and played.verdict.fault)
    assert fault is not None
    assert fault.kind is FaultKind.MISCONFIGURED
    assert words in fault.message


async def test_a_crash_of_the_checker_is_what_the_calls_did(dialogues: Dialogues) -> None:
    turns = [write_call("add", number=1e308), write_call("add", number=1e308), "Done.", "Done.", "Done."]
    played = await dialogues.play(turns, ROW, DATA)
    assert played.verdict is not None
    assert played.verdict.fault is not None
    assert played.verdict.fault.kind is FaultKind.TOOL_CRASHED
    assert "OverflowError" in played.verdict.fault.message
    assert played.verdict.score == 0.0


async def test_a_relative_interpreter_is_found(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(python.parent)
    environment = BfclEnvironment(python=Path("..", python.parent.name, python.name))
    await environment.start()
    await environment.close()


async def test_an_interpreter_without_the_package_is_an_error_at_the_start(tmp_path: Path, python: Path) -> None:
    with pytest.raises(StartError, match="option python"):
        await BfclEnvironment().start()
    for other in (tmp_path / "none", Path("/bin/false")):
        with pytest.raises(StartError, match="bfcl-eval"):
            await BfclEnvironment(python=other).start()
    with pytest.raises(ConfigError, match="cannot be run"):
        next(read_rows("multi_turn_small", python=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match="finds no tasks"):
        next(read_rows("multi_turn_none", python=str(python)))
    with pytest.raises(ConfigError, match="category"):
        next(read_rows("../x", python=str(python)))
    [row] = read_rows("multi_turn_small", python=str(python))
    assert row["extra_info"]["tools_kwargs"]["environment"]["entry"] == ENTRY
    assert row["reward_model"] == {"style": "environment", "ground_truth": DATA}


@needs_package
@pytest.mark.slow
@pytest.mark.parametrize("category", ["base", "miss_func", "miss_param", "long_context"])
async def test_the_package_accepts_its_own_ground_truth_and_rejects_less(category: str) -> None:
    played = 0
    async with Dialogues([BfclEnvironment(python=REAL)]) as dialogues:
        for row in list(read_rows(f"multi_turn_{category}", python=str(REAL)))[:40]:
            truth = row["reward_model"]["ground_truth"]["turns"]
            if any(ast.parse(call, mode="eval").body.args for turn in truth for call in turn):  # type: ignore[attr-defined]
                continue
            environment = row["extra_info"]["tools_kwargs"]["environment"]
            turns = [text for turn in truth for text in (*map(call_in, turn), "Done.")]
            options = {"max_response_length": 200_000, "max_prompt_length": 400_000}
            whole = await dialogues.play(turns, environment, {"turns": truth}, **options)
            assert score_of(whole) == 1.0, row["extra_info"]["id"]
            assert whole.stop is StopReason.TOOL_DONE
            nothing = await dialogues.play(["Done."] * len(truth), environment, {"turns": truth}, **options)
            assert score_of(nothing) == 0.0
            played += 1
            if played == 6:
                break
    assert played == 6
