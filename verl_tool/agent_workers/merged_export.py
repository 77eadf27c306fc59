"""Export a model that was trained with an adapter in Hugging Face's format."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from peft import PeftConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

logger = logging.getLogger(__name__)


def merge_adapter(folder: Path, adapter: PeftConfig, *, trust_remote_code: bool = False) -> None:
    """Merge the adapter into the base weights in `folder`, so that transformers can load the model.

    verl writes the weights under PEFT's internal names, which no library loads. Only language models are merged; others
    stay unchanged. Raises ValueError if weights are missing.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not config.architectures or "ForCausalLM" not in config.architectures[0]:
        logger.warning("%s keeps base weights and adapter apart: %s cannot be merged", folder, config.architectures)
        return
    weights: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    dtype = next(iter(weights.values())).dtype
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model = get_peft_model(plain, adapter)
    missing = model.load_state_dict(weights, strict=False).missing_keys
    tied = {f"base_model.model.{name}" for name in plain.all_tied_weights_keys}
    if set(missing) - tied:
        raise ValueError(f"{folder} lacks weights of the model: {sorted(set(missing) - tied)[:5]}")
    merged = model.merge_and_unload()
    merged.tie_weights()
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        path.unlink()
    merged.save_pretrained(folder)
