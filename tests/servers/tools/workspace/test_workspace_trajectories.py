"""Trajectories whose workspaces get files before their first call and a verifier after their last: over HTTP, in the
real sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
from live_server import LiveServers
from toy_model import Characters, ScriptedEngine, ToyTokenizer

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.trajectory import StopReason, Trajectory
from verl_tool.client import ToolClient
from verl_tool.content.packed_files import PackedFile, pack_files
from verl_tool.errors import ConfigError
from verl_tool.notebook.text_environment import TextEnvironment
from verl_tool.protocol import FILES_FIELD, VERIFY_FIELD, FaultKind, StepRequest, StepResult
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import load_tools
from verl_tool.verification import Verification

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

OPTIONS = {"action_stop_tokens": ["</bash>", "</finish>"], "tool_call_retry_delay": 0.01}
FILES = {FILES_FIELD: pack_files({"in.txt": PackedFile(b"7")})}
SCRIPT = "cmp answer.txt /tests/wanted.txt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
TESTS = {"test.sh": PackedFile(SCRIPT.encode()), "wanted.txt": PackedFile(b"77")}
RIGHT = "<bash>cat in.txt in.txt > answer.txt; cat /tests/wanted.txt</bash>"


class Recording(ToolClient):
    """Keeps what is sent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent: list[StepRequest] = []

    async def step(self, requests: Sequence[StepRequest]) -> list[StepResult]:
        self.sent += requests
        return await super().step(requests)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def toolset() -> AsyncIterator[ToolSet]:
    yield ToolSet(load_tools("bash_terminal,finish", shared={"workers": 1, "warm_modules": ()}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(toolset: ToolSet) -> AsyncIterator[str]:
    servers = LiveServers()
    server = await servers.start(toolset)
    yield server.url
    await servers.stop()


async def run(
    url: str, turns: list[str], extra: Mapping[str, Any] = FILES, seconds: float = 20.0, **options: Any
) -> tuple[Trajectory, list[StepRequest]]:
    tokenizer = ToyTokenizer()
    settings = EpisodeOptions.load({**OPTIONS, **options})
    verification = Verification(files=pack_files(TESTS), timeout_seconds=seconds)
    async with Recording(url, **settings.client_settings()) as client:
        episode = Episode(ScriptedEngine(tokenizer, turns), client, tokenizer, settings)
        prompt = tokenizer.encode("count")
        trajectory = await episode.run(prompt, trajectory_id="t", extra=extra, verification=verification)
    return trajectory, client.sent


async def test_files_go_with_the_first_call_and_the_verifier_when_all_is_over(url: str, toolset: ToolSet) -> None:
    trajectory, sent = await run(url, [RIGHT, "<bash>true</bash>", "done"])
    assert trajectory.stop is StopReason.ANSWERED
    assert trajectory.verdict is not None
    assert (trajectory.verdict.reward, trajectory.verdict.fault) == (1.0, None)
    assert "/tests/wanted.txt: No such file" in trajectory.calls[0].observation
    assert [sorted({FILES_FIELD, VERIFY_FIELD} & set(request.extra)) for request in sent] == [
        [FILES_FIELD],
        [],
        [VERIFY_FIELD],
        [],
    ]
    assert [(request.step, request.finish) for request in sent] == [(0, False), (1, False), (2, False), (None, True)]
    assert len(trajectory.calls) == 2, "the verifier is none of the model's calls"
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    assert len(toolset) == 0


@pytest.mark.parametrize(
    ("turns", "stop", "reward"),
    [
        ([RIGHT, "<finish>0</finish>"], StopReason.TOOL_DONE, 1.0),
        (["<finish>0</finish>"], StopReason.TOOL_DONE, 0.0),
        (["I do nothing"], StopReason.ANSWERED, 0.0),
        (["<bash>kill $$</bash>", RIGHT, "<bash>true</bash>"], StopReason.MAX_TURNS, 1.0),
    ],
)
async def test_however_a_trajectory_ends_its_workspace_is_verified(
    url: str, toolset: ToolSet, turns: list[str], stop: StopReason, reward: float
) -> None:
    trajectory, _ = await run(url, turns, max_turns=2)
    assert trajectory.verdict is not None
    assert (trajectory.stop, trajectory.verdict.reward) == (stop, reward), trajectory
    assert len(toolset) == 0


async def test_a_session_that_is_lost_gives_no_reward(url: str, toolset: ToolSet) -> None:
    class Evicting(ScriptedEngine):
        async def generate(self, *args: Any) -> Any:
            for session in tuple(toolset.tools[0].sandbox._sessions._sessions):  # type: ignore[union-attr]
                session.evict("the test evicts it")
            return await super().generate(*args)

    tokenizer, settings = ToyTokenizer(), EpisodeOptions.load(OPTIONS)
    async with ToolClient(url, **settings.client_settings()) as client:  # type: ignore[arg-type]
        episode = Episode(Evicting(tokenizer, [RIGHT, "done"]), client, tokenizer, settings)
        verification = Verification(files=pack_files(TESTS), timeout_seconds=5)
        trajectory = await episode.run([1], trajectory_id="t", verification=verification)
    assert trajectory.verdict is not None
    assert trajectory.verdict.reward is None
    assert trajectory.verdict.fault is not None
    assert trajectory.verdict.fault.kind is FaultKind.STATE_LOST


async def test_what_cannot_be_verified_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="uses no tools"):
        await run(url, ["done"], enable_agent=False)


class Solver:
    """Solves the task in one call, unless the task is to be idle."""

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        text = "".join(map(chr, prompt_ids))
        return Generation([ord(c) for c in ("done" if "</bash>" in text or "idle" in text else RIGHT)])


async def test_a_notebook_gives_the_reward_of_training(url: str, toolset: ToolSet) -> None:
    env = TextEnvironment(Solver(), Characters(), url, formats="<bash>")
    verification = Verification(files=pack_files(TESTS), timeout_seconds=50)
    _, _, masks, rewards, histories = await asyncio.to_thread(
        env.run,
        ["right", "idle", "unfiled", "unexpected_count"],
        files=[FILES[FILES_FIELD], [{"path": "in.txt", "text": "7"}], None, None],
        verifications=[verification, verification.model_dump(), verification.model_dump_json(), None],
    )
    assert rewards == [1.0, 0.0, 0.0, 0.0] == [history.reward for history in histories], histories
    assert [history.trajectory.verdict is None for history in histories] == [False, False, False, True]
    assert all(map(any, masks))
    assert len(toolset) == 0


async def test_a_notebook_whose_workspace_is_lost_has_no_mask(url: str, toolset: ToolSet) -> None:
    class Evicting(Solver):
        async def generate(self, *args: Any) -> Generation:
            for session in tuple(toolset.tools[0].sandbox._sessions._sessions):  # type: ignore[union-attr]
                session.evict("the test evicts it")
            return await super().generate(*args)

    env = TextEnvironment(Evicting(), Characters(), url, formats="<bash>")
    verification = Verification(files=pack_files(TESTS), timeout_seconds=5)
    _, _, [mask], [reward], [history] = await asyncio.to_thread(env.run, ["right"], verifications=[verification])
    assert (any(mask), reward) == (False, 0.0)
    assert history.fault is not None
    assert history.fault.kind is FaultKind.STATE_LOST


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"files": [None, None]}, "files has 2 entries for 1 tasks"),
        ({"files": ["no base64"]}, "task 0: tools_kwargs.workspace_files: .* is not base64"),
        ({"verifications": [{"files": ""}]}, "task 0: the verification at files"),
        ({"verifications": [None], "reward_fn": lambda texts: [0.0]}, "reward_fn and verifications both"),
        ({"files": [None], "tools": [len]}, "functions have none"),
    ],
)
async def test_a_notebook_refuses_files_and_verifiers_that_it_cannot_use(more: dict[str, Any], words: str) -> None:
    made = {name: more[name] for name in ("tools", "reward_fn") if name in more}
    env = TextEnvironment(Solver(), Characters(), **{"tools": "http://127.0.0.1:9", "formats": "<bash>", **made})
    with pytest.raises(ConfigError, match=words):
        env.run(["right"], **{name: value for name, value in more.items() if name not in made})
