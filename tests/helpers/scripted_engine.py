"""An engine that answers by a rule and keeps a real one's promises: streaming, limits, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from toy_model import Template, ToyTokenizer

from eval_service.engines.base import EngineError, Listener, TokenChunk, TokenLogProb
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.content.parts import ImagePart

Rule = Callable[[str], str]
"""Maps all text so far to the model's next turn."""


class RuleEngine:
    """Writes the text of `rule` one token at a time, followed by its end token."""

    def __init__(self, tokenizer: ToyTokenizer, rule: Rule, *, max_model_len: int = 4096, pause: float = 0.0) -> None:
        self.max_model_len, self.vocab_size = max_model_len, len(tokenizer.vocabulary)
        self.tokenizer, self.rule, self.pause = tokenizer, rule, pause
        self.running = 0
        self.most_running = 0
        self.cancelled = 0
        self.dead = False
        self.params: list[dict[str, Any]] = []
        self.seen: list[list[ImagePart]] = []
        """The images of each turn."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        listen: Listener | None = None,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        if self.dead:
            raise EngineError("it is dead")
        self.seen.append(list(images))
        self.params.append(sampling_params)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._write(prompt_ids, sampling_params, listen)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def _write(self, prompt_ids: list[int], params: dict[str, Any], listen: Listener | None) -> Generation:
        turn = self.tokenizer.encode(self.rule(self.tokenizer.decode(prompt_ids)))
        turn.append(min(self.tokenizer.eos_token_ids))
        asked = params.get("logprobs")
        written: list[int] = []
        reason = "length"
        while len(written) < params["max_tokens"]:
            token = turn[len(written)]
            written.append(token)
            await asyncio.sleep(self.pause)
            if listen is not None:
                entry = TokenLogProb(token, -0.5, ((token, -0.5), (0, -1.5))[: asked or 0])
                await listen(TokenChunk([token], None if asked is None else [entry]))
            text = self.tokenizer.decode(written)
            if token in self.tokenizer.eos_token_ids or any(stop in text for stop in params.get("stop", ())):
                reason = "stop"
                break
        return Generation(written, None if asked is None else [-0.5] * len(written), reason)

    async def check(self) -> None:
        if self.dead:
            raise EngineError("it is dead")

    async def close(self) -> None:
        pass


def plain_tokenizer() -> ToyTokenizer:
    """Make a tokenizer of bytes, whose template has a line for the role of each message."""
    return ToyTokenizer(Template())
