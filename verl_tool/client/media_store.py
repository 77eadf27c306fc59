"""Store the images and audios that a server has sent. Each is sent once per trajectory, and later named by its hash.

A request names the media that its trajectory has, and the answer leaves out their bytes. The server keeps no state for
this: a repeated step is answered with whatever is missing then, by any replica.
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
"""Maximum size of all stored media. Beyond it, those of the trajectory that was idle longest are dropped, and sent
again when needed."""
_INLINE_BYTES = 64 << 10
"""Larger media are decoded in a thread."""


class MediaStore:
    """The media that one client's trajectories have received. Use it in one event loop."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held: OrderedDict[str, dict[str, MediaPart]] = OrderedDict()
        self._bytes = 0

    def held_by(self, trajectory_id: str) -> dict[str, MediaPart]:
        """Return the latest media of a trajectory by hash, as many as a request may name."""
        return dict(list(self._held.get(trajectory_id, {}).items())[-MAX_KNOWN_MEDIA:])

    def keep(self, result: StepResult) -> None:
        """Store the media that a trajectory received."""
        parts = [part for each in (result.image, result.audio) for part in listed(each)]
        self._add(result.trajectory_id, [part for part in parts if isinstance(part, (ImagePart, AudioPart))])

    def fork(self, trajectory_id: str, new_trajectory_id: str) -> None:
        """Give a second trajectory the media of the first one."""
        self._add(new_trajectory_id, self._held.get(trajectory_id, {}).values())

    def forget(self, trajectory_id: str) -> None:
        """Drop the media of a trajectory."""
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
    """Replace data URIs, and references to media that the request named as `known`, by parts.

    Media that cannot be decoded stay unchanged; `verl_tool.content.parts.parts_of` rejects them later.
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
