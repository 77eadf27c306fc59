"""The reward managers as verl calls them: `run_single` on a row of a real `DataProto`."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("verl.protocol")

from graded_rows import CodePoints, config, data, manager, scored, trajectory
from omegaconf import OmegaConf
from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
from verl.trainer.ppo.reward import load_reward_manager

from verl_tool.agent_loop.trajectory import (
    RAISES_ON_EMPTY,
    Author,
    CallRecord,
    RowContext,
    Segment,
    StopReason,
    Trajectory,
)
from verl_tool.agent_workers.reward_manager import registry
from verl_tool.agent_workers.reward_manager.base import POLICY_INDUCED, REWARD_FAULT, GradingRewardManager, options_in
from verl_tool.agent_workers.reward_manager.grade import Grade, GraderFault
from verl_tool.agent_workers.reward_manager.grading.code_grader import suite_of
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.agent_workers.reward_manager.gsm8k import Gsm8kOptions
from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import Fault, FaultKind
from verl_tool.verification import Verdict

pytestmark = pytest.mark.slow

registry.register_all()
in_module_loop = pytest.mark.asyncio(loop_scope="module")


def test_all_are_registered_under_their_names() -> None:
    for name in registry.NAMES:
        assert get_reward_manager_cls(name).__module__.endswith(f".{name}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so\n#### 90,000", 1.0),
        ("\\boxed{90000}", 1.0),
        ("it is 90000", 0.0),
        ("#### 9", 0.0),
        ("####", 0.0),
        ("", 0.0),
        ("#### 90000 dollars", 1.0),
        ("#### 90000 or 90001", 0.0),
        ("#### 90_000", 0.0),
        ("#### 9,0000", 0.0),
        ("\\boxed{90000, 90001}", 0.0),
        ("\\boxed{90001} or \\boxed{90000}", 0.0),
    ],
)
async def test_gsm8k(text: str, expected: float) -> None:
    assert await scored(manager("gsm8k"), text or "\0", "90000") == expected


async def test_gsm8k_flexible() -> None:
    assert await scored(manager("gsm8k", flexible=True), "it is $90,000.", "90000") == 1.0


async def test_calculator() -> None:
    assert await scored(manager("calculator"), "Result=10.10<submit>", "10.1") == 1.0
    assert await scored(manager("calculator"), "Result=10.2<submit>", "10.1") == 0.0
    assert await scored(manager("calculator"), "10.1", "10.1") == 0.0


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        ("<answer>The Danube!</answer>", '["Danube", "Danube River"]', 1.0),
        ("<answer>danube  river</answer>", {"target": np.array(["Danube River"], dtype=object)}, 1.0),
        ("<answer>Rhine</answer>", ["Danube"], 0.0),
        ("Danube", ["Danube"], 0.0),
        ("<answer>Danube</answer> <answer>Rhine</answer>", "Danube", 0.0),
        ("<answer></answer>", ["The A"], 0.0),
        ("<answer>an</answer>", ["The A"], 0.0),
        ("<answer>the a</answer>", ["The A"], 1.0),
        ("<answer>7,2</answer>", ["72"], 0.0),
        ("<answer>7.2</answer>", ["72"], 0.0),
        ("<answer>-72</answer>", ["72"], 0.0),
        ("<answer>1,234!</answer>", ["1234"], 1.0),
        ("<answer>Danube, Rhine</answer>", ["Danube"], 0.0),
    ],
)
async def test_search(text: str, gold: Any, expected: float) -> None:
    assert await scored(manager("search_r1_qa_em"), text, gold) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("94*4 - 61 - 6", 1.0),
        ("(94*4) - (61 + 6)", 1.0),
        ("309", 0.0),
        ("94*4 - 67", 0.0),
        ("94*4 - 61 - 6 + 4 - 4", 0.0),
        ("__import__('os').getpid()", 0.0),
        ("9**9**9**9", 0.0),
        ("94/0", 0.0),
        ("(" * 400, 0.0),
    ],
)
async def test_countdown(expression: str, expected: float) -> None:
    gold = json.dumps({"numbers": [6, 61, 94, 4], "target": 309})
    row = {"data_source": "reasoning_gym/countdown"}
    assert await scored(manager("reasoning_gym"), f"\\boxed{{{expression}}}", gold, **row) == expected


async def test_reasoning_gym() -> None:
    assert await scored(manager("reasoning_gym"), "\\boxed{-4.0}", "-4", data_source="reasoning_gym/chain_sum") == 1.0
    assert await scored(manager("reasoning_gym"), "\\boxed{Yes}", "yes", data_source="reasoning_gym/any") == 1.0


def fault(kind: FaultKind) -> Fault:
    return Fault(kind=kind, message="because", retryable=False)


@pytest.mark.parametrize(
    ("left", "score", "acc", "verified"),
    [
        ({"verdict": Verdict(1.0, "fine", {"style": 0.5})}, 1.0, 1.0, 1.0),
        ({"verdict": Verdict(0.75)}, 0.75, 0.0, 1.0),
        ({"verdict": Verdict(0.0, "wrote no reward")}, 0.0, 0.0, 1.0),
        ({"verdict": Verdict(1e9)}, 0.0, 0.0, 0.0),
        ({"verdict": Verdict(-1.0)}, 0.0, 0.0, 0.0),
        ({"verdict": Verdict(fault=fault(FaultKind.TOOL_CRASHED))}, 0.0, 0.0, 0.0),
        ({"fault": fault(FaultKind.TIMEOUT), "stop": StopReason.FAULT}, 0.0, 0.0, 0.0),
    ],
)
async def test_terminal(left: dict[str, Any], score: float, acc: float, verified: float) -> None:
    result = await manager("terminal").run_single(data(trajectory(("model", "Reward: 1.0"), **left), "gold"))
    told = result["reward_extra_info"]
    assert (result["reward_score"], told["acc"], told["verified"]) == (score, acc, verified)
    assert told["reward_fault"] == ""


@pytest.mark.parametrize(
    ("left", "why"),
    [
        ({}, "the trajectory was not verified"),
        ({"verdict": Verdict(fault=fault(FaultKind.STATE_LOST))}, "the verifier was not run: state_lost: because"),
        ({"verdict": Verdict(fault=fault(FaultKind.SANDBOX))}, "the verifier was not run: sandbox"),
        ({"verdict": Verdict(fault=fault(FaultKind.BAD_REQUEST))}, "the verifier was not run: bad_request"),
        ({"verdict": Verdict(fault=fault(FaultKind.TIMEOUT))}, "the verifier was not run: timeout: because"),
    ],
)
async def test_terminal_gives_no_reward_where_nothing_was_verified(left: dict[str, Any], why: str) -> None:
    result = await manager("terminal").run_single(data(trajectory(("model", "done"), **left), "gold"))
    assert why in result["reward_extra_info"]["reward_fault"]


def judged(reward: float | None, done: bool = True, whole: bool = False, **more: Any) -> Verdict:
    numbers = {"env_steps": 3.0, "env_invalid_steps": 1.0, "env_done": float(done), "env_judged": float(whole)}
    return Verdict(reward, numbers=numbers, by_environment=True, **more)


@pytest.mark.parametrize(
    ("left", "options", "score", "acc"),
    [
        ({"verdict": judged(1.0)}, {}, 1.0, 1.0),
        ({"verdict": judged(-2.5)}, {"scale": 2.0}, -5.0, 0.0),
        ({"verdict": judged(12.0)}, {"right_from": 20.0}, 12.0, 0.0),
        ({"verdict": judged(1.0)}, {"rewards": "steps"}, 0.0, 0.0),
        ({"verdict": judged(0.0, done=False)}, {}, 0.0, 0.0),
        ({"verdict": judged(1.0, done=False)}, {"unfinished_reward": -1.0, "scale": 2.0}, -1.0, 0.0),
        ({"verdict": judged(1.0, done=False)}, {"unfinished_reward": -1.0, "rewards": "steps"}, -1.0, 0.0),
        ({"verdict": judged(1.0)}, {"unfinished_reward": -1.0}, 1.0, 1.0),
        ({"verdict": judged(1.0, done=False, whole=True)}, {"unfinished_reward": -1.0}, 1.0, 1.0),
        (
            {"verdict": judged(1.0, done=False, whole=True), "stop": StopReason.MAX_TURNS},
            {"unfinished_reward": -1.0},
            -1.0,
            0.0,
        ),
        # A record of an earlier version, which did not say whether it ended.
        ({"verdict": Verdict(1.0, by_environment=True)}, {"unfinished_reward": -1.0}, 1.0, 1.0),
        ({"verdict": judged(None, fault=fault(FaultKind.TOOL_CRASHED))}, {"fault_reward": -1.0}, -1.0, 0.0),
        ({"fault": fault(FaultKind.TIMEOUT), "stop": StopReason.FAULT}, {"fault_reward": -1.0}, -1.0, 0.0),
    ],
)
async def test_environment(left: dict[str, Any], options: dict[str, Any], score: float, acc: float) -> None:
    sample = data(trajectory(("model", "Reward: 1.0"), **left), "gold")
    result = await manager("environment", **options).run_single(sample)
    info = result["reward_extra_info"]
    assert (result["reward_score"], info["acc"], info["reward_fault"]) == (score, acc, "")


@pytest.mark.parametrize(
    ("left", "why"),
    [
        ({}, "no environment judged the trajectory"),
        ({"verdict": judged(None, fault=fault(FaultKind.STATE_LOST))}, "gave no verdict: state_lost: because"),
        ({"verdict": judged(None, fault=fault(FaultKind.TIMEOUT))}, "gave no verdict: timeout: because"),
    ],
)
async def test_environment_gives_no_reward_without_a_verdict(left: dict[str, Any], why: str) -> None:
    result = await manager("environment").run_single(data(trajectory(("model", "done"), **left), "gold"))
    assert why in result["reward_extra_info"]["reward_fault"]


async def test_terminal_may_take_less_than_all_for_right() -> None:
    of = trajectory(("model", "done"), verdict=Verdict(0.75))
    result = await manager("terminal", right_from=0.7).run_single(data(of, "gold"))
    assert (result["reward_score"], result["reward_extra_info"]["acc"]) == (0.75, 1.0)


TOOL_ANSWERS = {
    "gsm8k": ("#### 5", "5"),
    "calculator": ("Result=5<submit>", "5"),
    "search_r1_qa_em": ("<answer>5</answer>", '["5"]'),
    "reasoning_gym": ("\\boxed{5}", "5"),
    "torl": ("\\boxed{5}", "5"),
    "acecoder": ("```python\nx = 5\n```", '["assert x == 5"]'),
}


@pytest.mark.parametrize("name", TOOL_ANSWERS)
async def test_what_a_tool_wrote_is_no_answer(name: str) -> None:
    """The right answer, but in the tool's output, before or behind the model's words."""
    answer, gold = TOOL_ANSWERS[name]
    of = manager(name, **({"server_url": "http://127.0.0.1:9"} if name == "acecoder" else {}))
    for pairs in ((("tool", answer), ("model", "Fine.")), (("model", "Fine. "), ("tool", answer))):
        result = await of.run_single(data(trajectory(*pairs), gold))
        assert result["reward_extra_info"]["reward_fault"] == ""
        assert result["reward_extra_info"]["acc"] == 0.0
        assert result["reward_score"] <= 0.0


async def test_an_answer_may_not_be_put_together_from_the_models_words_and_the_tools() -> None:
    parts = (("model", "<answer>"), ("tool", "5"), ("model", "</answer>"))
    result = await manager("search_r1_qa_em").run_single(data(trajectory(*parts), '["5"]'))
    assert result["reward_score"] == 0.0


async def test_a_trajectory_without_record_is_told_apart_by_its_mask() -> None:
    ids = list(map(ord, "#### 5x"))
    row = {"ids": ids, "__num_turns__": 4}
    by_tool = await manager("gsm8k").run_single(data(None, "5", mask=[0] * 6 + [1], **dict(row)))
    by_model = await manager("gsm8k").run_single(data(None, "5", mask=[1] * 6 + [0], **dict(row)))
    assert (by_tool["reward_score"], by_model["reward_score"]) == (0.0, 1.0)
    with pytest.raises(ConfigError, match="without its record"):
        await manager("gsm8k").run_single(data(None, "5", **dict(row)))
    assert (await manager("gsm8k").run_single(data(None, "5", ids=ids[:-1])))["reward_score"] == 1.0


async def test_a_foreign_loop_may_give_its_record_as_json() -> None:
    told = trajectory(("tool", "#### 5"), ("model", "#### 6"))
    row = data(told, "5", tool_extra_fields={"trajectory": told.to_json()})
    assert (await manager("gsm8k").run_single(row))["reward_score"] == 0.0


async def test_a_faulted_trajectory_is_not_graded() -> None:
    fault = Fault(kind=FaultKind.UNREACHABLE, message="no server", retryable=True)
    of = trajectory(("model", "#### 5"), fault=fault, stop=StopReason.FAULT)
    shaping = {"tool_used": {"weight": 1.0}}
    result = await manager("gsm8k", shaping=shaping).run_single(data(of, "5"))
    told = result["reward_extra_info"]
    assert told["reward_fault"] == "trajectory: unreachable"
    assert math.isnan(told["acc"])
    good = await manager("gsm8k", shaping=shaping).run_single(data(trajectory(("model", "#### 5")), "5"))
    assert set(good["reward_extra_info"]) == set(told)


async def test_shaping_is_added_and_told() -> None:
    calls = (CallRecord(step=0, action="a"), CallRecord(step=1, action="b", valid=False))
    of = trajectory(("model", "#### 5"), calls=calls)
    shaping = {"tool_valid": {"weight": 0.5}, "turns": {"weight": -0.2, "limit": 4}}
    result = await manager("gsm8k", shaping=shaping).run_single(data(of, "5"))
    assert result["reward_score"] == pytest.approx(1.0 + 0.25 - 0.1)
    told = result["reward_extra_info"]
    assert (told["acc"], told["base_score"]) == (1.0, 1.0)
    assert (told["shaping/tool_valid"], told["shaping/turns"]) == (0.25, pytest.approx(-0.1))


class _Crashing(GradingRewardManager[Any]):
    """A grader with a bug, one that fails, and one that hangs, as the ground truth says."""

    async def grade(self, sample: Sample) -> Grade:
        if sample.ground_truth == "bug":
            return Grade(1 / 0, True)
        if sample.ground_truth == "fault":
            raise GraderFault("the server is gone")
        if sample.ground_truth == "network":
            try:
                raise ConnectionResetError("by peer")
            except ConnectionError as error:
                raise RuntimeError("the judge is away") from error
        await asyncio.sleep(60)
        return Grade(1.0, True)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("bug", "ZeroDivisionError"),
        ("fault", "the server is gone"),
        ("hang", "no end within 0.2 s"),
        ("network", "the judge is away"),
    ],
)
async def test_a_grader_that_fails_makes_a_fault_and_no_score(how: str, why: str) -> None:
    of = _Crashing(config("x", timeout_seconds=0.2), CodePoints())
    result = await of.run_single(data(trajectory(("model", "x")), how))
    assert why in result["reward_extra_info"]["reward_fault"]
    assert (RAISES_ON_EMPTY in result["reward_extra_info"]["reward_fault"]) == (how == "bug")
    assert math.isnan(result["reward_extra_info"]["base_score"])


class _ByRows(GradingRewardManager[Any]):
    """As many rewards of rows as the ground truth says."""

    by_rows = True

    async def grade(self, sample: Sample) -> Grade:
        return Grade(1.0, True, row_rewards=(0.25,) * int(sample.ground_truth))


async def test_rewards_of_rows_are_in_the_score() -> None:
    cut = (Segment(Author.PROMPT, (1,)), Segment(Author.MODEL, (2,)), Segment(Author.MODEL, (3,), row=1))
    of = Trajectory("t", cut, StopReason.ANSWERED, contexts=(RowContext((4,), "summarise"),))
    graded = _ByRows(config("x"), CodePoints())
    result = await graded.run_single(data(of, "2"))
    assert (result["reward_score"], result["reward_extra_info"]["row_rewards"]) == (1.5, "[0.25, 0.25]")
    assert (await graded.run_single(data(of, "0")))["reward_score"] == 1.0
    told = (await graded.run_single(data(of, "3")))["reward_extra_info"]
    assert "3 rewards of rows, and the rollout has 2 rows" in told["reward_fault"]
    assert told["row_rewards"] == "[]"


async def test_a_row_with_a_useless_ground_truth_is_a_fault() -> None:
    result = await manager("gsm8k").run_single(data(trajectory(("model", "#### 5")), "five"))
    assert "'five' is not a number" in result["reward_extra_info"]["reward_fault"]


def test_wrong_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"reward\.reward_kwargs\.flexibel.*known options.*flexible"):
        manager("gsm8k", flexibel=True)
    with pytest.raises(ConfigError, match=r"reward_kwargs\.shaping\.turns\.limit"):
        manager("gsm8k", shaping={"turns": {"weight": 1}})
    with pytest.raises(ConfigError, match="tool_server_url"):
        manager("acecoder")


def test_a_users_own_manager_loads_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl_tool.agent_workers.reward_manager.base import POLICY_INDUCED, REWARD_FAULT, GradingRewardManager\n"
        "from verl_tool.agent_workers.reward_manager.grade import Grade\n"
        "class Mine(GradingRewardManager):\n"
        "    async def grade(self, sample):\n"
        "        return Grade(len(sample.text), True)\n"
    )
    own = OmegaConf.create(
        {"reward": {"reward_manager": {"source": "importlib", "name": "Mine", "module": {"path": str(file)}}}}
    )
    loaded = load_reward_manager(own, CodePoints())
    assert type(loaded).__name__ == "Mine"


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        (r"\boxed{7} or \boxed{8}", "8", -1.0),
        (r"\boxed{7}. \boxed{8}", "8", -1.0),
        (r"\boxed{0.5} \boxed{\frac12}", r"\frac12", 1.0),
        (r"\boxed{7}, \boxed{8}", "7, 8", 1.0),
        (r"\(\boxed{1}\) and \(\boxed{2}\)", "1,2", 1.0),
        (r"\boxed{2} \quad \boxed{1}", "1,2", 1.0),
        (r"\boxed{2} and \boxed{-2}", r"\pm 2", 1.0),
        (r"\boxed{2} and \boxed{2}", r"\pm 2", -1.0),
        (r"\boxed{\frac{1}{2}} or \boxed{0.5}", r"\frac12", 1.0),
        (r"\boxed {5}", "5", 1.0),
        (r"\fbox{5}", "5", 1.0),
    ],
)
async def test_several_boxes_are_one_answer(text: str, gold: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    torl = manager("torl")
    try:
        assert await scored(torl, text, gold) == expected
    finally:
        await torl._judge.close()  # type: ignore[attr-defined]


async def test_torl() -> None:
    pytest.importorskip("math_verify")
    torl = manager("torl", code_error_penalty=-0.5)
    try:
        assert await scored(torl, "so \\boxed{0.5}", r"\frac{1}{2}") == 1.0
        assert await scored(torl, "so \\boxed{0.4}", r"\boxed{\frac{1}{2}}") == -1.0
        assert await scored(torl, "one half", "0.5") == -1.0
        failed = CallRecord(step=0, action="a", observation="Traceback (most recent call last): no")
        of = trajectory(("model", "\\boxed{7}"), calls=(failed,))
        assert (await torl.run_single(data(of, "7")))["reward_score"] == 0.5
    finally:
        await torl._judge.close()  # type: ignore[attr-defined]


ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = json.dumps({"tests": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]})


@in_module_loop
async def test_acecoder(code_server_url: str) -> None:
    code = manager("acecoder", server_url=code_server_url)
    share = manager("acecoder", server_url=f"{code_server_url}/run_code", binary=False, wrong=0.0)
    mutant = ADD.replace("a + b", "a * b")
    try:
        assert await scored(code, f"Like this:\n{ADD}", TESTS) == 1.0
        assert await scored(code, mutant, TESTS) == -1.0
        assert await scored(share, mutant, TESTS) == pytest.approx(1 / 3)
        assert await scored(share, "no code", TESTS) == 0.0
        programs = json.dumps({"programs": [["1 2", "3"]]})
        assert await scored(code, "```python\nprint(sum(map(int, input().split())))\n```", programs) == 1.0
        result = await code.run_single(data(trajectory(("model", ADD)), TESTS))
        assert result["reward_extra_info"]["pass_rate"] == 1.0
        assert result["reward_extra_info"]["tests"] == 3
    finally:
        await code._grader.close()  # type: ignore[attr-defined]
        await share._grader.close()  # type: ignore[attr-defined]


@in_module_loop
async def test_slow_solutions_spoil_no_other(code_server_url: str) -> None:
    """The one that waits behind them is graded as if it were alone, though its turn comes after `timeout_seconds`."""
    options = {"max_connections": 1, "timeout_seconds": 1.5, "test_seconds": 1.0, "total_seconds": 1.0}
    code = manager("acecoder", server_url=code_server_url, **options)
    slow = "```python\ndef add(a, b):\n    while True: pass\n```"
    few = json.dumps({"tests": ["assert add(1, 2) == 3"]})
    try:
        rows = [data(trajectory(("model", text)), few) for text in (slow, slow, slow, ADD)]
        results = await asyncio.gather(*map(code.run_single, rows))
        assert [result["reward_score"] for result in results] == [-1.0, -1.0, -1.0, 1.0]
        assert {result["reward_extra_info"][key] for result in results for key in (REWARD_FAULT, POLICY_INDUCED)} == {
            ""
        }
    finally:
        await code._grader.close()  # type: ignore[attr-defined]


async def test_a_server_without_a_place_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    async def full(self: ToolClient, *_: Any, **__: Any) -> None:
        asked.append(1)
        await asyncio.sleep(0.02)
        raise ToolFault(FaultKind.OVERLOADED, "no answer within 300 s", retryable=True)

    monkeypatch.setattr(ToolClient, "run_code", full)
    code = manager("acecoder", server_url="http://127.0.0.1:9", queue_seconds=0.1)
    result = await code.run_single(data(trajectory(("model", ADD)), TESTS))
    assert "no answer within 300 s" in result["reward_extra_info"][REWARD_FAULT]
    assert len(asked) > 2


@in_module_loop
async def test_mathcoder_grades_as_the_row_says(code_server_url: str) -> None:
    pytest.importorskip("math_verify")
    both = manager("mathcoder", server_url=code_server_url, wrong=0.0)
    try:
        assert await scored(both, ADD, TESTS, ability="code") == 1.0
        assert await scored(both, "\\boxed{7}", "7", ability="math") == 1.0
        result = await both.run_single(data(trajectory(("model", "x")), "7", ability="poetry"))
        assert "known: code, math" in result["reward_extra_info"]["reward_fault"]
    finally:
        await both._code.close()  # type: ignore[attr-defined]
        await both._math.close()  # type: ignore[attr-defined]


async def test_no_server_is_a_fault() -> None:
    code = manager("acecoder", server_url="http://127.0.0.1:9", timeout_seconds=5, total_seconds=1)
    try:
        result = await code.run_single(data(trajectory(("model", ADD)), TESTS))
    finally:
        await code._grader.close()  # type: ignore[attr-defined]
    assert result["reward_extra_info"]["reward_fault"].startswith("grader: ")
    assert math.isnan(result["reward_extra_info"]["acc"])


def test_suites_of_all_kinds_of_rows() -> None:
    asserts = ["assert a", "assert b"]
    for ground_truth, extra in (
        (json.dumps(asserts), {}),
        (np.array(asserts, dtype=object), {}),
        (json.dumps({"tests": asserts}), {}),
        ("", {"test_cases": asserts}),
    ):
        assert suite_of(ground_truth, extra, 64).tests == ("assert a", "assert b")
    pairs = {"inputs": ["1", "2"], "outputs": ["3", "4"]}
    assert suite_of("", {"inputs_outputs": json.dumps(pairs)}, 64).programs == (("1", "3"), ("2", "4"))
    assert len(suite_of(json.dumps({"tests": asserts, "programs": [["1", "2"]]}), {}, 2)) == 2
    with pytest.raises(ValueError, match="no test"):
        suite_of("", {}, 64)


def test_an_option_may_refer_to_another_part_of_the_config() -> None:
    config = OmegaConf.create({"recipe": {"right": 3.0}, "reward": {"reward_kwargs": {"right": "${recipe.right}"}}})
    assert options_in(config, Gsm8kOptions, "gsm8k").right == 3.0
