"""Use a transformers model as the loop's `Generator`, for notebooks and tests. Waiting requests run as one batch.

This is the only file of the loop that imports torch and transformers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationMixin, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.generators.qwen_images import QwenImages
from verl_tool.agent_loop.tokenizer import Tokenizer, token_ids
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError, ToolFault
from verl_tool.protocol import FaultKind

if TYPE_CHECKING:
    from PIL.Image import Image

_OURS = frozenset({"max_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"})

_SET_HERE = frozenset(
    {"input_ids", "inputs", "inputs_embeds", "attention_mask", "max_new_tokens", "max_length", "stopping_criteria"}
    | {"stop_strings", "return_dict_in_generate", "output_scores", "num_return_sequences", "num_beams", "streamer"}
)
"""Arguments of ``model.generate`` that this file sets."""


class TransformersGenerator:
    """Generates with `model.generate` in a thread. All waiting requests form one left-padded batch."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        generation_kwargs: Mapping[str, Any] | None = None,
        max_batch_size: int = 64,
        default_max_tokens: int = 256,
        images: QwenImages | None = None,
    ) -> None:
        """`generation_kwargs` are passed to ``model.generate`` (``do_sample``, ``temperature``, ``pad_token_id``, …).

        Their ``eos_token_id`` replaces the tokenizer's end tokens. With -1, only stop strings and lengths end a turn.
        `images` says how the model reads images; None means that it reads text only. Raises ConfigError for arguments
        that the generator sets itself.
        """
        self.model, self._tokenizer = model, tokenizer
        self._kwargs = dict(generation_kwargs or {})
        local = sorted(_SET_HERE & set(self._kwargs))
        if local:
            raise ConfigError(
                f"generation_kwargs has {local[0]!r}, which the loop sets for each batch; leave it out (lengths and "
                "stop strings are options of the loop)"
            )
        self._end_token_ids = tokenizer.eos_token_ids
        if "eos_token_id" in self._kwargs:
            self._end_token_ids = frozenset(token_ids(self._kwargs.pop("eos_token_id")))
        pad = token_ids(self._kwargs.pop("pad_token_id", None))
        self._pad = pad[0] if pad else min(tokenizer.eos_token_ids, default=0)
        self._max_batch_size, self._default_max_tokens = max_batch_size, default_max_tokens
        self._images = images
        self._waiting: deque[_Request] = deque()
        self._worker: asyncio.Task[None] | None = None

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        """Implement `ImageGenerator.generate`. Raises ValueError for a sampling parameter that only engines support,
        and ToolFault for images if `images` is not set."""
        if images and self._images is None:
            words = f"{type(self.model).__name__} got images but does not know how to read them; set `images`"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        unknown = sorted(set(sampling_params) - _OURS)
        if unknown:
            raise ValueError(f"sampling parameter {unknown[0]!r} is an engine's; give generation_kwargs instead")
        request = _Request(
            prompt_ids,
            sampling_params.get("max_tokens", self._default_max_tokens),
            tuple(sampling_params.get("stop", ())),
            self._end_token_ids | set(sampling_params.get("stop_token_ids", ())),
            await asyncio.to_thread(lambda: [image.decode() for image in images]) if images else [],
        )
        self._waiting.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.get_running_loop().create_task(self._work())
        return await request.answer

    async def _work(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # let all requests that are ready join the batch
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_batch_size))]
            try:
                answers = await asyncio.to_thread(self._run, batch)
            except Exception as error:  # noqa: BLE001 - whatever it is, the waiting requests must receive it
                for request in batch:
                    request.fail(error)
            else:
                for request, answer in zip(batch, answers, strict=True):
                    request.succeed(answer)

    @torch.no_grad()
    def _run(self, batch: list[_Request]) -> list[Generation]:
        width = max(len(request.prompt_ids) for request in batch)
        rows = [[self._pad] * (width - len(r.prompt_ids)) + r.prompt_ids for r in batch]
        mask = [[0] * (width - len(r.prompt_ids)) + [1] * len(r.prompt_ids) for r in batch]
        ends = _RowEnds(batch, width, self._tokenizer)
        input_ids = torch.tensor(rows, device=self.model.device)
        assert isinstance(self.model, GenerationMixin)  # else it cannot generate at all
        output = self.model.generate(
            input_ids=input_ids,
            attention_mask=torch.tensor(mask, device=self.model.device),
            max_new_tokens=max(request.max_tokens for request in batch),
            stopping_criteria=StoppingCriteriaList([ends]),
            pad_token_id=self._pad,
            eos_token_id=None,  # `_RowEnds` knows each row's own end tokens
            return_dict_in_generate=True,
            output_scores=True,
            **self._features(batch, input_ids),
            **self._kwargs,
        )
        # [step, row, vocabulary] -> log-probabilities of the distribution that was sampled from
        log_probs = torch.stack(output.scores).float().log_softmax(-1)
        return [self._generation(i, batch[i], output.sequences[i, width:], ends, log_probs) for i in range(len(batch))]

    def _features(self, batch: Sequence[_Request], input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the model's arguments for the images of a batch."""
        images = [image for request in batch for image in request.images]
        if self._images is None or not images:
            return {}
        features = {name: value.to(self.model.device) for name, value in self._images.features(images).items()}
        return {**features, "mm_token_type_ids": (input_ids == self._images.pad_id).int()}

    def _generation(
        self, row: int, request: _Request, tokens: torch.Tensor, ends: _RowEnds, log_probs: torch.Tensor
    ) -> Generation:
        n = ends.lengths[row] or len(tokens)
        ids = tokens[:n]
        chosen = log_probs[:n, row].gather(-1, ids.unsqueeze(-1)).squeeze(-1)
        return Generation(ids.tolist(), chosen.tolist(), "stop" if ends.by_stop[row] else "length")


@dataclass(eq=False)
class _Request:
    prompt_ids: list[int]
    max_tokens: int
    stop: tuple[str, ...]
    end_token_ids: frozenset[int]
    images: Sequence[Image]
    answer: asyncio.Future[Generation] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def succeed(self, generation: Generation) -> None:
        if not self.answer.done():  # the request may have been cancelled
            self.answer.set_result(generation)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class _RowEnds(StoppingCriteria):
    """Stops each row at its stop string, end token or length, and records where."""

    def __init__(self, batch: list[_Request], width: int, tokenizer: Tokenizer) -> None:
        self._batch, self._width, self._tokenizer = batch, width, tokenizer
        self.lengths: list[int] = [0] * len(batch)
        """Number of tokens of each row; 0 while it is running."""
        self.by_stop = [False] * len(batch)
        # A stop string ends in the last token, and a token holds at least one byte of it.
        self._tails = [max((len(stop.encode()) for stop in r.stop), default=0) + 4 for r in batch]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        generated = input_ids[:, self._width :]
        n = generated.shape[1]
        for i, request in enumerate(self._batch):
            if self.lengths[i]:
                continue
            if request.answer.cancelled():
                self.lengths[i] = n
                continue
            self.by_stop[i] = self._stops(request, generated[i, -self._tails[i] :].tolist())
            if self.by_stop[i] or n >= request.max_tokens:
                self.lengths[i] = n
        return torch.tensor([bool(n) for n in self.lengths], device=input_ids.device)

    def _stops(self, request: _Request, tail: list[int]) -> bool:
        if tail[-1] in request.end_token_ids:
            return True
        return bool(request.stop) and any(stop in self._tokenizer.decode(tail) for stop in request.stop)
