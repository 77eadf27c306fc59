"""verl's rollout engine as the loop's `Generator`. Written for verl 0.9.0 and 0.9.1."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.workers.rollout.replica import TokenOutput

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.generators.sampling_params import for_sglang, for_vllm
from verl_tool.agent_loop.generators.seeds import seed_of
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ToolFault
from verl_tool.protocol import FaultKind

STOP_REASONS = {"aborted": "aborted", "abort": "aborted", "stop": "stop", "length": "length"}
"""verl's reasons: ours. Its vLLM server says "completed" for an end token, a stop string and a full turn alike; its
SGLang server passes on SGLang's ``stop``, ``length`` and ``abort``."""


class EngineClient(Protocol):
    """What is used of verl's `LLMServerClient`."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], priority: int, **media: Any
    ) -> TokenOutput: ...


@dataclass
class EngineUse:
    """What one trajectory's turns told about the engine."""

    priority: int = 0
    """Smaller goes first in the engine's queue."""
    seed: int | None = None
    """Of the trajectory; None: sampled as the engine likes."""
    turns: int = 0
    """Asked for so far."""
    first_version: int | None = None
    """Number of weight updates before the trajectory's first turn."""
    last_version: int | None = None
    preemptions: int = 0
    routed_experts: Any = None
    """The last turn's, of all tokens that the engine was fed by then (``[tokens, layers, top_k]``); None: none told."""

    def note(self, output: TokenOutput) -> None:
        """Take over what the engine told with one turn."""
        oldest = output.extra_fields.get("min_global_steps")
        newest = output.extra_fields.get("max_global_steps")
        if self.first_version is None:
            self.first_version = oldest
        self.last_version = newest if newest is not None else self.last_version
        self.preemptions += max(0, output.num_preempted or 0)
        if output.routed_experts is not None:
            self.routed_experts = output.routed_experts


class VerlGenerator:
    """Generates by verl's load balancer; turns of one trajectory go to the same engine."""

    def __init__(
        self,
        client: EngineClient,
        engine: str | None,
        send: Callable[[ImagePart], object] = ImagePart.decode,
        max_images: int | None = None,
    ) -> None:
        """`engine`: its name in verl's config, such as ``vllm``. `send`: what it is given for an image; called in a
        thread. `max_images`: how many it takes in one trajectory (``limit_images``)."""
        self._client, self._engine, self._send, self._max_images = client, engine, send, max_images
        self._uses: dict[str, EngineUse] = {}

    def begin(self, trajectory_id: str, priority: int = 0, seed: int | None = None) -> None:
        """Start to note what a trajectory's turns tell. `seed`: each turn is sampled with one that follows from it."""
        self._uses[trajectory_id] = EngineUse(priority, seed)

    def end(self, trajectory_id: str) -> EngineUse:
        """What was noted since `begin`."""
        return self._uses.pop(trajectory_id)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        """As `ImageGenerator.generate`. Raises what Ray raises if the engine is lost, and ToolFault for more images
        than it takes: it would end the rollout of all others."""
        use = self._uses[request_id]
        if self._max_images is not None and len(images) > self._max_images:
            words = (
                f"{len(images)} images in one trajectory, and the engine takes {self._max_images}; raise limit_images"
            )
            raise ToolFault(FaultKind.MISCONFIGURED, words, retryable=False)
        media = {"image_data": await asyncio.to_thread(lambda: list(map(self._send, images)))} if images else {}
        if use.seed is not None:
            sampling_params = {**sampling_params, "seed": seed_of(use.seed, use.turns)}
        if self._engine == "vllm":
            sampling_params = for_vllm(sampling_params)
        elif self._engine == "sglang":
            sampling_params = for_sglang(sampling_params)
        use.turns += 1
        output = await self._client.generate(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, priority=use.priority, **media
        )
        use.note(output)
        return Generation(output.token_ids, output.log_probs or None, STOP_REASONS.get(output.stop_reason or ""))
