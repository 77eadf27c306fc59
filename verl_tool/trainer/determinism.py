"""``deterministic=true``: two runs with one config and one seed give the same trajectories and metrics.

What is set here are verl's own options. Besides, each turn is sampled with a seed of its own (`VerlGenerator`), and the
newer trainer takes its rows in the order of the data, not in that in which they came (`SequentialIds`).
"""

from __future__ import annotations

import uuid

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_tool.errors import ConfigError

ENGINES = ("vllm", "replay")
"""Those that are known to give the same for the same seed; the second gives trajectories from disk."""
DATA_SEED = 1


def make_deterministic(config: DictConfig) -> None:
    """Set all that follows from ``deterministic=true``. Raises ConfigError for what cannot be so."""
    _check(config)
    rollout = config.actor_rollout_ref.rollout
    if config.data.seed is None:
        config.data.seed = DATA_SEED
    config.data.validation_shuffle = False
    # What stands in the cache depends on what else was asked for, and how much is computed at once on what is there.
    rollout.enable_prefix_caching = False
    if config.trainer.device == "cpu":
        # vLLM's kernels whose results do not depend on the rest of a batch are for GPUs, and fail elsewhere.
        rollout.max_num_seqs = 1
    else:
        rollout.full_determinism = True
    for engine in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp"):
        if OmegaConf.select(config, engine) is not None:
            OmegaConf.update(config, f"{engine}.full_determinism", True)
    with open_dict(config):
        environment = {"runtime_env": {"env_vars": {"PYTHONHASHSEED": str(rollout.seed)}}}
        config.ray_kwargs.ray_init = OmegaConf.merge(config.ray_kwargs.ray_init, environment)


def _check(config: DictConfig) -> None:
    rollout, mode = config.actor_rollout_ref.rollout, config.trainer.v1.trainer_mode
    if not isinstance(rollout.seed, int) or not 0 <= rollout.seed < 1 << 32:
        raise ConfigError(
            f"deterministic=true with actor_rollout_ref.rollout.seed={rollout.seed!r}; set it to a whole number from 0 "
            "to 4294967295, of which all that is drawn follows"
        )
    if config.trainer.use_v1 and mode != "sync":
        raise ConfigError(
            f"deterministic=true with trainer.v1.trainer_mode={mode!r}, where weights change while trajectories are "
            "under way; set trainer.v1.trainer_mode=sync"
        )
    if config.algorithm.filter_groups.enable:
        raise ConfigError(
            "deterministic=true with algorithm.filter_groups.enable=true: which groups replace others depends on which "
            "come first; set one of them to false"
        )
    if rollout.name not in ENGINES:
        raise ConfigError(
            f"deterministic=true with actor_rollout_ref.rollout.name={rollout.name!r}; the engine that samples with "
            "the seeds it is given is vllm"
        )


class SequentialIds:
    """In place of the module `uuid`: ids in their order, the same in each run, for the rows of each step."""

    def __init__(self) -> None:
        self._next = 0

    def begin(self, step: int, *, validation: bool) -> None:
        """Count anew, for the rows of a step or of its validation."""
        self._next = (step << 65) + (validation << 64)

    def uuid4(self) -> uuid.UUID:
        """The next id. Ids of later rows of a step are larger, as text too."""
        self._next += 1
        return uuid.UUID(int=self._next)
