from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import pytest

pytest.importorskip("verl")
ray = pytest.importorskip("ray")

from shown_tool import striped  # noqa: E402

from verl_tool.content.parts import ImagePart  # noqa: E402
from verl_tool.errors import ContentError  # noqa: E402
from verl_tool.platforms.vision.sent_images import DecodedBatch, PackedImage, send  # noqa: E402


class Arriving:
    """Stands for a reference to what is in Ray's store."""

    def __init__(self, part: ImagePart) -> None:
        self.part, self.times = part, 0

    def __await__(self):
        self.times += 1
        yield from asyncio.sleep(0).__await__()
        return self.part


def sent(part: ImagePart) -> PackedImage:
    return PackedImage(part.sha256, Arriving(part))  # type: ignore[arg-type]


async def test_an_image_is_decoded_once_however_many_turns_show_it():
    held = DecodedBatch()
    one, other, plain = sent(striped(1)), sent(striped(2, 40)), object()
    first = await held.of([one, plain])
    again = await held.of([one, other, one])
    assert again[0] is again[2] is first[0]
    assert first[1] is plain
    assert again[1].size == (96, 40)
    assert one.part.times == other.part.times == 1


async def test_only_the_latest_are_kept():
    held = DecodedBatch(max_pixels=2 * 96 * 64)
    shown = [sent(striped(n)) for n in range(3)]
    await asyncio.gather(*(held.of([image]) for image in shown))
    await held.of([shown[2], shown[1], shown[0]])
    assert [image.part.times for image in shown] == [2, 1, 1]


async def test_a_broken_file_is_told():
    broken = replace(striped(1), data=striped(1).data[:60], sha256="0" * 64)
    with pytest.raises(ContentError, match="cannot be decoded"):
        await DecodedBatch().of([sent(broken)])


def test_a_file_is_put_into_the_store_once(monkeypatch):
    """That it arrives, trainings show (`test_training_of_vision.py`)."""
    put = []
    monkeypatch.setattr(ray, "put", lambda part: put.append(part) or len(put))
    one, other = striped(101), striped(102)
    assert [send(image).part for image in (one, striped(101), other, one)] == [1, 1, 2, 1]
    assert put == [one, other]


def test_a_file_is_one_object_in_the_process_where_it_arrives():
    one = striped(1)
    assert pickle.loads(pickle.dumps(one)) is one
