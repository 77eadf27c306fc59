"""Translate sampling parameters for each engine. The loop uses vLLM's names; verl passes them on unchanged.

SGLang accepts those of `sglang.srt.sampling.sampling_params.SamplingParams` (0.5.8 and 0.5.12), and raises TypeError
for any other name.
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
"""Maps vLLM's name of a parameter to SGLang's."""
SGLANG_SAME_NAMES = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "ignore_eos", "logit_bias"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
        *("skip_special_tokens", "spaces_between_special_tokens"),
    }
)
"""Parameters with the same name in both engines."""
READ_BY_VERL = frozenset({"logprobs", "prompt_logprobs"})
"""Parameters that verl's SGLang server removes and sets as fields of the request."""


class _FinalOnly:
    """Unpickles as vLLM's `RequestOutputKind.FINAL_ONLY`, so that the loop's process does not need vLLM."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _final_only, ()


def _final_only() -> Any:
    from vllm.sampling_params import RequestOutputKind

    return RequestOutputKind.FINAL_ONLY


def for_vllm(params: Mapping[str, Any]) -> dict[str, Any]:
    """Request the final output only. By default vLLM makes one output per token, each with all tokens so far.

    Text is decoded only if there are stop strings to find.
    """
    return {**params, "output_kind": _FinalOnly(), "detokenize": bool(params.get("stop"))}


def for_sglang(params: Mapping[str, Any]) -> dict[str, Any]:
    """Rename vLLM's parameters to SGLang's. Raises ConfigError for one that SGLang does not have."""
    known = SGLANG_SAME_NAMES | READ_BY_VERL | set(SGLANG_NAMES.values())
    renamed = {SGLANG_NAMES.get(name, name): value for name, value in params.items() if value is not None}
    unknown = sorted(renamed.keys() - known)
    if unknown:
        raise ConfigError(
            f"the sampling parameters {unknown} have no counterpart in SGLang; leave them out, or set "
            "actor_rollout_ref.rollout.name=vllm"
        )
    if renamed.get("top_k") == 0:  # means "all tokens" in vLLM; SGLang rejects 0
        renamed["top_k"] = -1
    return renamed
