"""Folders in the form of a training."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf
from quick_compose import quick_compose

CONFIG = Path(__file__).parents[2] / "verl_tool/trainer/config"
MODEL = "checkpoints/global_step_4/actor/huggingface"
"""Model of the run's only checkpoint."""
OVERRIDES = [
    "data.max_prompt_length=64",
    "data.max_response_length=96",
    "actor_rollout_ref.agent.action_stop_tokens=['<call>']",
    "actor_rollout_ref.agent.max_turns=2",
    "actor_rollout_ref.rollout.val_kwargs.temperature=0.25",
    "actor_rollout_ref.rollout.name=vllm",
    "tool_server.start=calculator",
    "tool_server.args=[--num_replicas,2]",
    "platform=cpu",
]


def run_folder(tmp_path: Path, *overrides: str) -> Path:
    """Make a folder with the trainer's real config and a checkpoint of step 4."""
    folder = tmp_path / "my_run"
    config = quick_compose(CONFIG, "agent_ppo_trainer", [*OVERRIDES, *overrides])
    (folder / "config").mkdir(parents=True)
    OmegaConf.save(config, folder / "config/config.yaml")
    (folder / MODEL).mkdir(parents=True)
    (folder / MODEL / "config.json").write_text("{}")
    (folder / MODEL / "model.safetensors").write_bytes(b"x")
    return folder
