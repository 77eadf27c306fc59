"""Whether the model that is served reads images, and how."""

from __future__ import annotations

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from eval_service.settings import CompletionsSettings, ServiceSettings
from verl_tool.agent_loop.generators.qwen_images import QwenImages
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.verl.image_reading import why_no_images
from verl_tool.errors import ConfigError


def image_reading(settings: ServiceSettings, tokenizer: Tokenizer) -> tuple[QwenImages | None, str]:
    """How the model reads images; or None, and in words for a refusal what it does in place of it. Raises ConfigError
    if the model reads images and its folder does not say how."""
    if isinstance(settings.engine, CompletionsSettings):
        return None, "is on a server that is asked with token ids only (--engine_url)"
    why = why_no_images(settings.model, trust_remote_code=settings.trust_remote_code)
    if why is not None:
        return None, why
    try:
        # That of all these families. Only sizes are asked of it: the engine has its own, and Pillow's needs no
        # torchvision, without which transformers' own choice of a class ends in an ImportError.
        processor = Qwen2VLImageProcessorPil.from_pretrained(settings.model)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{settings.model} reads images, and how to prepare them is not in it: {error}; put the model's "
            "preprocessor_config.json there"
        ) from error
    return QwenImages(processor, tokenizer), ""
