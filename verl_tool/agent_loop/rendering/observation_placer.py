"""From the text of an observation to the segments that the model is fed: free of control tokens, and cut."""

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
    """Makes segments of observations."""

    def __init__(
        self, tokenizer: Tokenizer, control_tokens: ControlTokens, side: Side, image_placer: ImagePlacer | None
    ) -> None:
        """`side`: where an observation that is too long is cut. `image_placer` None: the model reads text only."""
        self._tokenizer, self._control_tokens = tokenizer, control_tokens
        self._side, self._image_placer = side, image_placer

    def place(
        self,
        parts: Sequence[str],
        images: Sequence[ImagePart],
        limit: int | None,
        render: Callable[[list[str]], list[Segment]],
    ) -> tuple[list[Segment], bool]:
        """The segments that `render` makes of an observation's parts, free of control tokens, and whether `limit`, of
        which each part has its share, cut one. `images`: those that tags in the parts stand for.

        Raises ToolFault if the segments do not hold as many images.
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
        """As `place`; only texts are made safe, and images are kept or dropped whole."""
        side, share = self._side, None if limit is None else limit // len(parts)
        for safe in zip(*map(self._escaped_forms, parts), strict=True):
            try:
                visible = [list(each) if share is None else placer.truncated(each, share, side) for each in safe]
                segments = placer.placed(render([placer.text_of(each) for each in visible]), images_in(visible))
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
        """As those of `ControlTokens`, of the texts among the pieces."""
        forms = [
            self._control_tokens.escaped_forms(piece) if isinstance(piece, str) else itertools.repeat(piece)
            for piece in ("", *pieces)  # one is a text at least, whose forms come to an end
        ]
        return (form[1:] for form in zip(*forms, strict=False))
