"""The shape of a model, from its config.json on disk or from the table of the models that the recipes name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, PretrainedConfig
from verl.utils.model import get_hf_auto_model_class

from verl_tool.agent_loop.verl.model_config import is_hub_name

_QWEN25_7B: dict[str, Any] = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}


def _qwen25(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    """Those below 7B share the weights of embeddings and head."""
    shape = dict(zip(_QWEN25_7B, (hidden, layers, heads, kv_heads, intermediate, vocab, 32768), strict=True))
    tied = hidden < 3584
    return {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": tied, **shape}


_QWEN25 = {
    "Qwen2.5-0.5B": _qwen25(896, 24, 14, 2, 4864, 151936),
    "Qwen2.5-1.5B": _qwen25(1536, 28, 12, 2, 8960, 151936),
    "Qwen2.5-3B": _qwen25(2048, 36, 16, 2, 11008, 151936),
    "Qwen2.5-7B": _qwen25(3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-14B": _qwen25(5120, 48, 40, 8, 13824, 152064),
    "Qwen2.5-32B": _qwen25(5120, 64, 40, 8, 27648, 152064),
    "Qwen2.5-72B": _qwen25(8192, 80, 64, 8, 29568, 152064),
}
_MATH_15B = {**_QWEN25["Qwen2.5-1.5B"], "max_position_embeddings": 4096}
_PIXEL_REASONER = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "text_config": {**_QWEN25_7B, "max_position_embeddings": 128000},
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
    },
    "tie_word_embeddings": False,
}  # fmt: skip
_QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
KNOWN: dict[str, dict[str, Any]] = {
    **{f"Qwen/{name}{suffix}": shape for name, shape in _QWEN25.items() for suffix in ("", "-Instruct")},
    **{
        f"Qwen/{name.replace('2.5', '2.5-Coder')}{suffix}": shape
        for name, shape in _QWEN25.items()
        for suffix in ("", "-Instruct")
        if name != "Qwen2.5-72B"
    },
    "Qwen/Qwen2.5-Math-1.5B": _MATH_15B,
    "TIGER-Lab/PixelReasoner-WarmStart": _PIXEL_REASONER,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
}
"""Shapes of the models that recipes and documentation name, as their config.json has them, for machines without a
network. The numbers of parameters that follow are the published ones (see `test_model_shapes.py`)."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. Parameters are counted on the model itself, built without memory."""

    source: str
    """Where the shape is from: a file, or ``the table of known models``."""
    parameters: int
    layer_parameters: int
    """Of the largest layer, the unit that FSDP gathers."""
    root_parameters: int
    """Outside of all layers: embeddings, head, last norm."""
    largest_tensor: int
    linear_sizes: tuple[tuple[int, int], ...]
    """In and out features of each linear layer but the head: where a LoRA adapter of all linear layers goes."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    active_intermediate: int
    """Width of the MLP that one token passes: of a mixture, of all experts that it passes together."""
    intermediate: int
    """Width of one MLP, or of one expert."""
    experts: int
    vocab: int
    max_positions: int | None
    latent_kv: int
    """Values that latent attention (MLA) caches of a token in a layer; 0: keys and values of each head are cached."""

    def kv_values(self, tensor_parallel: int) -> int:
        """Values that a GPU of `tensor_parallel` caches of one token: heads are not split, latents are replicated."""
        of_layer = self.latent_kv or 2 * max(1, self.kv_heads // tensor_parallel) * self.head_dim
        return self.layers * of_layer

    def lora_parameters(self, rank: int) -> int:
        """Trainable parameters of an adapter for all linear layers (LoRA, arXiv 2106.09685, section 4.1)."""
        return sum(rank * (features_in + features_out) for features_in, features_out in self.linear_sizes)


class UnknownShapeError(Exception):
    """The model's shape cannot be had here; the message says why."""


def shape_of(path: str, *, trust_remote_code: bool = False) -> ModelShape:
    """The shape of the model at `path`, a folder or a name on the hub. Nothing is downloaded, no code of it is run.

    Raises UnknownShapeError.
    """
    content, source = _config_of(path, trust_remote_code)
    return _measured(content, source)


def _config_of(path: str, trust_remote_code: bool) -> tuple[PretrainedConfig, str]:
    folder = Path(path).expanduser()
    file = folder / "config.json" if folder.is_dir() else None
    if is_hub_name(path):
        cached = try_to_load_from_cache(path, "config.json")
        file = Path(cached) if isinstance(cached, str) else None
    if file is not None and file.is_file():
        try:
            return AutoConfig.from_pretrained(file.parent, local_files_only=True, trust_remote_code=False), str(file)
        except Exception as error:  # a config is anybody's file
            raise UnknownShapeError(f"{file} cannot be read here ({type(error).__name__}: {error!s:.120})") from error
    if path in KNOWN:
        known = dict(KNOWN[path])
        return AutoConfig.for_model(known.pop("model_type"), **known), "the table of known models"
    raise UnknownShapeError(f"config.json of {path} is not here")


def _measured(config: PretrainedConfig, source: str) -> ModelShape:
    try:
        return _measure(config, source)
    except Exception as error:  # a model of any architecture, perhaps of one that is not installed
        raise UnknownShapeError(
            f"a model of {source} cannot be built here ({type(error).__name__}: {error!s:.120})"
        ) from error


def _measure(config: PretrainedConfig, source: str) -> ModelShape:
    with torch.device("meta"):
        model = get_hf_auto_model_class(config).from_config(config)
    layer_names = set(model._no_split_modules or ())
    layers = [
        sum(each.numel() for each in module.parameters())
        for module in model.modules()
        if type(module).__name__ in layer_names
    ]
    total = sum(each.numel() for each in model.parameters())
    head = model.get_output_embeddings()
    linear = tuple(
        (module.in_features, module.out_features)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    )
    text = config.get_text_config()
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    experts, per_token = _experts(text)
    width = getattr(text, "moe_intermediate_size", None) if experts else None
    intermediate = width or text.intermediate_size
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    return ModelShape(
        source=source,
        parameters=total,
        layer_parameters=max(layers, default=total),
        root_parameters=total - sum(layers),
        largest_tensor=max(each.numel() for each in model.parameters()),
        linear_sizes=linear,
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        active_intermediate=intermediate * per_token + shared,
        intermediate=intermediate,
        experts=experts,
        vocab=text.vocab_size,
        max_positions=getattr(text, "max_position_embeddings", None),
        latent_kv=latent + text.qk_rope_head_dim if (latent := getattr(text, "kv_lora_rank", None) or 0) else 0,
    )


def _experts(text: PretrainedConfig) -> tuple[int, int]:
    """Experts of a layer, and those that a token passes: 0 and 1 of a dense model."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((value for name in names if (value := getattr(text, name, None))), 0)
    return experts, getattr(text, "num_experts_per_tok", None) or 1 if experts else 1
