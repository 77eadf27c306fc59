"""Images in a prompt and in observations: a placeholder in the text that the chat template renders, then the tokens of
each image.

A renderer knows text only. It is given the model's own placeholder where an image stands: control tokens, which are
encoded alike whatever stands around them, and which no tool's output can hold, since they are broken up in one. In what
it appends, each placeholder becomes a segment of its own, with as many tokens as the image has features.
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
    """How one model reads images."""

    placeholder: str
    """What its chat template writes for an image, such as ``<|vision_start|><|image_pad|><|vision_end|>``: control
    tokens only."""
    pad_id: int
    """The token of it that stands for a feature."""
    banned_ids: tuple[int, ...]
    """What the model must never write: `pad_id`, and tokens that stand for a part of other media."""

    def of(self, image: ImagePart) -> Sequence[int]:
        """The ids that take the placeholder's place, of the same tokens: one for each feature of the image. Known from
        its size, without its pixels.

        Raises ContentError for one that the model does not take: a fault of that trajectory.
        """
        ...


def pieces_of(outputs: Sequence[str], images: Sequence[ImagePart]) -> list[list[Piece]]:
    """Each output as texts and images: the n-th ``<image>`` of all of them stands for the n-th image."""
    left = {"image": iter(images)}
    return [list(at_tags(output, left)) or [""] for output in outputs]


@dataclass(frozen=True)
class ImagePlacer:
    """Puts images into the text of observations, and cuts outputs that hold some."""

    tokens: ImageTokens
    tokenizer: Tokenizer

    def text_of(self, pieces: Sequence[Piece]) -> str:
        """What a renderer is given."""
        return "".join(piece if isinstance(piece, str) else self.tokens.placeholder for piece in pieces)

    def prompt(self, prompt_ids: Sequence[int], images: Sequence[ImagePart] = ()) -> list[Segment]:
        """The segments of a prompt that has a placeholder for each of `images`, in their order.

        Raises ContentError as `check_prompt`.
        """
        self.check_prompt(prompt_ids, images)
        whole = Segment(Author.PROMPT, tuple(prompt_ids), text=self.tokenizer.decode(prompt_ids))
        return self.placed([whole], images, Author.PROMPT) or []

    def check_prompt(self, prompt_ids: Sequence[int], images: Sequence[ImagePart]) -> None:
        """Raises ContentError if a prompt has more or fewer placeholders than `images`, or a token for a part of an
        image elsewhere."""
        places = len(_split(prompt_ids, self._encode(self.tokens.placeholder))) - 1
        written = prompt_ids.count(self.tokens.pad_id)
        if not places == written == len(images):
            raise ContentError(
                f"the prompt has {written} places for images ({self.tokens.placeholder!r}) and {len(images)} images; "
                "give one for each, and do not write such tokens as text"
            )

    def further_tokens(self, images: Sequence[ImagePart]) -> int:
        """How many tokens the images have more than their placeholders. Raises ContentError as `ImageTokens.of`."""
        return sum(map(self._size, images)) - len(images) * len(self._encode(self.tokens.placeholder))

    def placed(
        self, segments: Sequence[Segment], images: Sequence[ImagePart], author: Author = Author.TOOL
    ) -> list[Segment] | None:
        """The segments with those of `images` in place of the placeholders in those of `author`; None if there are not
        as many of these.

        Raises ContentError for an image that the model does not take, and ValueError if the model's tokens for an image
        are not those of its placeholder.
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

    def truncated(self, pieces: Sequence[Piece], limit: int, side: Side) -> list[Piece]:
        """At most `limit` tokens of an output, with `TRUNCATION_MARK` where `side` was dropped; an image is kept or
        dropped whole."""
        if len(pieces) == 1 and isinstance(pieces[0], str):
            return [truncate(pieces[0], limit, side, self.tokenizer)]
        units = [unit for piece in pieces for unit in self._units(piece, limit)]
        if sum(map(self._size, units)) <= limit:
            return list(pieces)
        keep = limit
        while keep >= 0:
            stored = self._trimmed(units, keep, side)
            excess = (
                sum(len(self._encode(each)) if isinstance(each, str) else self._size(each) for each in stored) - limit
            )
            if excess <= 0:
                return stored
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
        """What is kept or dropped whole: an image, or each token. Of a text beyond the limit in any case, its ends."""
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

    def _trimmed(self, units: Sequence[int | ImagePart], keep: int, side: Side) -> list[Piece]:
        """The mark with whole units of at most `keep` tokens beside it."""
        n_head = {"left": 0, "right": keep, "middle": keep - keep // 2}[side]
        head = longest_prefix(units, self._size, n_head)
        tail = longest_prefix(units[len(head) :][::-1], self._size, keep - n_head)[::-1]
        mark = TRUNCATION_MARK
        before, after = self._joined(head), self._joined(tail)
        # It joins the texts that it stands between.
        if before and isinstance(text := before[-1], str):
            mark = text.rstrip(BROKEN_CHARACTER) + mark
            before.pop()
        if after and isinstance(text := after[0], str):
            mark += text.lstrip(BROKEN_CHARACTER)
            after.pop(0)
        return [*before, mark, *after]

    def _joined(self, units: Sequence[int | ImagePart]) -> list[Piece]:
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
    """The images of an observation's outputs."""
    return [piece for output in pieces for piece in output if isinstance(piece, ImagePart)]


def _split(tokens: Sequence[int], placeholder: Sequence[int]) -> list[tuple[int, ...]]:
    """What stands before, between and behind the places where `placeholder` stands."""
    n, start, found = len(placeholder), 0, []
    position = _next(tokens, placeholder[0], 0)
    while position is not None:
        behind = position + 1
        if list(tokens[position : position + n]) == list(placeholder):
            found.append(tuple(tokens[start:position]))
            start = behind = position + n
        position = _next(tokens, placeholder[0], behind)
    return [*found, tuple(tokens[start:])]


def _next(tokens: Sequence[int], token: int, start: int) -> int | None:
    """Where `token` stands next, from `start` on."""
    try:
        return tokens.index(token, start)
    except ValueError:
        return None
