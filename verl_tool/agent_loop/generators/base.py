"""What the loop asks of a model: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from verl_tool.content.parts import ImagePart

generating_summary: ContextVar[bool] = ContextVar("generating_summary", default=False)
"""Whether what a generator is asked for is a summary of the context, not a turn."""


@dataclass(frozen=True)
class Generation:
    """One turn of the model."""

    token_ids: Sequence[int]
    """All that was generated: the stop string's tokens and the end-of-sequence token too."""
    log_probs: Sequence[float] | None = None
    """Log-probability of each token under the sampling distribution of the engine. Same length as `token_ids`."""
    stop_reason: str | None = None
    """``stop`` (a stop string or an end token), ``length`` (`max_tokens`), ``aborted`` (the engine gave up), or None
    if the engine does not tell; the loop then finds out from the tokens."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the engine tells (JSON values); the last turn's ends up in `Trajectory.generator`."""

    def cut(self, n: int) -> Generation:
        """The first `n` tokens, which a stop string ended."""
        log_probs = None if self.log_probs is None else self.log_probs[:n]
        return replace(self, token_ids=self.token_ids[:n], log_probs=log_probs, stop_reason="stop")


class ImageGenerator(Protocol):
    """A model behind an engine that reads images too."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        """As `Generator.generate`. `images`: one for each run of image tokens in `prompt_ids`, in their order; decode
        them in a worker.

        Raises ContentError if one cannot be decoded: a fault of that trajectory.
        """
        ...


class Generator(Protocol):
    """A model behind an engine. Many trajectories call it at once."""

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], request_id: str) -> Generation:
        """Continue `prompt_ids`.

        `sampling_params` has vLLM's names and meanings: ``max_tokens``, ``stop`` with
        ``include_stop_str_in_output=True``, ``stop_token_ids``, ``skip_special_tokens=False`` and what the caller of
        the loop added. Generation ends with the token in which a stop string becomes complete: that token is kept
        whole, even if text follows within it. The loop drops tokens behind it: an engine gives some if it was
        interrupted between the tokens of a stop string, or if it draws several tokens at a time. `request_id` is the
        same for all turns of a trajectory, so that they may share a cached prefix. Both arguments are the generator's
        own to change.

        Raises ToolFault if the engine failed this trajectory only; any other exception ends the rollout.
        """
        ...
