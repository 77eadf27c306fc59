from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from quarters import noise, quarters, same

from verl_tool.content.parts import ImagePart, encode_image, read_media
from verl_tool.errors import ContentError
from verl_tool.servers.tools.pictures.decoded import DecodedImages


def test_many_threads_decode_an_image_once(monkeypatch: pytest.MonkeyPatch) -> None:
    part, images = encode_image(quarters()), DecodedImages()
    decode, decoded, together = ImagePart.decode, [], threading.Barrier(8)
    monkeypatch.setattr(ImagePart, "decode", lambda self: (decoded.append(self), decode(self))[1])

    def look(_: int) -> object:
        together.wait(10)
        return images.of(part)

    with ThreadPoolExecutor(8) as threads:
        seen = list(threads.map(look, range(8)))
    assert len(decoded) == 1
    assert all(each is seen[0] for each in seen)
    assert same(seen[0], quarters())


def test_the_images_that_were_asked_for_last_are_held() -> None:
    one, two, three = (encode_image(noise(10, 10, seed)) for seed in range(3))
    images = DecodedImages(max_pixels=250)
    first, second = images.of(one), images.of(two)
    assert images.of(one) is first
    images.of(three)
    assert images.pixels == 200
    assert images.of(one) is first
    assert images.of(two) is not second


def test_an_image_beyond_the_limit_is_held_alone() -> None:
    images = DecodedImages(max_pixels=50)
    part = encode_image(noise(10, 10))
    assert images.of(part) is images.of(part)
    images.of(encode_image(noise(10, 10, 1)))
    assert images.pixels == 100


def test_a_broken_image_is_told_each_time() -> None:
    images = DecodedImages()
    part = read_media(encode_image(noise()).data[:300])
    assert isinstance(part, ImagePart)
    for _ in range(2):
        with pytest.raises(ContentError, match="cannot be decoded"):
            images.of(part)
