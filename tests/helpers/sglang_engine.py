"""verl's own SGLang server over a stand-in of SGLang: verl's request code runs without the package.

The stand-in accepts the sampling parameters of SGLang and ends a turn as its scheduler does.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

from mocked_packages import import_with_mocks
from verl.workers.rollout.replica import TokenOutput

SERVER = "verl.workers.rollout.sglang_rollout.async_sglang_server"


class SamplingParams:
    """The names, defaults and limits of `sglang.srt.sampling.sampling_params.SamplingParams`, 0.5.8 (Apache-2.0)."""

    def __init__(
        self,
        max_new_tokens: int = 128,
        stop: Any = None,
        stop_token_ids: Any = None,
        stop_regex: Any = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        min_p: float = 0.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        min_new_tokens: int = 0,
        n: int = 1,
        json_schema: Any = None,
        regex: Any = None,
        ebnf: Any = None,
        structural_tag: Any = None,
        ignore_eos: bool = False,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        no_stop_trim: bool = False,
        custom_params: Any = None,
        stream_interval: Any = None,
        logit_bias: Any = None,
        sampling_seed: Any = None,
    ) -> None:
        self.max_new_tokens, self.min_new_tokens, self.top_k = max_new_tokens, min_new_tokens, top_k
        self.stop = [stop] if isinstance(stop, str) else list(stop or ())
        self.stop_token_ids, self.no_stop_trim = set(stop_token_ids or ()), no_stop_trim
        if top_k != -1 and top_k < 1:
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
        if not 0 <= min_new_tokens <= max_new_tokens:
            raise ValueError(f"min_new_tokens must be in [0, max_new_tokens({max_new_tokens})], got {min_new_tokens}.")


@dataclass
class GenerateReqInput:
    """The fields of `sglang.srt.managers.io_struct.GenerateReqInput`, 0.5.8, that verl's server sets."""

    input_ids: list[int]
    sampling_params: dict[str, Any]
    return_logprob: bool
    rid: str
    image_data: Any = None
    video_data: Any = None
    return_routed_experts: bool = False
    lora_path: str | None = None


class StandInSGLang:
    """Writes its lines, one per request, until one of SGLang's reasons ends it.

    `step` is the number of tokens drawn at a time, all of which stay when a stop string is found (speculative
    decoding). `trims` says whether a matched stop string is cut off the tokens unless ``no_stop_trim`` is set, as
    SGLang does with the text.
    """

    def __init__(self, tokenizer: Any, lines: Sequence[str], *, step: int = 1, trims: bool = False) -> None:
        self._tokenizer, self._lines, self._step, self._trims = tokenizer, list(lines), step, trims
        self.requests: list[GenerateReqInput] = []
        self.abort_next = False

    async def generate_request(self, request: GenerateReqInput, _request: None) -> Any:
        self.requests.append(request)
        params = SamplingParams(**request.sampling_params)
        written = self._tokenizer.encode(self._lines.pop(0), add_special_tokens=False)
        ids, reason = self._until_finished(written, params)
        yield {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "abort" if self.abort_next else reason},
                "output_token_logprobs": [(-0.5, token, None) for token in ids] if request.return_logprob else None,
            },
        }

    def _until_finished(self, written: list[int], params: SamplingParams) -> tuple[list[int], str]:
        ids: list[int] = []
        while len(ids) < params.max_new_tokens:
            drawn = written[len(ids) : len(ids) + self._step][: params.max_new_tokens - len(ids)]
            if not drawn:
                return ids, "stop"  # the model's own end token, which the script leaves out
            ids += drawn
            if params.stop_token_ids & set(drawn):
                return ids, "stop"
            text = self._tokenizer.decode(ids)
            if found := [stop for stop in params.stop if stop in text]:
                kept = text[: text.index(found[0])]
                trimmed = self._tokenizer.encode(kept, add_special_tokens=False)
                return (trimmed if self._trims and not params.no_stop_trim else ids), "stop"
        return ids, "length"


def sglang_server_module() -> ModuleType:
    """Import verl's module of the SGLang server, with mocks of SGLang if it is not installed."""
    module = import_with_mocks(SERVER, "sglang", ["verl.workers.rollout.sglang_rollout"])
    if find_spec("sglang") is None:
        module.GenerateReqInput = GenerateReqInput  # type: ignore[attr-defined]
    return module


class SGLangClient:
    """verl's client of one SGLang server: the input and the answer of `LLMServerClient.generate`."""

    def __init__(self, engine: StandInSGLang, *, max_model_len: int) -> None:
        server: Any = object.__new__(sglang_server_module().SGLangHttpServer)
        server.config = SimpleNamespace(
            max_model_len=max_model_len, enable_rollout_routing_replay=False, mtp=None, response_length=64
        )
        server.model_config = SimpleNamespace(lora_rank=0, lora={})
        server.tokenizer_manager, server.replica_rank, server.global_steps = engine, 0, 7
        server._disaggregation_role = "null"
        self._server = server

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], priority: int = 0
    ) -> TokenOutput:
        output: TokenOutput = await self._server.generate(
            request_id=request_id, prompt_ids=prompt_ids, sampling_params=dict(sampling_params)
        )
        return output


def accepted_names() -> set[str]:
    """Return names of the sampling parameters that SGLang accepts."""
    return set(inspect.signature(SamplingParams.__init__).parameters) - {"self"}
