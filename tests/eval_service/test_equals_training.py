"""What is evaluated is what was trained, in chat mode: the trainer's validation and the endpoint write the same tokens.

The inline mode is shown by test_live, whose service answers as a run of that mode.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import mcp_run
import pytest
from live_service import live_service
from validated_run import answers, assert_equal, validated_run

if TYPE_CHECKING:
    from calculator_run import Calculator

openai = pytest.importorskip("openai")
pytest.importorskip("vllm")
pytest.importorskip("verl")

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1500)]

CHAT = ("actor_rollout_ref.agent.enable_mtrl=true", "actor_rollout_ref.agent.tool_schemas=none")


async def test_tokens_masks_and_calls_of_chats_are_those_of_the_trainers_validation(
    calculator: Calculator, tmp_path: Path
) -> None:
    run = validated_run(tmp_path / "run", calculator, *CHAT)
    with live_service(run.service_arguments, tmp_path) as service:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=300) as client:
            served = await answers(client, run.model.name, run.questions)
    assert_equal(served, run.trajectories)


async def test_a_run_with_tools_of_an_mcp_server_is_served_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = await asyncio.to_thread(mcp_run.prepare, tmp_path, monkeypatch)
    run = validated_run(tmp_path / "run", start, *mcp_run.OVERRIDES)
    with live_service(run.service_arguments, tmp_path) as service:
        async with openai.AsyncOpenAI(base_url=f"{service.url}/v1", api_key="none", timeout=300) as client:
            served = await answers(client, run.model.name, run.questions)
    assert_equal(served, run.trajectories)
    assert any(call.valid for t in served for call in t.calls)
