"""Images for a toy model: a tokenizer with a placeholder, the tokens of an image, and an engine that checks them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from toy_model import ScriptedEngine, Template, ToyTokenizer

from verl_tool.agent_loop.generators.base import Generation
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ContentError

BEGIN, PAD, END_IMAGE = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
PLACEHOLDER = BEGIN + PAD + END_IMAGE


class ImageTemplate(Template):
    """Writes the placeholder for an image among a message's parts."""

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
        texts = [{**message, "content": _as_text(message["content"])} for message in messages]
        return super().render(texts, add_generation_prompt)


def _as_text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(PLACEHOLDER if part["type"] == "image" else part["text"] for part in content)


def image_tokenizer(template: Template | None = None) -> ToyTokenizer:
    return ToyTokenizer(template or ImageTemplate(), specials=[BEGIN, PAD, END_IMAGE])


class ToyImageTokens:
    """One token for each pixel of an image's first row."""

    placeholder = PLACEHOLDER

    def __init__(self, tokenizer: ToyTokenizer) -> None:
        self.begin, self.pad_id, self.end = tokenizer.encode(PLACEHOLDER)
        self.banned_ids: tuple[int, ...] = (self.pad_id,)

    def of(self, image: ImagePart) -> list[int]:
        if image.width > 500:
            raise ContentError(f"{image.width} pixels are too wide")
        return [self.begin, *[self.pad_id] * image.width, self.end]


class LookingEngine(ScriptedEngine):
    """Checks at each turn that the images fit the runs of image tokens, by their widths."""

    def __init__(self, tokenizer: ToyTokenizer, turns: Sequence[str | Sequence[int]]) -> None:
        super().__init__(tokenizer, turns)
        self.seen: list[list[ImagePart]] = []
        """The images of each turn."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        images: Sequence[ImagePart] = (),
    ) -> Generation:
        for image in images:
            image.decode()
        self.seen.append(list(images))
        begin, pad, end = self.tokenizer.encode(PLACEHOLDER)
        starts = [n for n, (one, other) in enumerate(pairwise(prompt_ids)) if (one, other) == (begin, pad)]
        widths = [prompt_ids.index(end, start) - start - 1 for start in starts]
        assert widths == [image.width for image in images]
        assert prompt_ids.count(pad) == sum(widths)
        return await super().generate(prompt_ids, sampling_params, request_id)
