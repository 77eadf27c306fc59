"""Use verl's rollout engine as the loop's `Generator`. Written for verl 0.9.0 and 0.9.1."""

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
"""Maps verl's stop reasons to the loop's. verl's vLLM server says "completed" for an end token, a stop string and a
full turn alike; its SGLang server passes on SGLang's ``stop``, ``length`` and ``abort``."""


class EngineClient(Protocol):
    """The part of verl's `LLMServerClient` that is used here."""

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], priority: int, **media: Any
    ) -> TokenOutput: ...


@dataclass
class EngineUse:
    """What the engine reported about one trajectory's turns."""

    priority: int = 0
    """Priority in the engine's queue. Smaller values run first."""
    seed: int | None = None
    """Seed of the trajectory; None leaves sampling to the engine."""
    turns: int = 0
    """Number of turns requested so far."""
    first_version: int | None = None
    """Number of weight updates before the trajectory's first turn."""
    last_version: int | None = None
    preemptions: int = 0
    routed_experts: Any = None
    """Experts of all tokens up to the last turn (``[tokens, layers, top_k]``); None if the engine reports none."""

    def update(self, output: TokenOutput) -> None:
        """Add what the engine reported with one turn."""
        oldest = output.extra_fields.get("min_global_steps")
        newest = output.extra_fields.get("max_global_steps")
        if self.first_version is None:
            self.first_version = oldest
        self.last_version = newest if newest is not None else self.last_version
        self.preemptions += max(0, output.num_preempted or 0)
        if output.routed_experts is not None:
            self.routed_experts = output.routed_experts


class VerlGenerator:
    """Generates through verl's load balancer. All turns of a trajectory go to the same engine."""

    def __init__(
        self,
        client: EngineClient,
        engine: str | None,
        send: Callable[[ImagePart], object] = ImagePart.decode,
        max_images: int | None = None,
    ) -> None:
        """`engine` is its name in verl's config, such as ``vllm``. `send` runs in a thread and converts an image for
        the engine. `max_images` is the engine's limit per trajectory (``limit_images``)."""
        self._client, self._engine, self._send, self._max_images = client, engine, send, max_images
        self._uses: dict[str, EngineUse] = {}

    def begin(self, trajectory_id: str, priority: int = 0, seed: int | None = None) -> None:
        """Start to record a trajectory's use of the engine. The seed of each turn is derived from `seed`."""
        self._uses[trajectory_id] = EngineUse(priority, seed)

    def end(self, trajectory_id: str) -> EngineUse:
        """Return what was recorded since `begin`."""
        return self._uses.pop(trajectory_id)

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        """Implement `ImageGenerator.generate`. Raises ToolFault for more images than the engine accepts, since its own
        error would end the whole rollout. Raises what Ray raises if the engine is lost."""
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
        use.update(output)
        return Generation(output.token_ids, output.log_probs or None, STOP_REASONS.get(output.stop_reason or ""))
