"""ToolSet: which tool takes a call, order, state, expiry, and every step once."""

from __future__ import annotations

import asyncio
import time

import pytest
from toy_tools import Crowded, Ledger, Puppet, running, text, until

from verl_tool.errors import ConfigError, VerlToolError
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind, StepRequest, StepResult
from verl_tool.servers.execution import toolset as toolset_module
from verl_tool.servers.execution.admission import Admission
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools.base import Context, InvalidCall, Tool, ToolResult


def say(words: str) -> str:
    return f"<puppet>say {words}</puppet>"


def note(words: str) -> str:
    return f"<ledger>{words}</ledger>"


async def one(toolset: ToolSet, trajectory_id: str, action: str, step: int | None = None, **more: object) -> StepResult:
    return (await toolset.step([StepRequest(trajectory_id, action, step, **more)]))[0]  # type: ignore[arg-type]


def fault_kind(result: StepResult) -> FaultKind | None:
    return result.fault.kind if result.fault else None


class TestCalls:
    async def test_results_come_in_the_order_of_the_requests(self) -> None:
        async with running([Puppet()]) as toolset:
            seconds = [0.05, 0.0, 0.03, 0.01]
            actions = [f"<puppet>sleep {s}</puppet>" for s in seconds]
            results = await toolset.step([StepRequest(f"t{i}", action) for i, action in enumerate(actions)])
            assert [text(r.observation) for r in results] == [str(s) for s in seconds]
            assert [r.trajectory_id for r in results] == ["t0", "t1", "t2", "t3"]

    async def test_several_calls_of_several_tools_run_in_the_order_of_the_text(self) -> None:
        puppet, ledger = Puppet(), Ledger()
        async with running([ledger, puppet]) as toolset:
            result = await one(toolset, "t", f"{say('a')} then {note('x')} then {say('b')} and {note('y')}")
            parts = [part.split("\n")[0] for part in result.observation.split("<result>\n")[1:]]
            assert parts == ["a", "x", "b", "x,y"]
            assert puppet.runs == ["say a", "say b"]

    async def test_each_observation_is_in_the_format_of_its_call(self) -> None:
        async with running([Puppet()]) as toolset:
            call = '<tool_call>{"name": "puppet", "arguments": {"input": "say hi"}}</tool_call>'
            result = await one(toolset, "t", call)
            assert "<tool_response>" in result.observation
            assert "hi" in result.observation

    async def test_of_overlapping_calls_the_first_tool_wins_at_the_same_place(self) -> None:
        class Twin(Puppet):
            name = "twin"
            aliases = ("puppet",)

        for first, second in ((Puppet(), Twin()), (Twin(), Puppet())):
            async with running([first, second]) as toolset:
                await one(toolset, "t", say("x"))
                assert first.runs == ["say x"]
                assert second.runs == []

    async def test_a_tool_may_recognise_in_its_own_way(self) -> None:
        class Shout(Puppet):
            name = "shout"

            def recognise(self, action: str) -> list[Call]:
                start = action.find("!")
                if start < 0:
                    return []
                return [Call("shout", "say loud", start, start + 1, self.formats[0])]

        async with running([Shout(), Ledger()]) as toolset:
            assert "loud" in (await one(toolset, "t", "hey! <ledger>x</ledger>")).observation

    async def test_rewards_add_up_metrics_merge_and_the_last_image_stands(self) -> None:
        async with running([Puppet()]) as toolset:
            action = "".join(
                f"<puppet>{words}</puppet>" for words in ("reward 0.5", "image one", "reward 2", "image two")
            )
            result = await one(toolset, "t", action)
            assert result.reward == 2.5
            assert result.metrics == {"rewarded": 2.0}
            assert result.image == "two"

    async def test_no_call_is_invalid_and_says_which_tools_there_are(self) -> None:
        async with running([Puppet(), Ledger()]) as toolset:
            result = await one(toolset, "t", "I wonder.")
            assert not result.valid
            assert not result.done
            assert result.fault is None
            assert "puppet" in result.observation
            assert "ledger" in result.observation

    async def test_an_unknown_tool_is_named_to_the_model(self) -> None:
        async with running([Puppet()]) as toolset:
            call = '<tool_call>{"name": "pupet", "arguments": {"input": "x"}}</tool_call>'
            result = await one(toolset, "t", call)
            assert not result.valid
            assert "'pupet'" in result.observation
            assert "puppet" in result.observation

    async def test_done_if_invalid_ends_the_trajectory(self) -> None:
        ledger = Ledger()
        async with running([ledger], done_if_invalid=True) as toolset:
            await one(toolset, "t", note("a"), 0)
            assert (await one(toolset, "t", "nothing", 1)).done
            assert ledger.closed == [["a"]]

    async def test_calls_behind_one_that_ends_the_trajectory_are_not_run(self) -> None:
        puppet = Puppet()
        async with running([puppet]) as toolset:
            result = await one(toolset, "t", f"<puppet>end bye</puppet>{say('late')}")
            assert result.done
            assert puppet.runs == ["end bye"]

    async def test_tool_name_restricts_who_takes_the_action(self) -> None:
        puppet, ledger = Puppet(), Ledger()
        async with running([puppet, ledger]) as toolset:
            await one(toolset, "t", say("x") + note("y"), extra={"tool_name": "ledger"})
            assert puppet.runs == []
            wrong = await one(toolset, "t", say("x"), extra={"tool_name": "nobody"})
            assert fault_kind(wrong) is FaultKind.BAD_REQUEST
            assert "known: puppet, ledger" in wrong.fault.message  # type: ignore[union-attr]

    async def test_a_program_calls_by_json_alone_whatever_the_formats(self) -> None:
        class Fenced(Puppet):
            name = "fenced"
            aliases = ("puppet",)

        fenced, puppet = Fenced(), Puppet()
        fenced.formats = ()
        async with running([fenced, puppet]) as toolset:

            async def direct(action: str, **extra: object) -> StepResult:
                return await one(toolset, "t", action, extra={"direct_call": True, **extra})

            result = await direct('{"name": "fenced", "arguments": {"input": "say <puppet>say no</puppet>"}}')
            assert (result.observation, result.valid) == ("<puppet>say no</puppet>", True)
            assert (puppet.runs, len(fenced.runs)) == ([], 1)
            result = await direct('{"name": "puppet", "arguments": {"input": "say x"}}')
            assert len(fenced.runs) == 2
            result = await direct('{"name": "fenced", "arguments": {}}', tool_name="puppet")
            assert not result.valid
            for action in ('{"name": "nobody"}', "[1]", say("hi"), ""):
                result = await direct(action)
                assert (result.valid, result.fault, result.observation[:6]) == (False, None, "Error:")
            assert len(fenced.runs) == 2
            assert puppet.runs == []

    async def test_formats_are_told_and_a_request_may_have_calls_looked_for_in_some_of_them_only(self) -> None:
        async with running([Puppet()]) as toolset:
            [described] = toolset.describe()
            assert {"hermes", "kimi", "<puppet>"} <= set(described.formats)
            json_call = '<tool_call>{"name": "puppet", "arguments": {"input": "say a"}}</tool_call>'
            both = await one(toolset, "t", json_call + say("b"))
            assert both.observation.count("<result>") == 1
            assert both.observation.count("<tool_response>") == 1
            for format_name, mark in (("<puppet>", "<result>"), ("hermes", "<tool_response>")):
                extra = {"call_formats": [format_name, "another"]}
                some = await one(toolset, "t", json_call + say("b"), extra=extra)
                assert some.observation.strip().startswith(mark)
                assert some.observation.count("</") == 1
                none = await one(toolset, "t", "no call", extra=extra)
                assert not none.valid
                assert none.observation.strip().startswith(mark)
            for wrong in ("hermes", ["hermess"], [1]):
                result = await one(toolset, "t", json_call, extra={"call_formats": wrong})
                assert fault_kind(result) is FaultKind.BAD_REQUEST

    async def test_tool_names_lists_who_may_take_the_action(self) -> None:
        puppet, ledger = Puppet(), Ledger()
        async with running([puppet, ledger]) as toolset:
            both = await one(toolset, "t", say("x") + note("y"), extra={"tool_names": ["puppet", "ledger"]})
            assert both.valid
            assert len(puppet.runs) == 1
            refused = await one(toolset, "t", say("z"), extra={"tool_names": ["ledger"]})
            assert len(puppet.runs) == 1
            assert not refused.valid
            assert refused.invalid_reason == "unknown tool 'puppet'"
            assert "ledger (" in refused.observation
            assert "puppet (" not in refused.observation
            for wrong in (["nobody"], "ledger", [3]):
                result = await one(toolset, "t", say("x"), extra={"tool_names": wrong})
                assert fault_kind(result) is FaultKind.BAD_REQUEST

    @pytest.mark.parametrize(
        ("action", "reason"),
        [
            ("<think>hm</think> <pupet>say x</pupet>\n", "unknown tool 'pupet'"),
            ("<pupet>say x", "no tool call found"),
            ("say </pupet>", "no tool call found"),
            ("<think>so it is 3</think> 3", "no tool call found"),
        ],
    )
    async def test_an_unknown_tag_is_named(self, action: str, reason: str) -> None:
        async with running([Puppet()]) as toolset:
            result = await one(toolset, "t", action)
            assert result.invalid_reason == reason
            assert "Known tools: puppet (" in result.observation
            assert not result.valid

    async def test_a_call_that_its_tool_refuses_is_invalid_and_no_crash(self) -> None:
        class Picky(Puppet):
            async def run(self, call: Call, context: Context) -> ToolResult:
                raise InvalidCall(f"{call.input!r} is no number")

        async with running([Picky()]) as toolset:
            result = await one(toolset, "t", say("x"))
            assert result.fault is None
            assert not result.valid
            assert result.invalid_reason == "'say x' is no number"
            assert "Error: 'say x' is no number" in result.observation

    async def test_extra_data_reaches_the_tool(self) -> None:
        async with running([Puppet()]) as toolset:
            result = await one(toolset, "t", "<puppet>extra stdin</puppet>", extra={"stdin": "42"})
            assert text(result.observation) == "42"


class TestFaults:
    async def test_a_crash_is_the_fault_of_that_trajectory_alone(self, caplog: pytest.LogCaptureFixture) -> None:
        async with running([Puppet()]) as toolset:
            crash, fine = await toolset.step(
                [StepRequest("a", "<puppet>crash oh no</puppet>"), StepRequest("b", say("ok"))]
            )
            assert fault_kind(crash) is FaultKind.TOOL_CRASHED
            assert not crash.fault.retryable  # type: ignore[union-attr]
            assert crash.observation == ""
            assert text(fine.observation) == "ok"
            assert "RuntimeError: oh no" in caplog.text
            assert "Traceback" in caplog.text

    async def test_a_tool_fault_keeps_its_kind_and_its_word_on_retries(self) -> None:
        async with running([Puppet()]) as toolset:
            result = await one(toolset, "t", "<puppet>fault broken pipe</puppet>", 0)
            assert fault_kind(result) is FaultKind.SANDBOX
            assert result.fault.retryable  # type: ignore[union-attr]

    async def test_a_result_of_a_wrong_type_is_a_crash(self) -> None:
        class Careless(Puppet):
            async def run(self, call: Call, context: Context) -> ToolResult:
                return "text"  # type: ignore[return-value]

        async with running([Careless()]) as toolset:
            assert fault_kind(await one(toolset, "t", say("x"))) is FaultKind.TOOL_CRASHED

    async def test_a_recogniser_that_crashes_costs_its_own_trajectory_only(self) -> None:
        class Picky(Puppet):
            def recognise(self, action: str) -> list[Call]:
                if "poison" in action:
                    raise ValueError("poison")
                return super().recognise(action)

        async with running([Picky()]) as toolset:
            bad, good = await toolset.step([StepRequest("a", "poison"), StepRequest("b", say("ok"))])
            assert fault_kind(bad) is FaultKind.TOOL_CRASHED
            assert text(good.observation) == "ok"

    async def test_an_action_beyond_its_time_is_stopped(self) -> None:
        puppet = Puppet()
        async with running([puppet], call_timeout_seconds=0.05) as toolset:
            result = await one(toolset, "t", "<puppet>sleep 5</puppet>", 0)
            assert fault_kind(result) is FaultKind.TIMEOUT
            assert not result.fault.retryable  # type: ignore[union-attr]
            assert puppet.ended == []
            assert text((await one(toolset, "t", say("next"), 1)).observation) == "next"

    async def test_a_retryable_fault_after_earlier_calls_is_retryable_only_with_a_record(self) -> None:
        puppet = Puppet()
        action = f"{say('first')}<puppet>flaky second</puppet>"
        async with running([puppet]) as toolset:
            puppet.failures = 1
            unrecorded = await one(toolset, "a", action)
            assert not unrecorded.fault.retryable  # type: ignore[union-attr]
            puppet.failures, puppet.runs[:] = 1, []
            assert (await one(toolset, "b", action, 0)).fault.retryable  # type: ignore[union-attr]
            again = await one(toolset, "b", action, 0)
            assert again.fault is None
            assert "first" in again.observation
            assert "second" in again.observation
            assert puppet.runs == ["say first", "flaky second", "flaky second"]

    async def test_a_tool_that_cannot_start_stops_the_others_again(self) -> None:
        events: list[str] = []

        class Good(Puppet):
            async def close(self) -> None:
                events.append("closed")

        class Bad(Ledger):
            async def start(self) -> None:
                raise VerlToolError("no sandbox here")

        with pytest.raises(VerlToolError, match="no sandbox here"):
            await ToolSet([Good(), Bad()]).start()
        assert events == ["closed"]

    async def test_check_passes_on_what_a_tool_says(self) -> None:
        puppet = Puppet()
        async with running([puppet]) as toolset:
            await toolset.check()
            puppet.sick = True
            with pytest.raises(VerlToolError, match="sick"):
                await toolset.check()

    @pytest.mark.parametrize(
        ("tools", "options", "words"),
        [
            ([], {}, "no tool"),
            ([Puppet(), Puppet()], {}, "'puppet' is given twice"),
            ([Puppet()], {"state_ttl_seconds": 0}, "state_ttl_seconds is 0"),
            ([Puppet()], {"max_trajectories": 0}, "max_trajectories is 0"),
        ],
    )
    def test_wrong_options_are_named(self, tools: list[Tool], options: dict[str, float], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            ToolSet(tools, **options)  # type: ignore[arg-type]


class TestExactlyOnce:
    async def test_a_repeated_step_is_answered_from_the_record(self) -> None:
        ledger = Ledger()
        async with running([ledger]) as toolset:
            first = await one(toolset, "t", note("a"), 0)
            assert await one(toolset, "t", note("a"), 0) == first
            assert text((await one(toolset, "t", note("b"), 1)).observation) == "a,b"

    async def test_a_step_that_runs_is_waited_for(self) -> None:
        ledger = Ledger()
        async with running([ledger]) as toolset:
            results = await asyncio.gather(*(one(toolset, "t", note("a@0.05"), 0) for _ in range(5)))
            assert {text(r.observation) for r in results} == {"a"}

    async def test_the_same_step_twice_in_one_request_runs_once(self) -> None:
        puppet = Puppet()
        async with running([puppet]) as toolset:
            results = await toolset.step([StepRequest("t", say("x"), 0)] * 3)
            assert [text(r.observation) for r in results] == ["x"] * 3
            assert puppet.runs == ["say x"]

    async def test_the_same_step_with_another_action_is_refused(self) -> None:
        async with running([Puppet()]) as toolset:
            await one(toolset, "t", say("x"), 0)
            result = await one(toolset, "t", say("y"), 0)
            assert fault_kind(result) is FaultKind.BAD_REQUEST
            assert "another action" in result.fault.message  # type: ignore[union-attr]

    async def test_a_step_that_is_forgotten_is_refused_not_run(self) -> None:
        puppet = Puppet()
        async with running([puppet]) as toolset:
            for step in range(8):
                await one(toolset, "t", say(str(step)), step)
            result = await one(toolset, "t", say("0"), 0)
            assert fault_kind(result) is FaultKind.BAD_REQUEST
            assert "forgotten" in result.fault.message  # type: ignore[union-attr]
            assert len(puppet.runs) == 8

    async def test_a_caller_that_leaves_cancels_a_run_without_a_step(self) -> None:
        puppet = Puppet()
        async with running([puppet]) as toolset:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(one(toolset, "t", "<puppet>sleep 0.2</puppet>"), 0.05)
            await asyncio.sleep(0.25)
            assert puppet.ended == []
            assert not toolset._running

    async def test_a_run_with_a_step_outlives_its_caller_and_is_recorded(self) -> None:
        puppet = Puppet()
        async with running([puppet]) as toolset:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(one(toolset, "t", "<puppet>sleep 0.2</puppet>", 0), 0.05)
            assert text((await one(toolset, "t", "<puppet>sleep 0.2</puppet>", 0)).observation) == "0.2"
            assert puppet.runs == puppet.ended == ["sleep 0.2"]

    async def test_after_a_timeout_the_same_step_gets_the_answer(self) -> None:
        puppet = Puppet()
        requests = [StepRequest("slow", "<puppet>sleep 0.2</puppet>", 0), StepRequest("fast", say("x"), 0)]
        async with running([puppet]) as toolset:
            slow, fast = await toolset.step(requests, timeout_seconds=0.05)
            assert fault_kind(slow) is FaultKind.TIMEOUT
            assert slow.fault.retryable  # type: ignore[union-attr]
            assert text(fast.observation) == "x"
            assert text((await toolset.step(requests))[0].observation) == "0.2"
            assert puppet.runs.count("sleep 0.2") == 1

    async def test_records_are_bounded_in_bytes(self) -> None:
        async with running([Puppet()], max_record_bytes=20_000) as toolset:
            for i in range(50):
                await one(toolset, f"t{i}", say("x" * 1000), 0)
            assert toolset._table.record_bytes <= 20_000

    async def test_stateless_trajectories_without_steps_leave_nothing(self) -> None:
        async with running([Puppet()]) as toolset:
            await toolset.step([StepRequest(f"t{i}", say("x")) for i in range(100)])
            assert toolset.trajectories() == []

    async def test_one_trajectory_in_turn_others_at_the_same_time(self) -> None:
        loop = asyncio.get_running_loop()
        async with running([Ledger()]) as toolset:
            began = loop.time()
            await toolset.step([StepRequest(f"t{i}", note("a@0.2"), 0) for i in range(20)])
            assert loop.time() - began < 2.0  # in turn they would take 4 s
            results = await toolset.step([StepRequest("t0", note(f"{i}@0.01"), i + 1) for i in range(5)])
            assert [text(r.observation) for r in results] == ["a,0", "a,0,1", "a,0,1,2", "a,0,1,2,3", "a,0,1,2,3,4"]


class TestState:
    async def test_trajectories_do_not_see_each_other(self) -> None:
        async with running([Ledger()]) as toolset:
            for step in range(3):
                results = await toolset.step([StepRequest(f"t{i}", note(f"{i}.{step}"), step) for i in range(10)])
            for i, result in enumerate(results):
                assert text(result.observation) == ",".join(f"{i}.{step}" for step in range(3))

    async def test_a_stranger_beyond_step_0_gets_state_lost_never_fresh_state(self) -> None:
        ledger = Ledger()
        async with running([ledger]) as toolset:
            assert fault_kind(await one(toolset, "t", note("a"), 3)) is FaultKind.STATE_LOST
            assert toolset.trajectories() == []

    async def test_a_stranger_of_a_stateless_set_is_welcome_at_any_step(self) -> None:
        async with running([Puppet()]) as toolset:
            assert text((await one(toolset, "t", say("x"), 3)).observation) == "x"

    async def test_an_older_client_without_steps_keeps_its_state(self) -> None:
        async with running([Ledger()]) as toolset:
            assert text((await one(toolset, "t", note("a"))).observation) == "a"
            assert text((await one(toolset, "t", note("b"))).observation) == "a,b"

    async def test_a_trajectory_whose_first_turn_had_no_call_is_known(self) -> None:
        async with running([Ledger()]) as toolset:
            await one(toolset, "t", "thinking", 0)
            assert text((await one(toolset, "t", note("a"), 1)).observation) == "a"

    async def test_finish_frees_the_state_and_may_be_repeated(self) -> None:
        ledger = Ledger()
        async with running([ledger]) as toolset:
            await one(toolset, "t", note("a"), 0)
            for _ in range(2):
                result = await one(toolset, "t", "", finish=True)
                assert result.done
                assert result.fault is None
            assert ledger.closed == [["a"]]
            assert toolset.trajectories() == []
            assert fault_kind(await one(toolset, "t", note("b"), 1)) is FaultKind.STATE_LOST
            assert text((await one(toolset, "t", note("c"), 0)).observation) == "c"

    async def test_finish_waits_for_the_run_before_it(self) -> None:
        ledger = Ledger()
        async with running([ledger]) as toolset:
            run, finish = await toolset.step([StepRequest("t", note("a@0.05"), 0), StepRequest("t", "", finish=True)])
            assert text(run.observation) == "a"
            assert finish.done
            assert ledger.closed == [["a"]]

    async def test_a_finish_that_aborts_stops_the_run_before_it(self) -> None:
        ledger = Ledger()
        async with running([ledger]) as toolset:
            abort = StepRequest("t", "", finish=True, extra={"abort": True})
            began = time.monotonic()
            run = asyncio.create_task(toolset.step([StepRequest("t", note("a@30"), 0)]))
            await asyncio.sleep(0.05)
            (finished,) = await toolset.step([abort])
            assert finished.done
            assert time.monotonic() - began < 10
            assert fault_kind((await run)[0]) is not None
            assert ledger.closed == [[]]
            assert toolset.trajectories() == []

    async def test_a_done_trajectory_repeats_its_last_answer_and_takes_no_further_step(self) -> None:
        puppet, ledger = Puppet(), Ledger()
        async with running([puppet, ledger]) as toolset:
            await one(toolset, "t", note("a"), 0)
            last = await one(toolset, "t", "<puppet>end bye</puppet>", 1)
            assert ledger.closed == [["a"]]
            assert await one(toolset, "t", "<puppet>end bye</puppet>", 1) == last
            over = await one(toolset, "t", note("b"), 2)
            assert fault_kind(over) is FaultKind.BAD_REQUEST
            assert text((await one(toolset, "t", note("new"), 0)).observation) == "new"

    async def test_state_expires_and_is_remembered_as_lost(self) -> None:
        ledger = Ledger()
        async with running([ledger], state_ttl_seconds=0.1) as toolset:
            await one(toolset, "t", note("a"))
            await until(lambda: ledger.closed == [["a"]])
            assert (toolset.trajectories(), toolset.knows("t")) == ([], True)
            lost = await one(toolset, "t", note("b"))
            assert fault_kind(lost) is FaultKind.STATE_LOST
            assert "idle" in lost.fault.message  # type: ignore[union-attr]

    async def test_a_busy_trajectory_does_not_expire(self) -> None:
        async with running([Ledger()], state_ttl_seconds=0.05) as toolset:
            assert text((await one(toolset, "t", note("a@0.3"), 0)).observation) == "a"

    async def test_the_longest_idle_one_gives_way_and_gets_state_lost(self) -> None:
        ledger = Ledger()
        async with running([ledger], max_trajectories=3) as toolset:
            for i in range(4):
                await one(toolset, f"t{i}", note("a"), 0)
            assert toolset.trajectories() == ["t1", "t2", "t3"]
            lost = await one(toolset, "t0", note("b"))
            assert fault_kind(lost) is FaultKind.STATE_LOST
            assert "3 trajectories" in lost.fault.message  # type: ignore[union-attr]
            await until(lambda: len(ledger.closed) == 1)

    async def test_when_all_are_busy_another_is_told_to_come_later(self) -> None:
        async with running([Ledger()], max_trajectories=2) as toolset:
            results = await toolset.step([StepRequest(f"t{i}", note("a@0.05"), 0) for i in range(3)])
            assert [fault_kind(r) for r in results] == [None, None, FaultKind.OVERLOADED]
            assert results[2].fault.retryable  # type: ignore[union-attr]

    async def test_records_of_a_stateless_set_expire(self) -> None:
        async with running([Puppet()], record_ttl_seconds=0.05) as toolset:
            await one(toolset, "t", say("x"), 0)
            assert toolset.trajectories() == ["t"]
            await until(lambda: toolset.trajectories() == [])
            assert toolset._table.record_bytes == 0

    async def test_a_state_that_cannot_be_closed_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        class Stubborn(Ledger):
            async def close_state(self, state: list[str]) -> None:
                raise OSError("stuck")

        async with running([Stubborn()]) as toolset:
            await one(toolset, "t", note("a"), 0)
            assert (await one(toolset, "t", "", finish=True)).done
            assert "stuck" in caplog.text

    async def test_closing_frees_all_states_and_refuses_new_work(self) -> None:
        ledger = Ledger()
        toolset = ToolSet([ledger])
        await toolset.start()
        await toolset.step([StepRequest(f"t{i}", note("a"), 0) for i in range(3)])
        long = asyncio.create_task(one(toolset, "t9", note("b@30"), 0))
        await asyncio.sleep(0.05)
        await toolset.close(grace_seconds=0.05)
        assert ledger.closed.count(["a"]) == 3
        assert fault_kind(await long) is FaultKind.SHUTTING_DOWN
        assert fault_kind(await one(toolset, "t", note("a"), 0)) is FaultKind.SHUTTING_DOWN


class TestAdmission:
    async def test_no_more_run_at_a_time_than_there_are_places(self) -> None:
        most = 0
        admission = Admission(max_running=3, max_queued=100)

        class Watcher(Puppet):
            async def run(self, call: Call, context: Context) -> ToolResult:
                nonlocal most
                most = max(most, admission.running)
                await asyncio.sleep(0.01)
                return ToolResult()

        async with running([Watcher()]) as toolset:
            await toolset.step([StepRequest(f"t{i}", say("x")) for i in range(20)], admission=admission)
        assert most == 3
        assert admission.running == admission.waiting("puppet") == 0

    def test_the_door_is_shut_at_the_limit(self) -> None:
        admission = Admission(max_running=2, max_queued=3)
        assert admission.admit(5)
        assert not admission.admit(1)
        admission.release(2)
        assert admission.admit(2)
        assert admission.queued == 5

    async def test_a_waiter_that_is_cancelled_leaves_its_place_to_others(self) -> None:
        admission = Admission(max_running=1, max_queued=10)
        async with running([Puppet()]) as toolset:
            blocker = asyncio.create_task(
                toolset.step([StepRequest("a", "<puppet>sleep 0.1</puppet>")], admission=admission)
            )
            await asyncio.sleep(0.02)
            waiter = asyncio.create_task(toolset.step([StepRequest("b", say("x"))], admission=admission))
            await asyncio.sleep(0.02)
            assert admission.waiting("puppet") == 1
            waiter.cancel()
            await asyncio.gather(blocker, waiter, return_exceptions=True)
            (result,) = await toolset.step([StepRequest("c", say("y"))], admission=admission)
            assert text(result.observation) == "y"


class TestQueue:
    async def test_who_waits_in_a_queue_keeps_its_place_and_runs_once(self) -> None:
        tool = Crowded()
        async with running([tool]) as toolset:
            first = asyncio.create_task(one(toolset, "a", "<crowded>sleep 1.5</crowded>", 0))
            await asyncio.sleep(0.05)
            request = StepRequest("b", "<crowded>say hi</crowded>", 0)
            refusals = 0
            while True:
                [result] = await toolset.step([request], timeout_seconds=30, hold_seconds=0.2)
                if result.fault is None:
                    break
                assert (result.fault.kind, result.fault.retryable) == (FaultKind.QUEUED, True)
                refusals += 1
            assert text(result.observation) == "hi"
            assert refusals >= 3
            assert tool.runs == ["sleep 1.5", "say hi"]
            assert (await first).fault is None

    async def test_what_runs_is_waited_for_and_what_has_no_number_too(self) -> None:
        async with running([Crowded()]) as toolset:
            action = "<crowded>sleep 0.5</crowded>"
            requests = [StepRequest("a", action, 0), StepRequest("b", action)]
            results = await toolset.step(requests, timeout_seconds=30, hold_seconds=0.05)
            assert [result.fault for result in results] == [None, None]

    async def test_the_wait_is_not_part_of_the_time_of_a_call(self) -> None:
        async with running([Crowded()], call_timeout_seconds=0.8) as toolset:
            slow = [one(toolset, f"t{i}", "<crowded>sleep 0.4</crowded>", 0) for i in range(4)]
            assert [fault_kind(result) for result in await asyncio.gather(*slow)] == [None] * 4
            late = await one(toolset, "late", "<crowded>sleep 5</crowded>", 0)
            assert fault_kind(late) is FaultKind.TIMEOUT

    async def test_a_run_that_nobody_requests_again_is_ended_in_the_queue(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tool = Crowded()
        async with running([tool]) as toolset:
            first = asyncio.create_task(one(toolset, "a", "<crowded>sleep 1.5</crowded>", 0))
            await asyncio.sleep(0.05)
            requests = {
                name: StepRequest(name, f"<crowded>say {name}</crowded>", 0) for name in ("left", "finished", "held")
            }
            for request in requests.values():
                [result] = await toolset.step([request], timeout_seconds=30, hold_seconds=0.1)
                assert fault_kind(result) is FaultKind.QUEUED
            held = asyncio.create_task(toolset.step([requests["held"]], timeout_seconds=30))
            await asyncio.sleep(0)
            await one(toolset, "finished", "", finish=True)
            monkeypatch.setattr(toolset_module, "_ABANDONED_SECONDS", 0.0)
            toolset.sweep()
            assert [result.fault for result in await held] == [None]
            assert (await first).fault is None
            assert tool.runs == ["sleep 1.5", "say held"]
            again = await one(toolset, "left", "<crowded>say left</crowded>", 0)
            assert text(again.observation) == "left"
