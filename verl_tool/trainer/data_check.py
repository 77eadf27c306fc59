"""Whether a training can use the rows of its files, all of them, with its model."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_tool.agent_loop.row import MEDIA_COLUMNS
from verl_tool.checks.row_files import (
    RowFile,
    check_columns,
    check_row_count,
    check_rows,
    columns_for_reward,
    row_files,
)
from verl_tool.errors import ConfigError
from verl_tool.trainer.config_completion import choose_attention
from verl_tool.trainer.preflight.backends import image_problems


def check_data(config: DictConfig) -> tuple[RowFile, ...]:
    """Look at the rows of all local files that the run reads, and whether its model is there; return those files.
    Raises ConfigError that names what is missing, or a row that cannot be used."""
    from verl_tool.trainer.config_validation import check_files

    check_files(config)
    choose_attention(config)
    return check_local_rows(config)


def check_local_rows(config: DictConfig) -> tuple[RowFile, ...]:
    """`check_data` as far as files are there."""
    from verl_tool.agent_loop.verl.image_reading import UNKNOWN, why_no_images

    data, model = config.data, config.actor_rollout_ref.model
    media = {*MEDIA_COLUMNS, *(data.get(f"{kind}_key", f"{kind}s") for kind in ("image", "video", "audio"))}
    trusted = bool(model.get("trust_remote_code", False))
    why = why_no_images(model.get("hf_config_path") or model.path, trust_remote_code=trusted)
    if why is None:
        _check_with_images(config)
    if why in (None, UNKNOWN):
        media.remove(data.get("image_key", "images"))
    required = (data.prompt_key, *columns_for_reward(config))
    files = row_files(config)
    for file in files:
        if file.path.is_file():
            check_columns(file, required)
            check_rows(file, data.prompt_key, tuple(media), None if why in (None, UNKNOWN) else f"the model {why}")
    check_row_count(config, files)
    return files


def _check_with_images(config: DictConfig) -> None:
    """Raises ConfigError for a setting that does not work with a model that reads images."""
    from verl.trainer.ppo.utils import need_critic

    model = config.actor_rollout_ref.model
    if problems := list(image_problems(config)):
        raise ConfigError("\n       ".join(problems))
    if model.get("use_fused_kernels", False):
        raise ConfigError(
            f"actor_rollout_ref.model.use_fused_kernels=true with {model.path}, which reads images: the engine gives "
            "the tokens that stand for them no probability, and these kernels would; set it to false"
        )
    if need_critic(config):
        raise ConfigError(
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a critic, and verl makes none for "
            f"{model.path}, which reads images; take an estimator without one (grpo, rloo, reinforce_plus_plus, …)"
        )
