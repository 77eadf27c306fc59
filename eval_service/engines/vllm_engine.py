"""vLLM in this process: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from eval_service.engines.base import EngineError, Listener, RequestRejectedError, TokenChunk, TokenLogProb
from eval_service.settings import VllmSettings
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.generators.qwen_images import QwenImages
from verl_tool.content.parts import ImagePart

SHUTDOWN_SECONDS = 10.0
MAX_LOG_PROBS = 20
"""Most likeliest tokens that can be asked for."""
BANNED = -100.0
"""Added to the logit of a token that must not be drawn; the least that vLLM takes."""
_ABORTED = "abort"
_CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
"""On a machine without an accelerator, unless they are set: GiB of key-value cache, and no compiler."""
_CPU_ENVIRONMENT_WITH_IMAGES = {"VLLM_MLA_DISABLE": "1"}
"""There vLLM asks whether the text part of a Qwen3-VL has this kind of attention, and stumbles over its empty list of
architectures ("list index out of range")."""


class VllmEngine:
    """An `Engine` over vLLM's `AsyncLLM`. Make it inside a running event loop."""

    def __init__(
        self, model: str, settings: VllmSettings, *, trust_remote_code: bool = False, images: QwenImages | None = None
    ) -> None:
        """Load the model; takes from seconds to minutes. `images`: how it reads them; None: it reads text only. Raises
        EngineError that holds vLLM's own words."""
        self._images = images
        # As in training: a token that stands for a part of an image is never drawn.
        self._biases = dict.fromkeys(images.banned_ids, BANNED) if images is not None else {}
        try:
            # As a server: else vLLM takes small batches, a few thousand tokens of 128 requests, whatever the device.
            self._llm = AsyncLLM.from_engine_args(
                _arguments(model, settings, trust_remote_code, images), usage_context=UsageContext.OPENAI_API_SERVER
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise EngineError(f"vLLM could not load {model!r}: {error}") from error
        self.max_model_len: int = self._llm.vllm_config.model_config.max_model_len
        self.vocab_size: int = self._llm.vllm_config.model_config.get_vocab_size()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        listen: Listener | None = None,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        prompt = await self._prompt(prompt_ids, images)
        if self._biases:
            sampling_params = {
                **sampling_params,
                "logit_bias": (sampling_params.get("logit_bias") or {}) | self._biases,
            }
        params = _sampling_params(sampling_params, RequestOutputKind.DELTA if listen else RequestOutputKind.FINAL_ONLY)
        token_ids: list[int] = []
        log_probs: list[float] | None = None if params.logprobs is None else []
        finish_reason: str | None = None
        try:
            async for output in self._llm.generate(prompt, params, request_id):
                piece = output.outputs[0]
                entries = _log_probs(piece, params.logprobs or 0)
                token_ids += piece.token_ids
                if log_probs is not None:
                    log_probs += [entry.log_prob for entry in entries or ()]
                finish_reason = piece.finish_reason
                if listen is not None and piece.token_ids:
                    await listen(TokenChunk(list(piece.token_ids), entries))
        except VLLMClientError as error:
            raise RequestRejectedError(str(error)) from error
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineError(f"vLLM failed: {error}") from error
        return Generation(token_ids, log_probs, "aborted" if finish_reason == _ABORTED else finish_reason)

    async def _prompt(self, prompt_ids: list[int], images: Sequence[ImagePart]) -> TokensPrompt:
        """What vLLM is given. Raises ContentError if an image cannot be decoded."""
        if not images:
            return TokensPrompt(prompt_token_ids=prompt_ids)
        if self._images is None:
            raise RequestRejectedError("this model reads text only, and was given images")
        decoded = await asyncio.to_thread(lambda: [image.decode() for image in images])
        return TokensPrompt(
            prompt_token_ids=self._images.one_each(prompt_ids),
            multi_modal_data={"image": decoded},
            # vLLM need not tell images apart by their pixels.
            multi_modal_uuids={"image": [image.sha256 for image in images]},
        )

    async def check(self) -> None:
        """Raise EngineError if vLLM's engine process is dead."""
        try:
            await self._llm.check_health()
        except EngineDeadError as error:
            raise EngineError(f"vLLM's engine process is dead: {error}") from error

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._llm.shutdown, SHUTDOWN_SECONDS)


def _arguments(
    model: str, settings: VllmSettings, trust_remote_code: bool, images: QwenImages | None
) -> AsyncEngineArgs:
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        for name, value in (_CPU_ENVIRONMENT | (_CPU_ENVIRONMENT_WITH_IMAGES if images else {})).items():
            os.environ.setdefault(name, value)
    further = {} if settings.max_num_seqs is None else {"max_num_seqs": settings.max_num_seqs}
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    unknown = sorted(set(settings.engine_kwargs) - known)
    if unknown:
        raise EngineError(f"engine_kwargs has {unknown[0]!r}, which is no argument of this vLLM")
    arguments: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        # vLLM would halve the precision of a float32 model, and answer otherwise than training on a CPU did.
        "dtype": "float32" if on_cpu and settings.dtype == "auto" else settings.dtype,
        "tensor_parallel_size": settings.tensor_parallel,
        "max_model_len": settings.max_model_len,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enforce_eager": settings.enforce_eager or on_cpu,
        "seed": settings.seed,
        "max_logprobs": MAX_LOG_PROBS,
        "logprobs_mode": settings.logprobs_mode,
        # What a request leaves out is decided by the service, never by the model's folder.
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    return AsyncEngineArgs(model=model, **(arguments | further | settings.engine_kwargs))


def _sampling_params(asked: dict[str, Any], kind: RequestOutputKind) -> SamplingParams:
    """Raises RefusedError that holds vLLM's own words."""
    try:
        return SamplingParams(**asked, output_kind=kind, detokenize=bool(asked.get("stop")), skip_clone=True)
    except (ValueError, TypeError) as error:
        raise RequestRejectedError(f"vLLM does not take these sampling parameters: {error}") from error


def _log_probs(output: CompletionOutput, asked: int) -> list[TokenLogProb] | None:
    if output.logprobs is None:
        return None
    return [
        _entry(token_id, position, asked)
        for token_id, position in zip(output.token_ids, output.logprobs, strict=True)
        if position is not None
    ]


def _entry(token_id: int, position: Mapping[int, Logprob], asked: int) -> TokenLogProb:
    """`position` holds the `asked` likeliest tokens with their ranks from 1, and the sampled one whatever its rank."""
    ranked = sorted((entry.rank or 0, token, entry.logprob) for token, entry in position.items())
    top = tuple((token, log_prob) for rank, token, log_prob in ranked if rank <= asked)
    return TokenLogProb(token_id, position[token_id].logprob, top)
