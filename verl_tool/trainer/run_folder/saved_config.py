"""The config that a run leaves in its folder, for whoever serves, replays or resumes the run."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_tool.util.whole_files import whole_file

CONFIG = "config.yaml"


def save_config(config: DictConfig) -> None:
    """Write the resolved config into the run's folder."""
    with whole_file(Path(config.run_dir) / CONFIG) as draft:
        OmegaConf.save(config, draft, resolve=True)
