"""A client of NeMo-Gym's resources servers, against one that answers as nemo-gym 0.7 did (``data/nemo_gym.json``)."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from environment_play import hermes, play_turns
from live_server import LiveServers
from peer_programs import PeerProgram, running_program
from replayed_environments import ReplayedNemoGym, serve_app
from toy_model import ToyTokenizer

from verl_tool.agent_loop.trajectory import StopReason, Trajectory
from verl_tool.client import ToolClient
from verl_tool.environments.nemo_gym import NemoGymEnvironment, ProcessWatch, read_prompt, read_rows
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.formats import Call
from verl_tool.formats.direct import DIRECT
from verl_tool.protocol import FaultKind
from verl_tool.servers.execution.in_process import InProcessTools
from verl_tool.servers.tools.base import Context

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "data" / "nemo_gym.json").read_text())
COUNTER, BLACKJACK = RECORDED["counter"], RECORDED["blackjack"]
ADD_AND_READ = [
    hermes("increment_counter", '{"count": 1}'),
    hermes("increment_counter", '{"count": 2}'),
    hermes("get_counter_value"),
    "<think>It is six.</think>\n6",
]


def counter_gym(**answers: tuple[int, Any]) -> ReplayedNemoGym:
    """The recorded server; `answers` are status and answer of routes, in place of those recorded."""
    changed = [
        {"path": f"/{name}", "body": None, "status": status, "answer": answer}
        for name, (status, answer) in answers.items()
    ]
    others = [each for each in COUNTER["exchanges"] if each["path"].strip("/") not in answers]
    return ReplayedNemoGym(COUNTER["paths"], [*changed, *others])


@asynccontextmanager
async def client_of(server: ReplayedNemoGym, **options: Any) -> AsyncIterator[NemoGymEnvironment]:
    async with serve_app(server.app) as url:
        environment = NemoGymEnvironment(url=url, **options)
        try:
            yield environment
        finally:
            await environment.close()


async def play(server: ReplayedNemoGym, turns: Sequence[str], row: Any, data: Any = None, **options: Any) -> Trajectory:
    async with client_of(server, **options) as environment, InProcessTools([environment]) as served:
        question = row["responses_create_params"]["input"][-1]["content"]
        return await play_turns(served, served.describe(), turns, {"row": row}, data, question=question, max_turns=8)


def items_of(server: ReplayedNemoGym, path: str) -> list[Any]:
    """The items of the response in the last request at `path`, without their ids."""
    [*_, body] = [body for each, body, _ in server.received if each == path]
    hidden = ("id", "call_id", "status", "annotations")
    return [{name: value for name, value in item.items() if name not in hidden} for item in body["response"]["output"]]


async def test_tools_of_the_row_are_called_and_the_transcript_is_verified() -> None:
    server = counter_gym()
    trajectory = await play(server, ADD_AND_READ, COUNTER["row"])
    assert "get_counter_value" in ToyTokenizer().decode(trajectory.prompt_ids)
    assert '{"count": 6}' in trajectory.turn_calls[2].observation
    assert trajectory.stop is StopReason.ANSWERED
    assert trajectory.verdict is not None
    assert trajectory.verdict.score == 1.0
    assert [path for path, _, _ in server.received] == [
        "/seed_session",
        "/increment_counter",
        "/increment_counter",
        "/get_counter_value",
        "/verify",
    ]
    assert server.received[0][1] == COUNTER["row"]
    cookies = [cookie for _, _, cookie in server.received]
    assert cookies == [None, *["Server___session=eyJzZXNzaW9uX2lkIjogIjEifQ==.aSc.x_y-z"] * 4]
    assert items_of(server, "/verify")[:2] == [
        {"type": "function_call", "name": "increment_counter", "arguments": '{"count":1}'},
        {"type": "function_call_output", "output": '{"success": true}'},
    ]
    assert items_of(server, "/verify")[-2:] == [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "It is six."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "6", "annotations": []}]},
    ]


async def test_calls_of_one_turn_stand_before_their_outputs() -> None:
    server = counter_gym()
    both = f"Adding. {ADD_AND_READ[0]}\n{ADD_AND_READ[1]}"
    await play(server, [both, "6"], COUNTER["row"])
    kinds = [(item["type"], item.get("role")) for item in items_of(server, "/verify")]
    assert kinds == [
        ("message", "assistant"),
        *[("function_call", None)] * 2,
        *[("function_call_output", None)] * 2,
        ("message", "assistant"),
    ]


async def test_a_call_that_the_server_cannot_read_is_an_observation() -> None:
    server = counter_gym(get_counter_value=(500, "KeyError('x')"))
    turns = [hermes("increment_counter", '{"cnt": 1}'), hermes("get_counter_value"), "?"]
    wrong, crashed = (await play(server, turns, COUNTER["row"])).turn_calls
    assert not wrong.valid
    assert "Field required" in wrong.observation
    assert crashed.valid
    assert "KeyError" in crashed.observation
    assert crashed.metrics is not None
    assert crashed.metrics["error"] == 1.0


@pytest.mark.parametrize("status", [302, 401, 403])
async def test_a_call_that_a_tool_forbids_is_an_observation(status: int) -> None:
    turns = [hermes("get_counter_value"), "?"]
    trajectory = await play(counter_gym(get_counter_value=(status, "not yours")), turns, COUNTER["row"])
    assert trajectory.fault is None
    assert "not yours" in trajectory.turn_calls[0].observation


async def test_what_only_the_verifier_needs_is_sent_at_the_end(tmp_path: Path) -> None:
    source = tmp_path / "example.jsonl"
    source.write_text(json.dumps(COUNTER["row"]) + "\n")
    [row] = read_rows(str(source), verify_only=["expected_count"])
    assert row["prompt"] == [{"role": "user", "content": "add 1 then add 2 then get the count"}]
    first = row["extra_info"]["tools_kwargs"]["environment"]["row"]
    assert "expected_count" not in first
    server = ReplayedNemoGym(COUNTER["paths"], [{**each, "body": None} for each in COUNTER["exchanges"]])
    await play(server, ["6"], first, row["reward_model"]["ground_truth"])
    assert "expected_count" not in server.received[0][1]
    assert server.received[-1][1]["expected_count"] == 6
    with pytest.raises(ConfigError, match=r"line 1: the row has no answer"):
        list(read_rows(str(source), verify_only=["answer"]))


async def test_a_masked_sample_is_left_out() -> None:
    masked = {"reward": 0.0, "mask_sample": True, "failure_kind": "judge_failed", "failure_reason": "no judge"}
    trajectory = await play(counter_gym(verify=(200, masked)), ["6"], COUNTER["row"])
    assert trajectory.verdict is not None
    assert trajectory.verdict.score is None
    assert trajectory.verdict.fault is not None
    assert "judge_failed: no judge" in trajectory.verdict.fault.message


async def test_numbers_in_addition_to_the_reward_are_recorded() -> None:
    answer = {"reward": 0.5, "tests_passed": 3, "correct": True, "why": "x", "mask_sample": False}
    trajectory = await play(counter_gym(verify=(200, answer)), ["6"], COUNTER["row"])
    assert trajectory.verdict is not None
    assert trajectory.verdict.numbers == {
        "env_steps": 0.0,
        "env_invalid_steps": 0.0,
        "env_done": 0.0,
        "env_judged": 1.0,
        "tests_passed": 3.0,
        "correct": 1.0,
    }


@pytest.mark.parametrize(
    ("status", "answer", "kind", "score"),
    [
        (500, "IndexError()", FaultKind.TOOL_CRASHED, 0.0),
        (422, {"detail": []}, FaultKind.MISCONFIGURED, None),
        (503, "busy", FaultKind.OVERLOADED, None),
        (200, {"reward": "much"}, FaultKind.MISCONFIGURED, None),
        (200, [], FaultKind.MISCONFIGURED, None),
    ],
)
async def test_a_verifier_that_fails(status: int, answer: Any, kind: FaultKind, score: float | None) -> None:
    """The words of a model may crash it; nothing else is the policy's doing."""
    trajectory = await play(counter_gym(verify=(status, answer)), ["6"], COUNTER["row"])
    assert trajectory.verdict is not None
    assert trajectory.verdict.fault is not None
    assert trajectory.verdict.fault.kind is kind
    assert trajectory.verdict.score == score


async def test_each_turn_is_a_step_of_a_gymnasium() -> None:
    server = ReplayedNemoGym(BLACKJACK["paths"], BLACKJACK["exchanges"])
    turns = ["<action>hit</action>"] * 3
    trajectory = await play(server, turns, BLACKJACK["row"])
    assert "Your hand: [J, 5] = 15" in ToyTokenizer().decode(trajectory.prompt_ids)
    assert "= 16" in trajectory.turn_calls[0].observation
    assert trajectory.stop is StopReason.TOOL_DONE
    assert trajectory.verdict is not None
    assert trajectory.verdict.score == -1.0
    assert items_of(server, "/step") == [
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": turns[0], "annotations": []}],
        }
    ]


async def test_calls_of_a_gymnasium_with_tools() -> None:
    called = {"observation": "Go on.", "reward": 0.5, "info": {"tool_outputs": [{"call_id": "x", "output": "7"}]}}
    exchanges = [
        {"path": "/reset", "body": None, "status": 200, "answer": {"info": {"supports_explicit_close": True}}},
        {"path": "/step", "body": None, "status": 200, "answer": called},
        {"path": "/step", "body": None, "status": 500, "answer": "IndexError()"},
        {"path": "/step", "body": None, "status": 200, "answer": {"reward": 0.25, "truncated": True}},
        {"path": "/close", "body": {}, "status": 200, "answer": {}},
    ]
    server = ReplayedNemoGym(["/reset", "/step"], exchanges)
    first = f"{ADD_AND_READ[0]}{ADD_AND_READ[1]}"
    trajectory = await play(server, [first, "done", "yes"], COUNTER["row"])
    called_turn, failed, _ = trajectory.turn_calls
    assert "7\nGo on." in called_turn.observation
    assert "one call in a turn" in called_turn.observation
    assert "IndexError" in failed.observation
    assert trajectory.stop is StopReason.TOOL_DONE
    assert trajectory.verdict is not None
    assert trajectory.verdict.score == 0.75
    assert trajectory.verdict.numbers["env_done"] == 0.0
    assert [path for path, _, _ in server.received] == ["/reset", *["/step"] * 3, "/close"]


async def step(environment: NemoGymEnvironment, session: Any, name: str, number: int = 0, **arguments: Any) -> Any:
    class State:
        done, rewards, steps, invalid_steps = False, (), 0, 0

    state = State()
    state.session = session  # type: ignore[attr-defined]
    call = Call(name, "", 0, 0, DIRECT, arguments)
    return await environment.run(call, Context("t", number, state))


async def test_a_restarted_server_has_none_of_its_sessions() -> None:
    """It takes their cookies, so nothing but the process tells."""
    async with running_program(Path(sys.executable), HERE / "counting_gym.py") as server:
        await restart_and_check(server, "increment_counter")


async def restart_and_check(server: PeerProgram, tool: str) -> None:
    environment = NemoGymEnvironment(url=server.url)
    calling, judging = [(await environment.begin(name, {"row": COUNTER["row"]}))[0] for name in "ab"]
    assert (await step(environment, calling, tool, count=1)).valid
    await server.kill()
    await server.start()
    with pytest.raises(ToolFault, match="was restarted") as lost:
        await step(environment, calling, tool, 1, count=1)
    assert (lost.value.kind, lost.value.retryable) == (FaultKind.STATE_LOST, False)
    with pytest.raises(ToolFault, match="was restarted"):
        await environment.verdict(judging, "6", {}, [])
    unwatched = NemoGymEnvironment(url=server.url, watch_process=False)
    judging.watch = None
    assert (await unwatched.verdict(judging, "6", {}, [])).reward == 0.0, "this is what the watch prevents"
    session, _ = await environment.begin("c", {"row": COUNTER["row"]})
    for number, count in enumerate((1, 2)):
        assert (await step(environment, session, tool, number, count=count)).valid
    assert (await environment.verdict(session, "6", {}, [])).reward == 1.0
    await server.kill()
    with pytest.raises(ToolFault) as dead:
        await environment.verdict(session, "6", {}, [])
    assert dead.value.kind is FaultKind.STATE_LOST
    with pytest.raises(ToolFault) as absent:
        await environment.begin("d", {"row": COUNTER["row"]})
    assert (absent.value.kind, absent.value.retryable) == (FaultKind.UNREACHABLE, True)
    await environment.close()
    await unwatched.close()


async def test_a_restart_while_a_call_runs_is_noticed_by_its_answer() -> None:
    """The connection is found closed after the answer too, not only before the request."""
    async with client_of(counter_gym()) as environment:
        session, _ = await environment.begin("t", {"row": COUNTER["row"]})
        assert session.watch is not None
        checks = iter([False, True, True])
        session.watch.has_ended = lambda: next(checks)  # type: ignore[method-assign]
        with pytest.raises(ToolFault, match="was restarted"):
            await step(environment, session, "increment_counter", count=1)


async def test_the_watch_is_open_as_long_as_the_process_lives() -> None:
    async with running_program(Path(sys.executable), HERE / "counting_gym.py") as server:
        watch = await ProcessWatch.open("localhost", server.port)
        assert not watch.has_ended()
        await server.kill()
        assert watch.has_ended()
        watch.close()


async def fault_at_begin(server: ReplayedNemoGym, row: Any = COUNTER["row"], **options: Any) -> ToolFault:
    async with client_of(server, **options) as environment:
        with pytest.raises(ToolFault) as raised:
            await environment.begin("t", {"row": row})
    return raised.value


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (422, FaultKind.MISCONFIGURED, False),
        (401, FaultKind.MISCONFIGURED, False),
        (302, FaultKind.MISCONFIGURED, False),
        (500, FaultKind.MISCONFIGURED, False),
        (503, FaultKind.OVERLOADED, True),
    ],
)
async def test_a_session_that_cannot_begin(status: int, kind: FaultKind, retryable: bool) -> None:
    fault = await fault_at_begin(counter_gym(seed_session=(status, "no")))
    assert (fault.kind, fault.retryable) == (kind, retryable)
    assert str(status) in fault.message


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"type": "web_search"}, "web_search"),
        ({"type": "function", "name": "verify"}, "names no tool"),
        ({"type": "function", "name": "../x"}, "names no tool"),
        ({"type": "function"}, "name"),
        ("x", "tools of the row"),
    ],
)
async def test_a_row_with_tools_that_cannot_be_called(tool: Any, words: str) -> None:
    fault = await fault_at_begin(counter_gym(), {"responses_create_params": {"input": "?", "tools": [tool]}})
    assert fault.kind is FaultKind.MISCONFIGURED
    assert words in fault.message


async def test_a_row_or_a_server_of_another_kind() -> None:
    assert "must be an object" in (await fault_at_begin(counter_gym(), {"input": "?"})).message
    assert "set the options url and kind" in (await fault_at_begin(ReplayedNemoGym(["/act"], []))).message
    with pytest.raises(ConfigError, match="watch_process"):
        NemoGymEnvironment(url="https://gym.example.org")


async def test_limits_of_an_answer() -> None:
    server = counter_gym(get_counter_value=(200, "x" * 4000))
    server.delay_seconds["/increment_counter"] = 5.0
    async with client_of(server, step_seconds=0.3, max_answer_bytes=2048) as environment:
        session, _ = await environment.begin("t", {"row": COUNTER["row"]})
        with pytest.raises(ToolFault, match=r"within 0.3 s") as slow:
            await step(environment, session, "increment_counter", count=1)
        assert slow.value.kind is FaultKind.TIMEOUT
        with pytest.raises(ToolFault, match="max_answer_bytes=2048") as long:
            await step(environment, session, "get_counter_value", 1)
        assert long.value.kind is FaultKind.TOOL_CRASHED


async def test_the_loop_plays_through_the_tool_server(servers: LiveServers) -> None:
    async with client_of(counter_gym()) as environment:
        live = await servers.start([environment])
        async with ToolClient(live.observations_url) as client:
            trajectory = await play_turns(
                client, await client.tools(), ADD_AND_READ, {"row": COUNTER["row"]}, question="Add.", max_turns=8
            )
    assert trajectory.verdict is not None
    assert trajectory.verdict.score == 1.0


def test_messages_of_a_row_are_read() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    prompt = read_prompt({"instructions": "Be brief.", "input": [{"role": "developer", "content": parts}]}, "row 1")
    assert prompt == [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "ab"}]
    assert read_prompt({"input": "hi"}, "row 1") == [{"role": "user", "content": "hi"}]
    for wrong in (3, [{"type": "function_call"}], [{"role": "user", "content": [{"type": "input_image"}]}]):
        with pytest.raises(ConfigError, match="row 1"):
            read_prompt({"input": wrong}, "row 1")
