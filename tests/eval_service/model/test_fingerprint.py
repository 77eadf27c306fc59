"""The fingerprint changes with what changes answers, and with nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from eval_service.model.fingerprint import fingerprint
from eval_service.settings import Sampling, ServiceSettings
from verl_tool.agent_loop.options import EpisodeOptions

LOOP = {"action_stop_tokens": ["<call>"], "tool_server_url": "http://127.0.0.1:1"}


def settings(folder: Path, loop: dict[str, Any] | None = None, **changes: Any) -> ServiceSettings:
    options = EpisodeOptions.load(LOOP | (loop or {}))
    return ServiceSettings(model=str(folder), served_model_name="m", options=options).model_copy(update=changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


@pytest.mark.parametrize("loop", [{"max_turns": 3}, {"max_obs_length": 7}, {"action_stop_tokens": ["</python>"]}])
def test_another_loop_has_another_fingerprint(folder: Path, loop: dict[str, Any]) -> None:
    assert fingerprint(settings(folder, loop)) != fingerprint(settings(folder))


@pytest.mark.parametrize(
    "loop", [{"tool_server_url": "http://127.0.0.1:2"}, {"tool_call_timeout": 5.0}, {"mask_overlong_loss": True}]
)
def test_what_changes_no_answer_leaves_it_as_it_is(folder: Path, loop: dict[str, Any]) -> None:
    changed = settings(folder, loop, served_model_name="other", api_key="k", max_queued=3)
    assert fingerprint(changed) == fingerprint(settings(folder))


def test_other_weights_and_another_sampling_have_another_fingerprint(folder: Path) -> None:
    first = fingerprint(settings(folder))
    assert fingerprint(settings(folder, sampling=Sampling(temperature=0.5))) != first
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert fingerprint(settings(folder)) != first
    assert fingerprint(settings(Path("hub/name"))) != fingerprint(settings(Path("hub/other")))
