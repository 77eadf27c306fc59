"""Grade code by running a suite of tests on a solution, with the tool server's `/run_code`."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig
from pydantic import Field

from verl_tool.agent_workers.reward_manager.base import RewardOptions
from verl_tool.agent_workers.reward_manager.grade import Grade, GraderFault
from verl_tool.agent_workers.reward_manager.grading.answers import last_code_block
from verl_tool.agent_workers.reward_manager.grading.sample import Sample
from verl_tool.client import ToolClient
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.judge.code_tests import START_SECONDS, JudgeRun, NoVerdict, TestSuite, Verdicts, suite_in
from verl_tool.protocol import FaultKind
from verl_tool.sandbox_fusion import RunCodeResponse

MAX_STORED = 1024
"""Maximum number of solutions whose verdicts are stored."""
DETAILS = ("pass_rate", "tests", "time_outs", "refused", "no_code", "judge_protected")


class CodeOptions(RewardOptions):
    server_url: str | None = None
    """URL of the tool server. Defaults to ``actor_rollout_ref.agent.tool_server_url``, then to
    ``reward.sandbox_fusion.url``."""
    api_key: str | None = None
    binary: bool = True
    """If true, the score is `right` if all tests pass, and otherwise `wrong`. If false, it is the share of passed tests
    times `right`."""
    published: bool = True
    """If false (and `binary` too), the share of passed tests is scaled to the range from `wrong` to `right`."""
    right: float = 1.0
    wrong: float = -1.0
    test_seconds: float = Field(4.0, gt=0)
    """Time limit of one test."""
    total_seconds: float = Field(20.0, gt=0)
    """Time limit of all tests of one solution, including the start. The server's limit of a run must be as high."""
    max_tests: int = Field(64, ge=1)
    """Maximum number of tests of one row. Further ones are left out."""
    max_code_chars: int = Field(100_000, ge=1)
    """Maximum length of a solution. A longer one is wrong and not run."""
    strict: bool = False
    """For rows with programs or called functions: make no imports before the solution, keep Python's recursion limit,
    and require of a program exit code 0 and the exact output, except for white space at the ends of lines."""
    judge_equal_once: bool = True
    """Judge equal solutions of one problem, which are common in a group of samples, only once. Set it to false for
    solutions that are right by chance."""
    max_connections: int = Field(64, ge=1)
    """Maximum number of concurrent runs of one reward worker."""
    queue_seconds: float = Field(600.0, gt=0)
    """Time to wait for a slot at the server, after which the run is a fault. It does not count towards the time limits
    of the run, so that slow solutions do not affect others. `timeout_seconds` has no effect on code."""


class CodeGrader:
    """Runs tests on the last code block that the model wrote."""

    def __init__(self, options: CodeOptions, url: str) -> None:
        self._options = options
        self._url = url
        self._client: ToolClient | None = None
        self._places = asyncio.Semaphore(options.max_connections)
        self._judged: OrderedDict[tuple[str, TestSuite], asyncio.Future[Verdicts]] = OrderedDict()

    async def grade(self, sample: Sample) -> Grade:
        options = self._options
        suite = suite_of(sample.ground_truth, sample.extra_info, options.max_tests, options.strict)
        code = last_code_block(sample.turns)
        if code is None or not code.strip() or len(code) > options.max_code_chars:
            details = {"pass_rate": 0.0, "tests": len(suite), "no_code": 1.0}
            return Grade(options.wrong if options.binary or not options.published else 0.0, False, details)
        verdicts = await self.judge(code, suite)
        return self._grade_of(verdicts)

    async def judge(self, code: str, suite: TestSuite) -> Verdicts:
        """Judge a solution, or return the stored verdicts of an equal one. Raises GraderFault."""
        if not self._options.judge_equal_once:
            return await self._judge(code, suite)
        key = (code, suite)
        found = self._judged.get(key)
        if found is not None:
            # A fault or a cancellation of the first request is not shared: this solution is then judged by itself.
            try:
                return await asyncio.shield(found)
            except GraderFault:
                pass
            except asyncio.CancelledError:
                if not found.cancelled():
                    raise
            return await self._judge(code, suite)
        return await self._judge_first(key)

    async def _judge_first(self, key: tuple[str, TestSuite]) -> Verdicts:
        """Judge a solution, and store the verdicts for equal ones. Raises GraderFault."""
        task = self._judged[key] = asyncio.ensure_future(self._judge(*key))
        if len(self._judged) > MAX_STORED:
            self._judged.popitem(last=False)
        try:
            return await task
        except BaseException:
            self._judged.pop(key, None)
            raise

    async def _judge(self, code: str, suite: TestSuite) -> Verdicts:
        run = JudgeRun.of(code, suite, self._options.test_seconds, self._options.total_seconds)
        try:
            async with self._places:
                return run.verdicts(await self._run(run))
        except (ToolFault, NoVerdict) as fault:
            raise GraderFault(str(fault)) from fault

    async def _run(self, run: JudgeRun) -> RunCodeResponse:
        """Return the server's answer. Repeats the request while the server is overloaded. Raises ToolFault."""
        now = asyncio.get_running_loop().time
        ends = now() + self._options.queue_seconds
        while True:
            try:
                return await self._connect().run_code(
                    run.code, stdin=run.stdin, run_timeout=run.run_timeout, files=run.files
                )
            except ToolFault as fault:
                if fault.kind is not FaultKind.OVERLOADED or now() > ends:
                    raise

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _connect(self) -> ToolClient:
        """Make the client at its first use, since it belongs to the event loop in which it is used."""
        if self._client is None:
            options = self._options
            seconds = options.queue_seconds + options.total_seconds + START_SECONDS
            self._client = ToolClient(
                self._url,
                api_key=options.api_key,
                timeout=seconds,
                max_retries=3,
                max_workers=options.max_connections,
                direct=False,
            )
        return self._client

    def _grade_of(self, verdicts: Verdicts) -> Grade:
        options, rate = self._options, verdicts.pass_rate
        all_passed = rate == 1.0
        share = float(all_passed) if options.binary else rate
        details = {
            "pass_rate": rate,
            "tests": len(verdicts.of),
            "time_outs": verdicts.time_outs,
            "refused": verdicts.refused,
            "no_code": 0.0,
            "judge_protected": verdicts.protected,
        }
        lowest = options.wrong if options.binary or not options.published else 0.0
        return Grade(lowest + (options.right - lowest) * share, all_passed, details)


def server_url(options: CodeOptions, config: DictConfig) -> str:
    """Return the URL of the server that runs the tests. Raises ConfigError if the config names none."""
    agent = config.get("actor_rollout_ref", {}).get("agent") or {}
    fusion = config.reward.get("sandbox_fusion") or {}
    url = options.server_url or agent.get("tool_server_url") or fusion.get("url")
    if not url:
        raise ConfigError(
            "no server to run tests on: set actor_rollout_ref.agent.tool_server_url to a tool server that serves "
            "python_code, or reward.reward_kwargs.server_url; in an evaluation give --tool_server_url"
        )
    return str(url).rstrip("/").removesuffix("/run_code")


def suite_of(ground_truth: Any, extra_info: Mapping[str, Any], max_tests: int, strict: bool = False) -> TestSuite:
    """Return the tests of a row from its `ground_truth`, in a form that `suite_in` reads.

    Older rows have them in ``extra_info``, as ``test_cases`` and ``inputs_outputs``. Raises ValueError if there are
    none.
    """
    tests = json.loads(ground_truth) if isinstance(ground_truth, str) and ground_truth.strip() else ground_truth
    if tests is None or isinstance(tests, str) or len(tests) == 0:
        tests = {"tests": extra_info.get("test_cases"), "inputs_outputs": extra_info.get("inputs_outputs")}
    try:
        return suite_in(tests, max_tests, strict)
    except ValueError as error:
        raise ValueError(f"the row's tests cannot be read: {error}") from error
