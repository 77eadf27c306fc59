"""The group ``gateway`` of a trainer's config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_tool import trainer
from verl_tool.gateway.agent_program import AgentProgram
from verl_tool.gateway.settings import GatewaySettings


@pytest.mark.parametrize(
    ("rollout", "program", "context"),
    [
        ({"max_model_len": 4096}, {}, 4096),
        ({"max_model_len": None, "prompt_length": 100, "response_length": 28}, {}, 128),
        ({"max_model_len": 4096}, {"context_tokens": 1000}, 1000),
    ],
)
def test_a_program_gets_the_context_of_the_engine(
    rollout: dict[str, Any], program: dict[str, Any], context: int
) -> None:
    config = OmegaConf.create(
        {
            "gateway": {"program": {"python": "package.agent:run", **program}},
            "trainer": {"use_v1": True},
            "actor_rollout_ref": {"rollout": rollout},
        }
    )
    assert GatewaySettings.is_set(config)
    assert GatewaySettings.of_config(config).program.context_tokens == context


def test_the_trainers_config_has_each_option_of_a_program() -> None:
    file = Path(trainer.__file__).parent / "config" / "agent_ppo_trainer.yaml"
    assert set(OmegaConf.load(file).gateway.program) == set(AgentProgram.model_fields)
