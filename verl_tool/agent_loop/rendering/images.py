"""Put images into prompts and observations: first a placeholder in the rendered text, then the tokens of the image.

Renderers handle text only, so an image is rendered as the model's placeholder. It consists of control tokens, which are
encoded alike in every context, and which no tool's output can contain, since they are broken up there. In the rendered
tokens, each placeholder becomes a segment with as many tokens as the image has features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from verl_tool.agent_loop.observation import MAX_CHARS_PER_TOKEN, TRUNCATION_MARK, truncate
from verl_tool.agent_loop.options import Side
from verl_tool.agent_loop.tokenizer import BROKEN_CHARACTER, Tokenizer
from verl_tool.agent_loop.trajectory import Author, Segment
from verl_tool.agent_loop.trajectory_builder import longest_prefix
from verl_tool.content.parts import ImagePart, at_tags
from verl_tool.errors import ContentError

Piece: TypeAlias = "str | ImagePart"


class ImageTokens(Protocol):
    """The tokens with which one model reads images."""

    placeholder: str
    """The chat template's text for an image, such as ``<|vision_start|><|image_pad|><|vision_end|>``: control tokens
    only."""
    pad_id: int
    """The placeholder's token that represents a feature."""
    banned_ids: tuple[int, ...]
    """Tokens that the model must never write: `pad_id`, and tokens for parts of other media."""

    def of(self, image: ImagePart) -> Sequence[int]:
        """Return the ids that replace the placeholder: the same tokens, with one `pad_id` per feature. They depend on
        the image's size only.

        Raises ContentError if the model does not accept the image, which ends the trajectory in a fault.
        """
        ...


def pieces_of(outputs: Sequence[str], images: Sequence[ImagePart]) -> list[list[Piece]]:
    """Split each output into texts and images. The n-th ``<image>`` over all outputs is the n-th image."""
    left = {"image": iter(images)}
    return [list(at_tags(output, left)) or [""] for output in outputs]


@dataclass(frozen=True)
class ImagePlacer:
    """Puts images into prompts and observations, and truncates outputs with images."""

    tokens: ImageTokens
    tokenizer: Tokenizer

    def text_of(self, pieces: Sequence[Piece]) -> str:
        """Return the text for a renderer, with placeholders."""
        return "".join(piece if isinstance(piece, str) else self.tokens.placeholder for piece in pieces)

    def prompt(self, prompt_ids: Sequence[int], images: Sequence[ImagePart] = ()) -> list[Segment]:
        """Return the segments of a prompt that has one placeholder per image, in order.

        Raises ContentError as `check_prompt` does.
        """
        self.check_prompt(prompt_ids, images)
        whole = Segment(Author.PROMPT, tuple(prompt_ids), text=self.tokenizer.decode(prompt_ids))
        return self.replace_placeholders([whole], images, Author.PROMPT) or []

    def check_prompt(self, prompt_ids: Sequence[int], images: Sequence[ImagePart]) -> None:
        """Raise ContentError if the number of placeholders differs from that of `images`, or if there are image tokens
        outside of placeholders."""
        placeholders = len(_split(prompt_ids, self._encode(self.tokens.placeholder))) - 1
        written = prompt_ids.count(self.tokens.pad_id)
        if not placeholders == written == len(images):
            raise ContentError(
                f"the prompt has {written} places for images ({self.tokens.placeholder!r}) and {len(images)} images; "
                "give one for each, and do not write such tokens as text"
            )

    def further_tokens(self, images: Sequence[ImagePart]) -> int:
        """Return how many more tokens the images have than their placeholders. Raises as `ImageTokens.of` does."""
        return sum(map(self._size, images)) - len(images) * len(self._encode(self.tokens.placeholder))

    def replace_placeholders(
        self, segments: Sequence[Segment], images: Sequence[ImagePart], author: Author = Author.TOOL
    ) -> list[Segment] | None:
        """Replace the placeholders in the segments of `author` by segments of `images`. Returns None if their numbers
        differ.

        Raises ContentError if the model does not accept an image, and ValueError if the model's tokens for an image are
        not those of its placeholder.
        """
        placeholder = self.tokenizer.encode(self.tokens.placeholder)
        placed: list[Segment] = []
        left = iter(images)
        for segment in segments:
            if segment.author is not author:
                placed.append(segment)
                continue
            texts = _split(segment.tokens, placeholder)
            for number, tokens in enumerate(texts):
                if number:
                    image = next(left, None)
                    if image is None:
                        return None
                    placed.append(self._segment(image, placeholder, author))
                if tokens:
                    text = segment.text if len(texts) == 1 else self.tokenizer.decode(tokens)
                    placed.append(Segment(author, tokens, text=text))
        return placed if next(left, None) is None else None

    def truncate(self, pieces: Sequence[Piece], limit: int, side: Side) -> list[Piece]:
        """Truncate an output to `limit` tokens, with `TRUNCATION_MARK` in place of the dropped `side`. An image is kept
        or dropped as a whole."""
        if len(pieces) == 1 and isinstance(pieces[0], str):
            return [truncate(pieces[0], limit, side, self.tokenizer)]
        units = [unit for piece in pieces for unit in self._units(piece, limit)]
        if sum(map(self._size, units)) <= limit:
            return list(pieces)
        keep = limit
        while keep >= 0:
            trimmed = self._trim(units, keep, side)
            excess = (
                sum(len(self._encode(each)) if isinstance(each, str) else self._size(each) for each in trimmed) - limit
            )
            if excess <= 0:
                return trimmed
            keep -= excess
        return [""]

    def _segment(self, image: ImagePart, placeholder: Sequence[int], author: Author) -> Segment:
        tokens = tuple(self.tokens.of(image))
        if set(tokens) != set(placeholder):
            raise ValueError(
                f"an image of {image.width} x {image.height} pixels has the tokens {sorted(set(tokens))}, and the "
                f"placeholder {self.tokens.placeholder!r} has {sorted(set(placeholder))}; they must be the same"
            )
        return Segment(author, tokens, text=self.tokens.placeholder, image=image.sha256)

    def _units(self, piece: Piece, limit: int) -> Sequence[int | ImagePart]:
        """Split a piece into units that are kept or dropped as a whole: an image, or single tokens. Only the two
        ends of a very long text are encoded."""
        if isinstance(piece, ImagePart):
            return [piece]
        chars = (limit + 1) * MAX_CHARS_PER_TOKEN
        if len(piece) <= 2 * chars:
            return self._encode(piece)
        return [*self._encode(piece[:chars]), *self._encode(piece[-chars:])]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def _size(self, unit: int | ImagePart) -> int:
        return 1 if isinstance(unit, int) else len(self.tokens.of(unit))

    def _trim(self, units: Sequence[int | ImagePart], keep: int, side: Side) -> list[Piece]:
        """Join the mark and whole units of at most `keep` tokens."""
        n_head = {"left": 0, "right": keep, "middle": keep - keep // 2}[side]
        head = longest_prefix(units, self._size, n_head)
        tail = longest_prefix(units[len(head) :][::-1], self._size, keep - n_head)[::-1]
        mark = TRUNCATION_MARK
        before, after = self._join(head), self._join(tail)
        # Merge the mark with the texts next to it.
        if before and isinstance(text := before[-1], str):
            mark = text.rstrip(BROKEN_CHARACTER) + mark
            before.pop()
        if after and isinstance(text := after[0], str):
            mark += text.lstrip(BROKEN_CHARACTER)
            after.pop(0)
        return [*before, mark, *after]

    def _join(self, units: Sequence[int | ImagePart]) -> list[Piece]:
        pieces: list[Piece] = []
        run: list[int] = []
        for unit in [*units, None]:
            if isinstance(unit, int):
                run.append(unit)
                continue
            if run:
                pieces.append(self.tokenizer.decode(run))
                run = []
            if unit is not None:
                pieces.append(unit)
        return pieces


def images_in(pieces: Sequence[Sequence[Piece]]) -> list[ImagePart]:
    """Return the images of an observation's outputs."""
    return [piece for output in pieces for piece in output if isinstance(piece, ImagePart)]


def _split(tokens: Sequence[int], placeholder: Sequence[int]) -> list[tuple[int, ...]]:
    """Split `tokens` at each occurrence of `placeholder`."""
    n, start, found = len(placeholder), 0, []
    position = _next(tokens, placeholder[0], 0)
    while position is not None:
        end = position + 1
        if list(tokens[position : position + n]) == list(placeholder):
            found.append(tuple(tokens[start:position]))
            start = end = position + n
        position = _next(tokens, placeholder[0], end)
    return [*found, tuple(tokens[start:])]


def _next(tokens: Sequence[int], token: int, start: int) -> int | None:
    """Return the next position of `token` from `start` on."""
    try:
        return tokens.index(token, start)
    except ValueError:
        return None
