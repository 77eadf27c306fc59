"""From a request to the answers that are wanted."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from eval_service.openai.errors import TemplateRejectedError, bad_request
from eval_service.openai.image_reader import SentImage
from eval_service.openai.requests import MAX_CHOICES, ChatRequest, CompletionRequest, GenerationRequest
from eval_service.openai.response_builder import ResponseBuilder
from eval_service.service import GenerationJob, Service
from verl_tool.agent_loop.observation_renderer import ObservationRenderer
from verl_tool.agent_loop.prompt.opened_prompt import OpenPrompt
from verl_tool.agent_loop.row import build_call_extra
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError
from verl_tool.protocol import ENVIRONMENT_FIELD

INLINE_CHARACTERS = 4 << 10
"""Longer texts are rendered and made tokens in a thread."""
TOKENIZING_THREADS = 2
_WORDS = 300
"""Characters of a chat template's own error that are quoted."""

_tokenizing = ThreadPoolExecutor(TOKENIZING_THREADS, thread_name_prefix="tokenizing")
Result = TypeVar("Result")

USER_FIELD = "user"
"""Entry of a trajectory's `extra`."""


@dataclass(frozen=True)
class Plan:
    """All answers of one request: prompt by prompt, `n` of each."""

    jobs: tuple[GenerationJob, ...]
    n: int
    stops: tuple[str, ...]
    """The request's own stop strings; they are not shown."""
    log_probs: bool
    with_trajectory: bool
    include_usage: bool
    """A stream ends with a chunk of its own for the usage."""


async def chat_plan(request: ChatRequest, service: Service, builder: ResponseBuilder) -> Plan:
    """Raises HttpError if the conversation cannot be answered."""
    _reject_too_many(request, 1, "messages")
    messages = [message.for_template() for message in request.messages]
    size = sum(len(message.text) for message in request.messages)
    service.check_prompt_size(size, "messages")
    images = await _images(request, service)
    await service.check_tool_names(request.tool_names)
    listed = service.listed_tools(request.tool_names)
    if service.uses_tools and ENVIRONMENT_FIELD in (request.extra_fields or {}):
        return await _plan_in_environment(request, service, builder, messages, images)
    prompts = await service.prompts(listed)
    try:
        text = await run_in_executor(lambda: prompts.text(messages, listed), size)
    except TemplateRejectedError as error:
        raise bad_request(str(error)[:_WORDS], param="messages", code="invalid_value") from None
    prompt_ids = await _encoded(text, service, "messages")
    service.check_prompt(prompt_ids, "messages", len(prompts.described_tools(listed)), images)
    renderer = prompts.observations(listed) if listed != () else None
    task_prompt = functools.partial(prompts.task_ids, messages, listed)
    return await _plan(request, service, builder, [prompt_ids], renderer, images, task_prompt)


async def _plan_in_environment(
    request: ChatRequest,
    service: Service,
    builder: ResponseBuilder,
    messages: Sequence[Mapping[str, Any]],
    images: tuple[ImagePart, ...],
) -> Plan:
    """The plan of a conversation that begins in an environment. Raises HttpError if it cannot be rendered."""
    if request.stream:
        raise bad_request("an answer that begins in an environment is not streamed; leave out 'stream'", param="stream")
    opener = await service.prompt_opener()
    try:
        prompt_ids, open_prompt = opener.of(messages, request.tool_names, "the request")
        extra = build_call_extra(request.extra_fields, None, "the request")
    except (TemplateRejectedError, ConfigError) as error:
        raise bad_request(str(error)[:_WORDS], param="messages", code="invalid_value") from None
    return await _plan(request, service, builder, [prompt_ids], images=images, open_prompt=open_prompt, extra=extra)


async def _images(request: ChatRequest, service: Service) -> tuple[ImagePart, ...]:
    """The images of a conversation. Raises HttpError if the model cannot read them, or nobody can."""
    sent = [
        SentImage(url, f"messages.{i}.content.{n}")
        for i, message in enumerate(request.messages)
        for n, url in message.images
    ]
    if not sent:
        return ()
    if service.image_tokens is None:
        words = f"'{sent[0].where}' is an image, and the model {request.model!r} {service.why_no_images}; leave it out"
        raise bad_request(words, param=sent[0].where, code="image_not_supported")
    return await service.image_reader.read(sent)


async def completion_plan(request: CompletionRequest, service: Service, builder: ResponseBuilder) -> Plan:
    """Raises HttpError if a prompt cannot be continued."""
    if ENVIRONMENT_FIELD in (request.extra_fields or {}):
        message = f"'extra_fields.{ENVIRONMENT_FIELD}' shows its messages in a chat; send a chat, or leave it out"
        raise bad_request(message, param="extra_fields")
    _reject_too_many(request, len(request.prompts), "prompt")
    prompts = [
        await _encoded(prompt, service, "prompt") if isinstance(prompt, str) else list(prompt)
        for prompt in request.prompts
    ]
    for prompt_ids in prompts:
        service.check_prompt(prompt_ids, "prompt")
    await service.check_tool_names(request.tool_names)
    return await _plan(request, service, builder, prompts)


def _reject_too_many(request: GenerationRequest, prompts: int, param: str) -> None:
    """Before any of the prompts is looked at."""
    n = request.n or 1
    if not 1 <= n * prompts <= MAX_CHOICES:
        message = f"{prompts} prompts times n={n} answers; one request takes from 1 to {MAX_CHOICES} answers"
        raise bad_request(message, param="n" if prompts > 0 else param)


async def _encoded(text: str, service: Service, param: str) -> list[int]:
    service.check_prompt_size(len(text), param)
    return await run_in_executor(lambda: service.tokenizer.encode(text), len(text))


async def run_in_executor(work: Callable[[], Result], characters: int) -> Result:
    """What `work` gives. On a long text it is done in a thread: a megabyte takes seconds to be made tokens."""
    if characters <= INLINE_CHARACTERS:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_tokenizing, work)


async def _plan(
    request: GenerationRequest,
    service: Service,
    builder: ResponseBuilder,
    prompts: Sequence[list[int]],
    renderer: ObservationRenderer | None = None,
    images: tuple[ImagePart, ...] = (),
    task_prompt: Callable[[str], Sequence[int]] | None = None,
    open_prompt: OpenPrompt | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Plan:
    if service.options.subagents and (request.stream or task_prompt is None):
        message = (
            "this model has sub-agents, which answer neither streams nor completions; send a chat without 'stream'"
        )
        raise bad_request(message, param="stream" if request.stream else "prompt")
    if service.options.context != "append" and request.stream and task_prompt is None:
        message = (
            f"the context of this model is cut (context={service.options.context}), so a completion is not one text "
            "that grows; leave out 'stream', or send a chat"
        )
        raise bad_request(message, param="stream")
    n = request.n or 1
    formats = await service.formats_of(request.tool_names)
    extra = dict(request.extra_fields or {}) if extra is None else extra
    jobs = [
        GenerationJob(
            trajectory_id=f"{builder.id}-{i * n + j}",
            prompt_ids=prompt,
            images=images,
            sampling_params=sampling_params(request, service, j),
            token_limit=request.token_limit,
            tool_names=request.tool_names,
            formats=formats,
            renderer=renderer,
            max_turns=request.max_turns,
            min_turns=request.min_turns,
            extra=extra,
            verification=request.verification,
            task_prompt=task_prompt,
            open_prompt=open_prompt,
            record={} if request.user is None else {USER_FIELD: request.user},
        )
        for i, prompt in enumerate(prompts)
        for j in range(n)
    ]
    return Plan(
        jobs=tuple(jobs),
        n=n,
        stops=request.stops,
        log_probs=request.top_log_probs is not None,
        with_trajectory=request.return_trajectory,
        include_usage=request.stream_options is not None and request.stream_options.include_usage,
    )


def sampling_params(request: GenerationRequest, service: Service, choice: int) -> dict[str, Any]:
    """The engine's parameters for choice number `choice` of a prompt; what the request leaves out is the service's."""
    params = {
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
    return service.sampling.model_dump() | {name: value for name, value in params.items() if value is not None}
