"""The config that a run leaves in its folder, for whoever serves, replays or resumes the run."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_tool.util.atomic_files import atomic_write

CONFIG = "config.yaml"
REFUSED_CONFIG = "refused.yaml"
"""Of a start that the doctor refused: `CONFIG` may be that of an earlier start."""


def save_config(config: DictConfig, name: str = CONFIG) -> Path:
    """Write the resolved config into the run's folder."""
    path = Path(config.run_dir) / name
    with atomic_write(path) as draft:
        OmegaConf.save(config, draft, resolve=True)
    return path
