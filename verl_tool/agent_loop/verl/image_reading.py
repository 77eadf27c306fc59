"""Whether the model that is trained reads images, and how."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from verl_tool.agent_loop.generators.qwen_images import FAMILIES, QwenImages
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.errors import ConfigError

UNKNOWN = "is not there, or of no kind that transformers knows"


def why_no_images(model: str, *, trust_remote_code: bool = False) -> str | None:
    """Why images are of no use to the model in a folder, in words that follow "the model"; None if it reads them."""
    try:
        config = _config_of(model, trust_remote_code)
    except (OSError, ValueError):
        return UNKNOWN  # whoever loads it says it better
    if getattr(config, "vision_config", None) is None:
        return "reads text only"
    if config.model_type not in FAMILIES:
        return f"is of the family {config.model_type}, whose images are not read here (known are {', '.join(FAMILIES)})"
    return None


def model_type(model: str, *, trust_remote_code: bool = False, ask_hub: bool = True) -> str | None:
    """The ``model_type`` of the model in a folder or on the hub; None if it is not there."""
    try:
        return str(_config_of(model, trust_remote_code, ask_hub).model_type)
    except (OSError, ValueError):
        return None


def _config_of(model: str, trust_remote_code: bool, ask_hub: bool = True) -> PretrainedConfig:
    """What lies on this machine, in a folder or in the cache of the hub, is not asked for: without a network each
    question takes half a minute. Raises OSError or ValueError."""
    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, local_files_only=True)
    except OSError:
        if not ask_hub:
            raise
        return AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)


def image_reading(processor: Any | None, tokenizer: Tokenizer) -> QwenImages:
    """How a model that reads images does so. `processor`: as verl's ``hf_processor`` made it.

    Raises ConfigError if there is none, of which verl only warns.
    """
    if processor is None:
        raise ConfigError(
            "the model reads images, and verl could not make its processor; the log holds its warning. The model's "
            "folder needs preprocessor_config.json, and the environment torchvision (source scripts/env.sh train)"
        )
    return QwenImages(processor.image_processor, tokenizer)
