"""Asks an endpoint for answers, many at a time."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from eval_service.evaluation.dataset import Problem
from eval_service.evaluation.record import Record
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.content.parts import ImagePart, from_wire, to_wire
from verl_tool.errors import ConfigError
from verl_tool.util.json_text import encode_json

OWNER = "verl-tool"
"""``owned_by`` of an endpoint that gives trajectories."""
MAX_RETRIES = 5


@dataclass(frozen=True)
class Asking:
    """How answers are asked for. None: the endpoint's default."""

    base_url: str
    api_key: str = "none"
    model: str | None = None
    """None: the only one that the endpoint serves."""
    samples: int = 1
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    """Sample `j` of a problem draws with ``seed + j``."""
    concurrency: int = 64
    timeout_seconds: float = 3600.0


class Asker:
    """An endpoint that answers problems. An async context manager."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._client = openai.AsyncOpenAI(
            base_url=asking.base_url,
            api_key=asking.api_key,
            timeout=asking.timeout_seconds,
            max_retries=MAX_RETRIES,
        )
        self.model = ""
        self.gives_trajectories = False
        self._fingerprint: object = None
        self.checkpoint: str | None = None
        """Which weights of a run the endpoint says to serve."""
        self.context_tokens: int | None = None
        """The longest context that the endpoint says to take, in tokens."""

    async def __aenter__(self) -> Asker:
        """Ask which models there are. Raises ConfigError if the endpoint does not answer, or serves another model."""
        try:
            cards = {card.id: card async for card in await self._client.models.list()}
        except openai.OpenAIError as error:
            raise ConfigError(
                f"{self._asking.base_url} does not tell its models: {error}; an endpoint that is starting says "
                "'serves at' when it is ready"
            ) from error
        if self._asking.model is None and len(cards) != 1:
            raise ConfigError(f"{self._asking.base_url} serves {sorted(cards)}; say which with --model")
        self.model = self._asking.model or next(iter(cards))
        if self.model not in cards:
            raise ConfigError(f"{self._asking.base_url} does not serve {self.model!r}; it serves {sorted(cards)}")
        self.gives_trajectories = cards[self.model].owned_by == OWNER
        further = cards[self.model].model_extra or {}
        self._fingerprint = further.get("fingerprint")
        self.checkpoint = None if further.get("checkpoint") is None else str(further["checkpoint"])
        context = further.get("max_model_len")
        self.context_tokens = context if isinstance(context, int) and context > 0 else None
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def ask_all(self, wanted: Sequence[tuple[Problem, int]], on_answer: Callable[[Record], None]) -> None:
        """Ask for each problem and number of sample; `on_answer` is told as answers come, in any order."""
        places = asyncio.Semaphore(self._asking.concurrency)

        async def one(problem: Problem, sample: int) -> None:
            async with places:
                record = await self.ask(problem, sample)
            on_answer(record)

        tasks = [asyncio.ensure_future(one(problem, sample)) for problem, sample in wanted]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def describe(self) -> dict[str, Any]:
        """What answered, and how it was asked: what two evaluations must share to be compared."""
        asking = self._asking
        return {
            "model": self.model,
            "checkpoint": self.checkpoint,
            "fingerprint": self._fingerprint,
            "samples": asking.samples,
            "temperature": asking.temperature,
            "top_p": asking.top_p,
            "max_tokens": asking.max_tokens,
            "seed": asking.seed,
        }

    def digest(self, problem: Problem) -> str:
        """Changes with the problem, with the model and its loop (if the endpoint tells), and with the sampling."""
        return hashlib.sha256(encode_json(self.digest_parts(problem))).hexdigest()[:16]

    def digest_parts(self, problem: Problem) -> list[Any]:
        """What `digest` changes with."""
        asking = self._asking
        sampling = [asking.temperature, asking.top_p, asking.max_tokens, asking.seed]
        return [problem.digest, self.model, self._fingerprint, sampling]

    async def ask(self, problem: Problem, sample: int) -> Record:
        """One answer. What prevents it is in the record; the client has tried again by then."""
        began = time.perf_counter()
        blank = Record(problem.index, sample, self.digest(problem), problem=problem.digest)
        try:
            answer = await self._client.chat.completions.create(**self._request(problem, sample))
        except openai.OpenAIError as error:
            return replace(blank, error=f"{type(error).__name__}: {error}")
        return _record(blank, answer, time.perf_counter() - began, problem)

    def _request(self, problem: Problem, sample: int) -> dict[str, Any]:
        asking = self._asking
        request: dict[str, Any] = {"model": self.model, "messages": _messages(problem)}
        limits = {"temperature": asking.temperature, "top_p": asking.top_p, "max_tokens": asking.max_tokens}
        request |= {name: value for name, value in limits.items() if value is not None}
        if asking.seed is not None:
            request["seed"] = asking.seed + sample
        if self.gives_trajectories:
            request["extra_body"] = {"return_trajectory": True}
            if problem.tools_kwargs:
                request["extra_body"]["extra_fields"] = dict(problem.tools_kwargs)
            if problem.verification is not None:
                request["extra_body"]["verification"] = problem.verification.model_dump(mode="json")
            for name in ("max_turns", "min_turns"):
                if (turns := getattr(problem, name)) is not None:
                    request["extra_body"][name] = turns
            if problem.tools is not None:
                request["tools"] = [{"type": "function", "function": {"name": name}} for name in problem.tools]
            if not problem.use_tool:
                request["tool_choice"] = "none"
        return request


def _messages(problem: Problem) -> list[dict[str, Any]]:
    """The messages as OpenAI takes them, with each image as a data URI in its place."""
    left = iter(problem.images)

    def part(given: dict[str, Any]) -> dict[str, Any]:
        if given["type"] != "image":
            return given
        return {"type": "image_url", "image_url": {"url": to_wire(next(left))}}

    return [
        {**message, "content": [part(each) for each in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in problem.messages
    ]


def _record(blank: Record, answer: ChatCompletion, seconds: float, problem: Problem) -> Record:
    choice = answer.choices[0]
    further = choice.model_extra or {}
    sent = further.get("trajectory")
    trajectory = None if sent is None else Trajectory.from_json(encode_json(sent))
    if trajectory is not None and (problem.images or further.get("images")):
        images = {image.sha256: image for image in problem.images}
        images |= {name: image for name, uri in (further.get("images") or {}).items() if (image := _image(uri))}
        seen = {segment.image for segment in trajectory.segments}
        trajectory = replace(trajectory, images={name: image for name, image in images.items() if name in seen})
    usage = answer.usage.model_dump() if answer.usage is not None else {}
    return replace(
        blank,
        content=choice.message.content or "",
        finish_reason=choice.finish_reason,
        stop_reason=further.get("stop_reason"),
        usage={name: value for name, value in usage.items() if isinstance(value, int)},
        seconds=seconds,
        trajectory=trajectory,
    )


def _image(uri: str) -> ImagePart | None:
    part = from_wire(uri)
    return part if isinstance(part, ImagePart) else None
