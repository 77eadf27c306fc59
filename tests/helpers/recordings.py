"""Recordings for tools that cut them."""

from __future__ import annotations

import wave
from io import BytesIO

from verl_tool.content.parts import AudioPart, read_media

RATE = 1000


def ramp(seconds: float = 2.0, channels: int = 1, width: int = 2, rate: int = RATE) -> AudioPart:
    """Make a recording of samples that all differ."""
    file = BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(channels)
        written.setsampwidth(width)
        written.setframerate(rate)
        frames = range(round(seconds * rate))
        written.writeframes(b"".join(n.to_bytes(4, "little")[:width] * channels for n in frames))
    part = read_media(file.getvalue())
    assert isinstance(part, AudioPart)
    return part
