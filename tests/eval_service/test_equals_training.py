"""What is evaluated is what was trained, in chat mode: the trainer's validation and the endpoint write the same tokens.

The inline mode is shown by test_live, whose service answers as a run of that mode.
"""

from __future__ import annotations

import asyncio
import importlib.util
from itertools import islice
from pathlib import Path

import agent_program_run
import looking_model
import mcp_run
import pytest
from calculator_run import AGENT, Calculator
from live_service import live_service
from validated_run import answers, assert_equal, validated_run

pytest.importorskip("openai")
pytest.importorskip("vllm")
pytest.importorskip("verl")

from eval_service.evaluation.agent_asking import AgentAsker
from eval_service.evaluation.asking import Asking
from eval_service.evaluation.dataset import read_problems
from eval_service.model.run_config import run_config
from verl_tool.gateway.settings import GatewaySettings

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1500)]

CHAT = (f"{AGENT}.enable_mtrl=true", f"{AGENT}.tool_schemas=none")
LOOKING = (
    *CHAT,
    *(f"{AGENT}.mtrl_role=tool", f"{AGENT}.action_stop_tokens=['</half>']", f"tool_server.start={looking_model.HALF}"),
    *("data.max_prompt_length=96", "actor_rollout_ref.rollout.max_model_len=256"),
)


async def test_tokens_masks_and_calls_of_chats_are_those_of_the_trainers_validation(
    calculator: Calculator, tmp_path: Path
) -> None:
    run = validated_run(tmp_path / "run", calculator, *CHAT)
    with live_service(run.service_arguments, tmp_path) as service:
        served = await answers(service.url, run.model.name, run)
    assert_equal(served, run.trajectories)


async def test_a_run_with_tools_of_an_mcp_server_is_served_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = await asyncio.to_thread(mcp_run.prepare, tmp_path, monkeypatch)
    run = validated_run(tmp_path / "run", start, *mcp_run.OVERRIDES)
    with live_service(run.service_arguments, tmp_path) as service:
        served = await answers(service.url, run.model.name, run)
    assert_equal(served, run.trajectories)
    assert any(call.valid for t in served for call in t.calls)


async def test_sessions_of_a_program_are_those_of_the_trainers_validation_at_each_of_two_replicas(
    calculator: Calculator, tmp_path: Path
) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    mode = (*agent_program_run.prepare(tmp_path), "trainer.val_before_train=true")
    run = await asyncio.to_thread(validated_run, tmp_path / "run", calculator, *mode)
    config = run_config(run.folder)
    gateway = GatewaySettings.of_config(config)
    with live_service([*run.service_arguments, "--num_models", "2"], tmp_path) as service:
        asking = Asking(base_url=f"{service.url}/v1", model=run.model.name)
        async with AgentAsker(asking, gateway) as asker:
            opened = {(await asker.open_session(0)).url for _ in range(20)}
            records = await asyncio.gather(*(asker.ask(problem, 0) for problem in read_problems(run.data)))
    assert len(opened) == 2
    assert [record.error for record in records] == [None] * len(records)
    assert_equal([record.trajectory for record in records if record.trajectory is not None], run.trajectories)


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="source scripts/env.sh train")
async def test_images_of_rows_and_of_observations_are_those_of_the_trainers_validation(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    data = tmp_path / "data"
    data.mkdir()
    for name in ("train", "test"):
        rows = looking_model.rows(list(islice(looking_model.looks(5), 24)))
        pandas.DataFrame(rows).to_parquet(data / f"{name}.parquet")
    start = Calculator(data, await asyncio.to_thread(looking_model.prepare, tmp_path / "model"))
    run = validated_run(tmp_path / "run", start, *LOOKING)
    with live_service(run.service_arguments, tmp_path) as service:
        served = await answers(service.url, run.model.name, run)
    assert_equal(served, run.trajectories)
    assert {sum(s.image is not None for s in t.segments) for t in served} == {0, 2, 3, 4}
    assert len({s.image for t in served for s in t.segments if s.image}) > 10
