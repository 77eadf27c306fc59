"""Lets the model listen to some seconds of a recording."""

from __future__ import annotations

import asyncio
import math
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

from verl_tool.content.parts import AudioPart, MediaPart, from_wire, listed, read_media
from verl_tool.errors import ContentError, ToolFault
from verl_tool.protocol import AUDIOS_FIELD, FaultKind
from verl_tool.servers.tools.base import CallError, Context
from verl_tool.servers.tools.typed.function_tool import tool
from verl_tool.servers.tools.typed.trajectory_tools import TrajectoryTools

MIN_SECONDS = 0.01
"""Of what is cut out."""


@dataclass(frozen=True)
class Recording:
    """The samples of a WAV, as they are in its file."""

    channels: int
    width: int
    """Bytes of a sample of one channel."""
    rate: int
    """Samples a second of each channel."""
    samples: bytes

    @classmethod
    def read(cls, part: AudioPart) -> Recording:
        """Raises ContentError for what is no WAV with whole samples (PCM)."""
        if part.media_type != "audio/wav":
            raise ContentError(f"it is {part.media_type}, and only WAV (PCM) can be cut: convert it")
        try:
            with wave.open(BytesIO(part.data)) as file:
                made = cls(file.getnchannels(), file.getsampwidth(), file.getframerate(), file.readframes(1 << 40))
        except Exception as error:  # a reader of anybody's bytes raises what it likes: RuntimeError for a wrong length
            raise ContentError(f"it is no WAV (PCM) that can be read ({error!r}): convert it") from error
        if made.rate < 1 or made.seconds < MIN_SECONDS:
            raise ContentError(f"it has no {MIN_SECONDS} s of sound: its rate is {made.rate} Hz")
        return made

    @property
    def seconds(self) -> float:
        return len(self.samples) / (self.rate * self.channels * self.width)

    def between(self, start: float, end: float) -> AudioPart:
        """From `start` to `end`, seconds, as a WAV. Raises ContentError if it is too large."""
        frame = self.channels * self.width
        file = BytesIO()
        with wave.open(file, "wb") as written:
            written.setnchannels(self.channels)
            written.setsampwidth(self.width)
            written.setframerate(self.rate)
            written.writeframes(self.samples[round(start * self.rate) * frame : round(end * self.rate) * frame])
        part = read_media(file.getvalue())
        assert isinstance(part, AudioPart)
        return part


class AudioCrop(TrajectoryTools):
    """Parts of a trajectory's audio: that of the row (`AUDIOS_FIELD`), and all that its tools have answered with since.

    It is counted from 1, in this order.
    """

    takes_media = (AudioPart,)

    async def setup(self, trajectory: Context) -> None:
        self._audios = await asyncio.to_thread(_row_audio, trajectory.extra.get(AUDIOS_FIELD))

    async def fork(self) -> AudioCrop:
        copy = AudioCrop()
        copy._audios = list(self._audios)
        return copy

    def take_media(self, media: Sequence[MediaPart]) -> None:
        self._audios += [part for part in media if isinstance(part, AudioPart)]

    @tool(
        example_actions=(
            '<tool_call>\n{"name": "audio_crop", "arguments": {"start": 1.5, "end": 4, "target_audio": 1}}'
            "\n</tool_call>",
        )
    )
    def audio_crop(self, start: float, end: float, target_audio: int = 1) -> list[str | AudioPart]:
        """Listen to a part of a recording.

        Args:
            start: Where it begins, in seconds from the beginning of the recording.
            end: Where it ends, in seconds.
            target_audio: Number of the recording, counted from 1 over all audio so far.
        """
        count = len(self._audios)
        if not count:
            raise CallError("there is no audio yet: neither the task nor an observation has any")
        if not 1 <= target_audio <= count:
            raise CallError(f"there is no audio {target_audio}; it is counted from 1, and there are {count}")
        try:
            recording = Recording.read(self._audios[target_audio - 1])
            first, last = _within(recording, start, end)
            part = recording.between(first, last)
        except ContentError as error:
            raise CallError(f"audio {target_audio} cannot be cut: {error}") from error
        description = (
            f"Here is the audio from {first:.2f} s to {last:.2f} s. (Audio {count + 1}, {last - first:.2f} s)\n"
        )
        return [description, part]


def _within(recording: Recording, start: float, end: float) -> tuple[float, float]:
    """What there is of these seconds. Raises CallError if that is nothing."""
    last = min(end, recording.seconds)
    if not (math.isfinite(start) and start >= 0 and last - start >= MIN_SECONDS):
        raise CallError(
            f"from {start:.6g} s to {end:.6g} s there is nothing to hear; this recording is {recording.seconds:.2f} s "
            f"long: write seconds with 0 <= start < end <= {recording.seconds:.2f}"
        )
    return start, last


def _row_audio(audios: object) -> list[AudioPart]:
    """The row's audio. Raises ToolFault, of a kind that no policy can bring about, for what cannot be cut."""
    parts: list[AudioPart] = []
    for each in listed(audios):
        try:
            part = from_wire(each) if isinstance(each, str) else each
            if not isinstance(part, AudioPart):
                kind = getattr(part, "media_type", type(part).__name__)
                raise ContentError(f"it is {kind}; send data URIs of WAV files")
            Recording.read(part)
        except ContentError as error:
            where = f"{AUDIOS_FIELD}, number {len(parts) + 1}"
            raise ToolFault(FaultKind.MISCONFIGURED, f"{where}: {error}", retryable=False) from error
        parts.append(part)
    return parts
