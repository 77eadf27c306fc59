"""Some seconds of a recording, sample by sample."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import RATE, ramp
from toy_tools import picture

from verl_tool.content.parts import AudioPart, parts_of, read_media, to_wire
from verl_tool.errors import ContentError
from verl_tool.protocol import AUDIOS_FIELD, FaultKind, StepRequest, StepResult
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import load_tools
from verl_tool.servers.tools.audio_crop import Recording


class Listener:
    """One trajectory that listens."""

    def __init__(self, *audios: Any) -> None:
        self.toolset, self.step = ToolSet(load_tools("audio_crop")), 0
        self.extra = {AUDIOS_FIELD: [each if isinstance(each, str) else to_wire(each) for each in audios]}

    async def answer(self, trajectory: str = "t", **arguments: Any) -> StepResult:
        call = json.dumps({"name": "audio_crop", "arguments": arguments})
        extra = {} if self.step else self.extra
        action = f"<tool_call>{call}</tool_call>"
        [result] = await self.toolset.step([StepRequest(trajectory, action, self.step, extra=extra)])
        self.step += 1
        return result

    async def hears(self, trajectory: str = "t", **arguments: Any) -> tuple[str, list[AudioPart]]:
        result = await self.answer(trajectory, **arguments)
        assert result.fault is None, result.fault
        parts = parts_of(result.observation, result.image, result.audio)
        return result.observation, [part for part in parts if isinstance(part, AudioPart)]


@pytest.mark.parametrize(("channels", "width"), [(1, 2), (2, 2), (1, 1), (6, 3), (2, 4)])
async def test_a_part_has_the_recordings_own_samples(channels: int, width: int) -> None:
    whole = ramp(channels=channels, width=width)
    text, [part] = await Listener(whole).hears(start=0.5, end=1.25)
    assert "Here is the audio from 0.50 s to 1.25 s. (Audio 2, 0.75 s)" in text
    cut, source = Recording.read(part), Recording.read(whole)
    assert (cut.channels, cut.width, cut.rate) == (channels, width, RATE)
    frame = channels * width
    assert cut.samples == source.samples[500 * frame : 1250 * frame]


async def test_a_part_of_a_part_is_counted_from_its_own_beginning() -> None:
    listener = Listener(ramp(), ramp(1.0, rate=500))
    _, [one] = await listener.hears(start=0.5, end=1.5)
    _, [other] = await listener.hears(start=0.25, end=9, target_audio=3)
    assert Recording.read(other).samples == Recording.read(one).samples[500:]
    _, [second] = await listener.hears(start=0, end=0.5, target_audio=2)
    assert Recording.read(second).rate == 500


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"start": 2.5, "end": 3}, "this recording is 2.00 s long: write seconds with 0 <= start < end <= 2.00"),
        ({"start": 1, "end": 1}, "from 1 s to 1 s there is nothing to hear"),
        ({"start": -1, "end": 1}, "there is nothing to hear"),
        ({"start": 1, "end": 0.5}, "there is nothing to hear"),
        ({"start": 0, "end": 1, "target_audio": 2}, "there is no audio 2; it is counted from 1, and there are 1"),
        ({"start": 0, "end": 1, "target_audio": 0}, "there is no audio 0"),
    ],
)
async def test_the_model_is_told_what_it_may_write(arguments: dict[str, Any], words: str) -> None:
    text, heard = await Listener(ramp()).hears(**arguments)
    assert words in text
    assert heard == []


async def test_a_trajectory_without_audio() -> None:
    text, _ = await Listener().hears(start=0, end=1)
    assert "there is no audio yet" in text


def as_float(part: AudioPart) -> AudioPart:
    """The same file, which says that its samples are floating-point numbers."""
    made = read_media(part.data.replace(b"fmt \x10\0\0\0\1\0", b"fmt \x10\0\0\0\3\0"))
    assert isinstance(made, AudioPart)
    return made


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        (read_media(b"fLaC" + b"\0" * 20), "it is audio/flac, and only WAV (PCM) can be cut: convert it"),
        (read_media(b"RIFF\0\0\0\0WAVE"), "it is no WAV (PCM) that can be read"),
        (as_float(ramp()), "unknown format: 3"),
        (ramp(0), "it has no 0.01 s of sound"),
        (picture(1), "it is image/png; send data URIs of WAV files"),
        ("https://example.org/a.wav", "is no data URI"),
    ],
)
async def test_audio_of_a_row_that_cannot_be_cut_is_a_fault_that_no_policy_causes(audio: Any, words: str) -> None:
    result = await Listener(ramp(), audio).answer(start=0, end=1)
    assert result.fault is not None
    assert result.fault.kind is FaultKind.MISCONFIGURED
    assert result.fault.message.startswith("audios, number 2: ")
    assert words in result.fault.message


async def test_audio_of_other_tools_is_counted_and_what_cannot_be_cut_is_told(tmp_path: Any) -> None:
    (tmp_path / "speak.py").write_text(
        "from verl_tool.servers.tools import read_media, tool\n\n\n@tool\nasync def speak() -> object:\n"
        '    """Says something."""\n    return read_media(b"fLaC" + bytes(20))\n'
    )
    toolset = ToolSet(load_tools(f"audio_crop,{tmp_path}/speak.py"))
    call = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'
    first = StepRequest("t", call % ("speak", "{}"), 0, extra={AUDIOS_FIELD: [to_wire(ramp())]})
    await toolset.step([first])
    [result] = await toolset.step(
        [StepRequest("t", call % ("audio_crop", '{"start": 0, "end": 1, "target_audio": 2}'), 1)]
    )
    assert "audio 2 cannot be cut: it is audio/flac, and only WAV (PCM) can be cut" in result.observation


async def test_a_fork_goes_on_with_what_was_heard() -> None:
    listener = Listener(ramp())
    await listener.hears(start=0, end=1)
    await listener.toolset.fork("t", "copy")
    assert len((await listener.hears("copy", start=0, end=0.5, target_audio=2))[1]) == 1
    assert "there is no audio 4" in (await listener.hears("t", start=0, end=0.5, target_audio=4))[0]


@given(st.binary(max_size=200), st.integers(0, 2**32 - 1))
def test_no_file_breaks_it(body: bytes, size: int) -> None:
    part = AudioPart(b"RIFF" + struct.pack("<I", size) + b"WAVE" + body, "audio/wav", "x")
    with suppress(ContentError):
        assert Recording.read(part).seconds >= 0.01
