"""Whether the model that is trained reads images, and how."""

from __future__ import annotations

from typing import Any

from verl_tool.agent_loop.generators.qwen_images import FAMILIES, QwenImages
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.verl.model_config import load_config
from verl_tool.errors import ConfigError

UNKNOWN = "is not there, or of no kind that transformers knows"


def why_no_images(model: str, *, trust_remote_code: bool = False) -> str | None:
    """Why images are of no use to the model in a folder, in words that follow "the model"; None if it reads them."""
    try:
        config = load_config(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError):
        return UNKNOWN  # whoever loads it says it better
    if getattr(config, "vision_config", None) is None:
        return "reads text only"
    if config.model_type not in FAMILIES:
        return f"is of the family {config.model_type}, whose images are not read here (known are {', '.join(FAMILIES)})"
    return None


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
