"""A checkpoint in Hugging Face's form of a model that is trained by an adapter."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from peft import PeftConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

logger = logging.getLogger(__name__)


def merge_adapter(folder: Path, adapter: PeftConfig, *, trust_remote_code: bool = False) -> None:
    """Make of base weights and adapter one model that anybody can load.

    verl writes the weights of such a model under PEFT's inner names, which nothing loads again. Only language models
    are merged; others stay as they are. Raises ValueError if weights are missing.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    if not config.architectures or "ForCausalLM" not in config.architectures[0]:
        logger.warning("%s holds base weights and adapter apart: %s is not merged", folder, config.architectures)
        return
    weights: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    dtype = next(iter(weights.values())).dtype
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    model = get_peft_model(plain, adapter)
    lacking = model.load_state_dict(weights, strict=False).missing_keys
    tied = {f"base_model.model.{name}" for name in plain.all_tied_weights_keys}
    if set(lacking) - tied:
        raise ValueError(f"{folder} lacks weights of the model: {sorted(set(lacking) - tied)[:5]}")
    merged = model.merge_and_unload()
    merged.tie_weights()
    for path in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
        path.unlink()
    merged.save_pretrained(folder)
