"""Generate the model's turns: build the request, parse the answer, and find the limit that cut it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from verl_tool.agent_loop.actions import ParsedTurn, length_to_stop, stopped_action
from verl_tool.agent_loop.generators.base import Generation, Generator, ImageGenerator, generating_summary
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.rendering.images import ImagePlacer
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import StopReason
from verl_tool.agent_loop.trajectory_builder import TrajectoryBuilder, now
from verl_tool.errors import ContentError, ToolFault
from verl_tool.formats import Format
from verl_tool.protocol import FaultKind


class TurnWriter:
    """Generates turns and appends them to a trajectory."""

    def __init__(
        self,
        generator: Generator | ImageGenerator,
        tokenizer: Tokenizer,
        options: EpisodeOptions,
        end_token_ids: frozenset[int],
        image_placer: ImagePlacer | None,
    ) -> None:
        """`end_token_ids` are those with which the chat template closes a turn. Without `image_placer`, the model reads
        text only."""
        self._generator, self._tokenizer, self._options = generator, tokenizer, options
        self._end_token_ids = end_token_ids | tokenizer.eos_token_ids
        self._stop_token_ids = sorted(self._end_token_ids - tokenizer.eos_token_ids)
        self._image_placer = image_placer

    async def write(self, builder: TrajectoryBuilder, *, summary: bool = False) -> tuple[ParsedTurn, StopReason | None]:
        """Generate and append one turn, or a `summary` of the context. Returns a stop reason if the trajectory ends,
        which the length limit of a summary does not cause."""
        params = self._sampling_params(builder, summary)
        maximum: int | None = params.get("max_tokens")
        started, token = now(), generating_summary.set(summary)
        try:
            images: dict[str, Any] = {"images": visible} if (visible := builder.visible_images) else {}
            generation = await asyncio.wait_for(
                self._generator.generate(list(builder.context), params, builder.trajectory_id, **images),
                self._options.generation_timeout,
            )
        except ContentError as error:
            raise ToolFault(FaultKind.TOOL_CRASHED, str(error), retryable=False) from error
        except asyncio.TimeoutError:
            raise ToolFault(
                FaultKind.TIMEOUT,
                f"the model wrote no turn within generation_timeout={self._options.generation_timeout} s; "
                "raise it, or check the engine",
                retryable=False,
            ) from None
        finally:
            generating_summary.reset(token)
            seconds = now() - started
            builder.generate_seconds += seconds
        _check(generation, maximum)
        banned = self._image_placer.tokens.banned_ids if self._image_placer is not None else ()
        if not set(banned).isdisjoint(generation.token_ids):
            words = "the model wrote a token for a part of an image; configure the engine to never sample it"
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        generation = up_to_stop(generation, params, self._tokenizer)
        turn = self.parse(generation.token_ids, builder.formats)
        builder.append_generation(generation, turn, seconds, summary=summary)
        if generation.stop_reason == "aborted":
            return turn, StopReason.ABORTED
        if summary:
            return turn, None
        return turn, self._cut(builder, generation, turn, maximum)

    def _sampling_params(self, builder: TrajectoryBuilder, summary: bool) -> dict[str, Any]:
        params = dict(builder.sampling_params)
        own = self._options.summary_tokens if summary else self._options.max_action_length
        limits = [params.get("max_tokens"), own, builder.remaining_tokens]
        maximum = min((n for n in limits if n is not None), default=None)
        if maximum is not None:
            params["max_tokens"] = maximum
        stops = self._stops(builder, summary)
        if stops:
            params["stop"] = stops
            params["include_stop_str_in_output"] = True
            # A stop string may be a special token, which engines do not find if they skip it in the text.
            params["skip_special_tokens"] = False
        if self._stop_token_ids:
            params["stop_token_ids"] = sorted({*(params.get("stop_token_ids") or ()), *self._stop_token_ids})
        return params

    def _stops(self, builder: TrajectoryBuilder, summary: bool = False) -> list[str]:
        """Return the strings at which a turn ends: the caller's, and those of actions unless this is a summary."""
        own = builder.sampling_params.get("stop") or ()
        return [
            *([own] if isinstance(own, str) else own),
            *(self._options.action_stop_tokens if builder.uses_tools and not summary else ()),
        ]

    def parse(self, token_ids: Sequence[int], formats: Sequence[Format]) -> ParsedTurn:
        """Parse the turn `token_ids`, without the tokens that end it."""
        n = len(token_ids)
        while n and token_ids[n - 1] in self._end_token_ids:
            n -= 1
        text = self._tokenizer.decode(token_ids[:n])
        raw_text = self._tokenizer.decode(token_ids) if n < len(token_ids) else text
        return ParsedTurn.parse(text, raw_text, self._options.action_stop_tokens, formats)

    def _cut(
        self, builder: TrajectoryBuilder, generation: Generation, turn: ParsedTurn, maximum: int | None
    ) -> StopReason | None:
        """Return the limit that cut the model's turn before its end, or None."""
        full = generation.stop_reason == "length" or (maximum is not None and len(generation.token_ids) >= maximum)
        complete = turn.text != turn.raw_text or stopped_action(turn.raw_text, self._stops(builder)) is not None
        if not full or complete or generation.stop_reason == "stop":
            return None
        remaining = builder.remaining_tokens
        # A turn shorter than the loop's limit was cut by the engine's context window.
        window_full = maximum is None or len(generation.token_ids) < maximum
        if window_full or (remaining is not None and remaining <= 0):
            return StopReason.MAX_RESPONSE_LENGTH
        return StopReason.MAX_ACTION_LENGTH


def up_to_stop(generation: Generation, sampling_params: Mapping[str, Any], tokenizer: Tokenizer) -> Generation:
    """Drop the tokens after the one that completes the first of the requested stop strings."""
    stop = sampling_params.get("stop") or ()
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    n = length_to_stop(generation.token_ids, stops, tokenizer, int(sampling_params.get("min_tokens") or 0))
    return generation if n is None else generation.cut(n)


def _check(generation: Generation, maximum: int | None) -> None:
    """Raise ValueError if a generator violates its contract, which would make all later masks wrong."""
    n = len(generation.token_ids)
    if generation.log_probs is not None and len(generation.log_probs) != n:
        raise ValueError(f"the generator gave {n} tokens and {len(generation.log_probs)} log-probabilities")
    if maximum is not None and n > maximum:
        raise ValueError(f"the generator gave {n} tokens for max_tokens={maximum}")
