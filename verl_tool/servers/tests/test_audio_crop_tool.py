"""``python -m verl_tool.servers.tests.test_audio_crop_tool audio_crop --url=http://localhost:5000/get_observation``"""

from __future__ import annotations

import json
import wave
from io import BytesIO

from verl_tool.content.parts import AudioPart, parts_of, read_media, to_wire
from verl_tool.protocol import AUDIOS_FIELD
from verl_tool.servers.tests.live_check import CheckFailed, LiveCase, Probe, command_line

RATE = 8000


def recording() -> AudioPart:
    """Two seconds: the first is silent, the second is not."""
    file = BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes(b"\0\0" * RATE + b"\1\2" * RATE)
    part = read_media(file.getvalue())
    assert isinstance(part, AudioPart)
    return part


async def heard(probe: Probe, trajectory_id: str, step: int, audios: int = 1, **arguments: float) -> tuple[str, bytes]:
    """What a call is answered, and the samples in it."""
    call = json.dumps({"name": "audio_crop", "arguments": arguments})
    extra = {AUDIOS_FIELD: [to_wire(recording())] * audios} if audios else {}
    action = f"<tool_call>{call}</tool_call>"
    result = await probe.answer(action, trajectory_id=trajectory_id, step=step, extra=extra)
    parts = [p for p in parts_of(result.observation, None, result.audio) if isinstance(p, AudioPart)]
    if not parts:
        return result.observation, b""
    with wave.open(BytesIO(parts[0].data)) as file:
        return result.observation, file.readframes(file.getnframes())


async def _crop(probe: Probe) -> None:
    _, samples = await heard(probe, probe.new_id(), 0, start=0.5, end=1.25)
    if samples != b"\0\0" * (RATE // 2) + b"\1\2" * (RATE // 4):
        raise CheckFailed(f"{len(samples)} bytes of samples, which are not those of the seconds asked for")


async def _crop_of_a_crop(probe: Probe) -> None:
    trajectory = probe.new_id()
    await heard(probe, trajectory, 0, start=0.5, end=1.5)
    _, samples = await heard(probe, trajectory, 1, audios=0, start=0.5, end=1, target_audio=2)
    if samples != b"\1\2" * (RATE // 2):
        raise CheckFailed(f"{len(samples)} bytes of samples, which are not those of the first crop's second half")


async def _describe(probe: Probe) -> None:
    for arguments, audios, words in (
        ({"start": 3.0, "end": 4.0}, 1, "this recording is 2.00 s long"),
        ({"start": 0.0, "end": 1.0, "target_audio": 2}, 1, "there is no audio 2"),
        ({"start": 0.0, "end": 1.0}, 0, "there is no audio yet"),
    ):
        observation, samples = await heard(probe, probe.new_id(), 0, audios, **arguments)
        if words not in observation or samples:
            raise CheckFailed(f"{words!r} is missing in the answer {observation!r:.300}")


CASES = (
    LiveCase("some seconds, sample by sample", _crop),
    LiveCase("some seconds of those", _crop_of_a_crop),
    LiveCase("what cannot be heard says why", _describe),
)

app = command_line("audio_crop", "audio_crop", CASES, "Check the tool audio_crop of a live server, case by case.")

if __name__ == "__main__":
    app()
