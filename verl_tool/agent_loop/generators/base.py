"""The interface between the loop and a model: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from verl_tool.content.parts import ImagePart

generating_summary: ContextVar[bool] = ContextVar("generating_summary", default=False)
"""Whether the current request to a generator is for a summary of the context and not for a turn."""


@dataclass(frozen=True)
class Generation:
    """One turn of the model."""

    token_ids: Sequence[int]
    """All generated tokens, including those of the stop string and the end-of-sequence token."""
    log_probs: Sequence[float] | None = None
    """Log-probability of each token under the sampling distribution of the engine. Same length as `token_ids`."""
    stop_reason: str | None = None
    """``stop`` (a stop string or an end token), ``length`` (`max_tokens`), ``aborted`` (by the engine), or None if the
    engine does not report it. The loop then derives it from the tokens."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further information from the engine (JSON values). `Trajectory.generator` has that of the last turn."""

    def cut(self, n: int) -> Generation:
        """Return the first `n` tokens, which end with a stop string."""
        log_probs = None if self.log_probs is None else self.log_probs[:n]
        return replace(self, token_ids=self.token_ids[:n], log_probs=log_probs, stop_reason="stop")


class ImageGenerator(Protocol):
    """A model that also reads images."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        """Continue `prompt_ids` like `Generator.generate`. `images` has one image per run of image tokens in
        `prompt_ids`, in order. Decode them in a worker thread.

        Raises ContentError if an image cannot be decoded, which ends the trajectory in a fault.
        """
        ...


class Generator(Protocol):
    """A model. Many trajectories call it concurrently."""

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        """Continue `prompt_ids`.

        `sampling_params` uses vLLM's names and meanings: ``max_tokens``, ``stop`` with
        ``include_stop_str_in_output=True``, ``stop_token_ids``, ``skip_special_tokens=False`` and the parameters of the
        loop's caller. Generation ends with the token that completes a stop string. That token is kept whole, even if it
        contains further text. Engines may return tokens after it, when they were interrupted within a stop string or
        draw several tokens at a time; the loop drops these. `request_id` is the same for all turns of a trajectory, so
        that they can share a cached prefix. The generator may modify `prompt_ids` and `sampling_params`.

        Raises ToolFault if the engine failed for this trajectory only. Any other exception ends the rollout.
        """
        ...
