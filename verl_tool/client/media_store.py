"""The images and audios that a server has sent: each comes once in a trajectory, and is named by its hash afterwards.

A request names those that its trajectory has, and the answer leaves out their bytes. The server remembers nothing of
it: a step that is sent again, to whichever replica, is answered with what is missing then.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from verl_tool.content.parts import AudioPart, ImagePart, MediaPart, encoded_bytes, from_wire, listed, reference_in
from verl_tool.errors import ContentError
from verl_tool.protocol import MAX_KNOWN_MEDIA, StepResult

MAX_BYTES = 256 << 20
"""Of all that is held. Beyond it, the trajectory that was idle for longest is forgotten: what it sees again is sent
again."""
_INLINE_BYTES = 64 << 10
"""More is read in a thread."""


class MediaStore:
    """What each trajectory of one client has been sent. Use it in one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, dict[str, MediaPart]] = OrderedDict()
        self._bytes = 0

    def held_by(self, trajectory_id: str) -> dict[str, MediaPart]:
        """By hash, the latest that a trajectory was sent: as many as a request may name."""
        return dict(list(self._held.get(trajectory_id, {}).items())[-MAX_KNOWN_MEDIA:])

    def keep(self, result: StepResult) -> None:
        """Hold what a trajectory was sent."""
        parts = [part for each in (result.image, result.audio) for part in listed(each)]
        self._add(result.trajectory_id, [part for part in parts if isinstance(part, (ImagePart, AudioPart))])

    def fork(self, trajectory_id: str, new_trajectory_id: str) -> None:
        """A second trajectory has what the first one has."""
        self._add(new_trajectory_id, self._held.get(trajectory_id, {}).values())

    def forget(self, trajectory_id: str) -> None:
        """The trajectory is over."""
        for part in self._held.pop(trajectory_id, {}).values():
            self._bytes -= len(part.data)

    def _add(self, trajectory_id: str, parts: Iterable[MediaPart]) -> None:
        new = {part.sha256: part for part in parts}
        if not new:
            return
        held = self._held.setdefault(trajectory_id, {})
        self._held.move_to_end(trajectory_id)
        for name, part in new.items():
            self._bytes += len(part.data) if name not in held else 0
            held[name] = held.pop(name, part)
        while self._bytes > self._max_bytes:
            self.forget(next(iter(self._held)))


async def read_media_of(result: StepResult, known: Mapping[str, MediaPart]) -> StepResult:
    """The result with parts in place of data URIs, and of references to what its request said to be `known`.

    What cannot be read stays as it came, for whoever looks at it to refuse it (`verl_tool.content.parts.parts_of`).
    """
    media = (result.image, result.audio)
    if media == (None, None):
        return result
    if sum(map(encoded_bytes, media)) > _INLINE_BYTES:
        image, audio = await asyncio.to_thread(lambda: [_read(each, known) for each in media])
    else:
        image, audio = (_read(each, known) for each in media)
    return replace(result, image=image, audio=audio)


def _read(value: object, known: Mapping[str, MediaPart]) -> object:
    parts = [_part(each, known) for each in listed(value)]
    return value if value is None or parts == [value] else parts


def _part(value: object, known: Mapping[str, MediaPart]) -> object:
    name = reference_in(value)
    if name is not None:
        return known.get(name, value)
    if isinstance(value, str):
        with suppress(ContentError):
            return from_wire(value)
    return value
