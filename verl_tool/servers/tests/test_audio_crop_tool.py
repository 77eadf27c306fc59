"""``python -m verl_tool.servers.tests.test_audio_crop_tool audio_crop --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

import wave
from io import BytesIO

from verl_tool.content.parts import AudioPart, parts_of, read_media, to_wire
from verl_tool.protocol import AUDIOS_FIELD, StepResult
from verl_tool.servers.tests.live_check import LiveCase, LiveTurn, call, command_line, one_by_one

RATE = 8000
SILENCE, SOUND = b"\0\0", b"\1\2"
"""One sample of each."""


def recording() -> AudioPart:
    """Two seconds: the first is silent, the second is not."""
    file = BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes(SILENCE * RATE + SOUND * RATE)
    part = read_media(file.getvalue())
    assert isinstance(part, AudioPart)
    return part


def _crop(samples: bytes, *contains: str, audios: int = 1, **arguments: float) -> LiveTurn:
    """A call, and the samples and texts of its answer."""

    def problem(result: StepResult) -> str:
        parts = [p for p in parts_of(result.observation, None, result.audio) if isinstance(p, AudioPart)]
        found = b""
        if parts:
            with wave.open(BytesIO(parts[0].data)) as file:
                found = file.readframes(file.getnframes())
        return "" if found == samples else f"{len(found)} bytes of samples, which are not those of the seconds"

    extra = {AUDIOS_FIELD: [to_wire(recording())] * audios} if audios else {}
    return LiveTurn(call("audio_crop", **arguments), contains, valid=None, extra=extra, problem=problem)


CASES = (
    LiveCase(
        "some seconds, sample by sample",
        one_by_one(_crop(SILENCE * (RATE // 2) + SOUND * (RATE // 4), start=0.5, end=1.25)),
    ),
    LiveCase(
        "some seconds of those",
        one_by_one(
            [
                _crop(SILENCE * (RATE // 2) + SOUND * (RATE // 2), start=0.5, end=1.5),
                _crop(SOUND * (RATE // 2), audios=0, start=0.5, end=1, target_audio=2),
            ]
        ),
    ),
    LiveCase(
        "what cannot be heard says why",
        one_by_one(
            _crop(b"", "this recording is 2.00 s long", start=3.0, end=4.0),
            _crop(b"", "there is no audio 2", start=0.0, end=1.0, target_audio=2),
            _crop(b"", "there is no audio yet", audios=0, start=0.0, end=1.0),
        ),
    ),
)

app = command_line(__name__, "audio_crop", "audio_crop", CASES)
