"""From a request to the answers that are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eval_service.envelope import Envelope
from eval_service.errors import TemplateRefusedError, bad_request
from eval_service.requests import MOST_CHOICES, ChatRequest, CompletionRequest, GenerationRequest
from eval_service.service import Ask, Service
from verl_tool.agent_loop.tokenizer import render_prompt

USER_FIELD = "user"
"""Entry of a trajectory's `extra`."""


@dataclass(frozen=True)
class Plan:
    """All answers of one request: prompt by prompt, `n` of each."""

    asks: tuple[Ask, ...]
    n: int
    stops: tuple[str, ...]
    """The request's own stop strings; they are not shown."""
    log_probs: bool
    with_trajectory: bool
    include_usage: bool
    """A stream ends with a chunk of its own for the usage."""


async def chat_plan(request: ChatRequest, service: Service, envelope: Envelope) -> Plan:
    """Raises ApiError if the conversation cannot be answered."""
    messages = [message.for_template() for message in request.messages]
    try:
        prompt_ids = render_prompt(service.tokenizer, messages)
    except TemplateRefusedError as error:
        raise bad_request(str(error), param="messages", code="invalid_value") from None
    return await _plan(request, service, envelope, [prompt_ids], "messages")


async def completion_plan(request: CompletionRequest, service: Service, envelope: Envelope) -> Plan:
    """Raises ApiError if a prompt cannot be continued."""
    prompts = [
        service.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in request.prompts
    ]
    return await _plan(request, service, envelope, prompts, "prompt")


async def _plan(
    request: GenerationRequest, service: Service, envelope: Envelope, prompts: Sequence[list[int]], param: str
) -> Plan:
    n = request.n or 1
    if not 1 <= n * len(prompts) <= MOST_CHOICES:
        message = f"{len(prompts)} prompts times n={n} answers; one request takes from 1 to {MOST_CHOICES} answers"
        raise bad_request(message, param="n" if len(prompts) > 0 else param)
    for prompt in prompts:
        service.check_prompt(prompt, param)
    await service.check_tool_names(request.tool_names)
    extra = dict(request.extra_fields or {})
    asks = [
        Ask(
            trajectory_id=f"{envelope.id}-{i * n + j}",
            prompt_ids=prompt,
            sampling_params=sampling_params(request, service, j),
            token_limit=request.token_limit,
            tool_names=request.tool_names,
            extra=extra,
            record={} if request.user is None else {USER_FIELD: request.user},
        )
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]
    return Plan(
        asks=tuple(asks),
        n=n,
        stops=request.stops,
        log_probs=request.top_log_probs is not None,
        with_trajectory=request.return_trajectory,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
    )


def sampling_params(request: GenerationRequest, service: Service, choice: int) -> dict[str, Any]:
    """The engine's parameters for choice number `choice` of a prompt; what the request leaves out is the service's."""
    asked = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": request.logit_bias,
        "logprobs": request.top_log_probs,
        "seed": None if request.seed is None else request.seed + choice,
        "stop": list(request.stops) or None,
    }
    return service.sampling.params() | {name: value for name, value in asked.items() if value is not None}
