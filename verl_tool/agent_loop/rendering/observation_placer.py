"""Convert observations to the segments that the model is fed: without control tokens, and truncated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from verl_tool.agent_loop.observation import ControlTokens, truncate
from verl_tool.agent_loop.options import Side
from verl_tool.agent_loop.rendering.images import ImagePlacer, Piece, images_in, pieces_of
from verl_tool.agent_loop.tokenizer import Tokenizer
from verl_tool.agent_loop.trajectory import Segment
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ContentError, ToolFault
from verl_tool.protocol import FaultKind


class ObservationPlacer:
    """Converts observations to segments."""

    def __init__(
        self, tokenizer: Tokenizer, control_tokens: ControlTokens, side: Side, image_placer: ImagePlacer | None
    ) -> None:
        """`side` is dropped of an observation that is too long. Without `image_placer`, the model reads text only."""
        self._tokenizer, self._control_tokens = tokenizer, control_tokens
        self._side, self._image_placer = side, image_placer

    def place(
        self,
        parts: Sequence[str],
        images: Sequence[ImagePart],
        limit: int | None,
        render: Callable[[list[str]], list[Segment]],
    ) -> tuple[list[Segment], bool]:
        """Escape and truncate the parts of an observation and `render` them. Returns the segments, and whether a part
        was truncated. The parts share `limit` equally. `images` are those of the ``<image>`` tags in the parts.

        Raises ToolFault if the segments contain another number of images.
        """
        if self._image_placer is not None and images:
            return self._place_with_images(self._image_placer, pieces_of(parts, images), limit, render)
        side, share = self._side, None if limit is None else limit // len(parts)
        for safe in zip(*map(self._control_tokens.escaped_forms, parts), strict=True):
            visible = [each if share is None else truncate(each, share, side, self._tokenizer) for each in safe]
            segments = render(visible)
            if not self._control_tokens.forged(segments):
                break
        return segments, visible != list(safe)

    def _place_with_images(
        self,
        placer: ImagePlacer,
        parts: Sequence[Sequence[Piece]],
        limit: int | None,
        render: Callable[[list[str]], list[Segment]],
    ) -> tuple[list[Segment], bool]:
        """Do the same as `place` with images, which are not escaped, and are kept or dropped as a whole."""
        side, share = self._side, None if limit is None else limit // len(parts)
        for safe in zip(*map(self._escaped_forms, parts), strict=True):
            try:
                visible = [list(each) if share is None else placer.truncate(each, share, side) for each in safe]
                rendered = render([placer.text_of(each) for each in visible])
                segments = placer.replace_placeholders(rendered, images_in(visible))
            except ContentError as error:
                raise ToolFault(FaultKind.TOOL_CRASHED, str(error), retryable=False) from error
            if segments is not None and not self._control_tokens.forged(s for s in segments if s.image is None):
                return segments, visible != [list(each) for each in safe]
        message = (
            f"the observation's {len(images_in(parts))} images are not where the chat template should have left them; "
            "set another mtrl_role, or mtrl_sep"
        )
        raise ToolFault(FaultKind.MISCONFIGURED, message, retryable=False)

    def _escaped_forms(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, ...]]:
        """Yield the pieces with their texts escaped by `ControlTokens.escaped_forms`."""
        forms = [
            self._control_tokens.escaped_forms(piece) if isinstance(piece, str) else itertools.repeat(piece)
            for piece in ("", *pieces)  # the empty text makes sure that the iteration ends
        ]
        return (form[1:] for form in zip(*forms, strict=False))
