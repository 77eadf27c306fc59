"""Sampling parameters in the names of each engine. The loop uses vLLM's; verl passes them on unchanged.

SGLang's are those of `sglang.srt.sampling.sampling_params.SamplingParams`, versions 0.5.8 and 0.5.12, which raises
TypeError for any other name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_tool.errors import ConfigError

SGLANG_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "seed": "sampling_seed",
}
"""vLLM's name: SGLang's name of the same parameter."""
SGLANG_SAME_NAMES = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
    }
)
"""Parameters that both engines call the same."""
READ_BY_VERL = frozenset({"logprobs", "prompt_logprobs"})
"""verl's SGLang server takes these out and sets fields of the request instead."""


class _FinalOnly:
    """vLLM's `RequestOutputKind.FINAL_ONLY` once it is unpickled: the loop's own process needs no vLLM."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _final_only, ()


def _final_only() -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.FINAL_ONLY


def for_vllm(params: Mapping[str, Any]) -> dict[str, Any]:
    """Ask for the last output only. By default vLLM makes one for each token, with all before it in each.

    Text is read by nobody but the search for stop strings.
    """
    return {**params, "output_kind": _FinalOnly(), "detokenize": bool(params.get("stop"))}


def for_sglang(params: Mapping[str, Any]) -> dict[str, Any]:
    """Rename vLLM's parameters to SGLang's. Raises ConfigError for one that SGLang does not have."""
    own = SGLANG_SAME_NAMES | READ_BY_VERL | set(SGLANG_NAMES.values())
    renamed = {SGLANG_NAMES.get(name, name): value for name, value in params.items() if value is not None}
    unknown = sorted(renamed.keys() - own)
    if unknown:
        raise ConfigError(
            f"the sampling parameters {unknown} have no counterpart in SGLang; leave them out, or set "
            "actor_rollout_ref.rollout.name=vllm"
        )
    if renamed.get("top_k") == 0:  # vLLM: all tokens; SGLang refuses 0
        renamed["top_k"] = -1
    return renamed
