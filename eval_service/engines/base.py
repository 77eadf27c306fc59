"""What the endpoint asks of an engine: the loop's `Generator`, and tokens as they come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.content.parts import ImagePart
from verl_tool.errors import VerlToolError


class EngineError(VerlToolError):
    """The engine failed or cannot be reached; another try, or another replica, may do."""


class RequestRejectedError(VerlToolError):
    """The engine takes a request as wrong; the same request will always be refused."""


@dataclass(frozen=True)
class TokenLogProb:
    """Log-probability of one generated token, and the likeliest tokens in its place."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()
    """``(token id, log-probability)``, likeliest first; as many as were asked for."""


@dataclass(frozen=True)
class TokenChunk:
    """Some tokens of a turn, as they come."""

    token_ids: Sequence[int]
    log_probs: Sequence[TokenLogProb] | None = None
    """One a token; None if none were asked for."""


Listener = Callable[[TokenChunk], Awaitable[None]]
"""Told of every chunk. While it is awaited the engine may put what comes in the meantime into one chunk."""


class Engine(Protocol):
    """A model that many trajectories ask at once."""

    max_model_len: int
    """Most tokens of prompt and response together."""
    vocab_size: int
    """Token ids lie below it."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        listen: Listener | None = None,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        """As `ImageGenerator.generate`; `listen` is told of the tokens while they come, all of them before this
        returns. `images` are given only to an engine of a model that reads them.

        ``logprobs=k`` in `sampling_params` asks for log-probabilities: of the sampled token, and of the `k` likeliest.
        Cancelled, the engine stops generating. Raises EngineError and RefusedError.
        """

    async def check(self) -> None:
        """Raise EngineError if it can no longer serve."""

    async def close(self) -> None:
        """Free what it holds; what runs is aborted."""
