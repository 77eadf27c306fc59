"""Parts: what an image or audio is told to be, what is refused, and the way to a text with tags and back."""

from __future__ import annotations

import io
import struct
import tracemalloc
import wave
import zlib
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from verl_tool.content.parts import (
    AudioPart,
    ContentLimits,
    ImagePart,
    TextPart,
    as_parts,
    encode_image,
    encoded_bytes,
    from_wire,
    parts_of,
    read_media,
    reference_in,
    reject_too_much,
    tagged,
    to_wire,
)
from verl_tool.errors import ContentError

TYPES = ("image/png", "image/jpeg", "image/webp")


def picture(colour: int = 0, size: tuple[int, int] = (4, 3), media_type: str = "image/png") -> ImagePart:
    return encode_image(Image.new("RGB", size, (colour, 0, 0)), media_type)


def sound(frames: int = 10) -> AudioPart:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, 16_000, 0, "NONE", ""))
        out.writeframes(b"\0\0" * frames)
    part = read_media(file.getvalue())
    assert isinstance(part, AudioPart)
    return part


def png_header(width: int, height: int) -> bytes:
    """A PNG of that size which holds no pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


PICTURES = [picture(n, media_type=TYPES[n % 3]) for n in range(3)]
SOUNDS = [sound(n) for n in (1, 2)]
TEXTS = st.lists(st.sampled_from(["a", "<", ">", "image", "<image>", "audio>", "\n", "é"])).map("".join).map(TextPart)
PARTS = st.lists(TEXTS | st.sampled_from(PICTURES) | st.sampled_from(SOUNDS), max_size=8)


class TestReading:
    @given(st.sampled_from(TYPES), st.integers(1, 40), st.integers(1, 40))
    def test_an_image_is_what_its_file_says(self, kind: str, width: int, height: int) -> None:
        part = picture(7, (width, height), kind)
        assert (part.media_type, part.width, part.height) == (kind, width, height)
        assert part.decode().size == (width, height)
        assert read_media(bytes(bytearray(part.data))) is part, "the same file is held once"

    def test_pixels_of_a_png_are_kept_and_transparent_ones_are_white(self) -> None:
        clear = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
        clear.putpixel((1, 0), (9, 9, 9, 0))
        assert encode_image(clear).decode().tobytes() == bytes([255, 0, 0, 255, 255, 255])
        assert encode_image(clear, "image/jpeg", quality=50).media_type == "image/jpeg"

    @pytest.mark.parametrize(
        ("begins", "kind"),
        [(b"fLaC", "audio/flac"), (b"OggS", "audio/ogg"), (b"ID3", "audio/mpeg"), (b"\xff\xfb", "audio/mpeg")],
    )
    def test_audio_is_told_by_its_first_bytes(self, begins: bytes, kind: str) -> None:
        assert read_media(begins + b"\0" * 20).media_type == kind
        assert sound().media_type == "audio/wav"

    @given(
        st.binary(max_size=200)
        | st.builds(bytes.__add__, st.sampled_from([p.data[:20] for p in PICTURES]), st.binary())
    )
    def test_any_bytes_are_read_or_refused(self, data: bytes) -> None:
        with suppress(ContentError):
            assert read_media(data).data == data

    @given(st.sampled_from(PICTURES), st.data())
    def test_a_broken_image_is_refused_at_the_latest_when_it_is_decoded(
        self, part: ImagePart, data: st.DataObject
    ) -> None:
        broken = bytearray(part.data)
        for _ in range(data.draw(st.integers(1, 3))):
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
        cut = bytes(broken[: data.draw(st.integers(0, len(broken)))])
        with suppress(ContentError):
            read = read_media(cut)
            assert not isinstance(read, ImagePart) or read.decode().size == (read.width, read.height)


class TestLimits:
    def test_each_names_value_limit_and_remedy(self) -> None:
        part, audio = PICTURES[0], SOUNDS[0]
        for limits, data, words in (
            (ContentLimits(image_bytes=10), part.data, f"{len(part.data)} bytes; at most 10 are taken: send a smaller"),
            (ContentLimits(audio_bytes=10), audio.data, f"{len(audio.data)} bytes; at most 10 are taken"),
            (ContentLimits(image_pixels=11), part.data, "4 x 3 pixels; at most 11 are taken: scale it down"),
            (ContentLimits(types=["image/jpeg"]), part.data, "is image/png; taken are image/jpeg: encode it so"),
            (ContentLimits(), b"GIF89a" + b"\0" * 20, "no image or audio that is known; taken are audio/flac"),
        ):
            with pytest.raises(ContentError, match=words):
                read_media(data, limits)
        with pytest.raises(ContentError, match="2 images and audios in one observation; at most 1: give fewer"):
            reject_too_much([part, TextPart("a"), audio], ContentLimits(media=1))
        with pytest.raises(ContentError, match="at most 20: give fewer, or smaller"):
            parts_of("", [part], [audio], ContentLimits(media_bytes=20))
        with pytest.raises(ContentError, match="a data URI of 1022 characters; at most 30 bytes"):
            from_wire("data:image/png;base64," + "A" * 1000, ContentLimits(image_bytes=30, audio_bytes=9))

    @pytest.mark.parametrize("size", [(30_000, 1000), (65_000, 65_000)], ids=["ours", "Pillow's own"])
    def test_a_bomb_is_refused_before_it_is_decoded(self, size: tuple[int, int]) -> None:
        picture().decode()  # Pillow's modules are no memory of the bomb
        tracemalloc.start()
        try:
            with pytest.raises(ContentError, match="pixels"):
                read_media(png_header(*size))
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()

    def test_a_broken_file_is_refused(self) -> None:
        with pytest.raises(ContentError, match="image/png of 30 bytes cannot be read"):
            read_media(PICTURES[0].data[:30])
        with pytest.raises(ContentError, match="cannot be decoded"):
            read_media(png_header(3, 3)).decode()  # type: ignore[union-attr]


class TestTags:
    @given(PARTS)
    def test_parts_survive_the_way_to_a_text_and_back(self, parts: list[TextPart | ImagePart | AudioPart]) -> None:
        text, images, audios = tagged(parts)
        media = [part for part in parts if not isinstance(part, TextPart)]
        back = parts_of(text, [to_wire(part) for part in images], audios)
        assert [part for part in back if not isinstance(part, TextPart)] == media
        # Tags of the text are broken up where there is anything that they could stand for.
        assert (text.count("<image>"), text.count("<audio>")) == (len(images), len(audios)) or not media
        assert tagged(back) == (text, images, audios)

    def test_a_text_is_what_it_was(self) -> None:
        assert parts_of("an <image> of <audio>") == [TextPart("an <image> of <audio>")]
        assert tagged([TextPart("an <image>")]) == ("an <image>", [], [])
        assert parts_of("") == []

    def test_what_has_no_tag_comes_last_and_a_tag_too_many_is_text(self) -> None:
        one, two, _ = PICTURES
        assert parts_of("a<image>b", [one, two], SOUNDS[0]) == [TextPart("a"), one, TextPart("b"), two, SOUNDS[0]]
        assert parts_of("<image>a<image>", to_wire(one)) == [one, TextPart("a<image>")]

    def test_strings_are_text(self) -> None:
        assert as_parts(["a", PICTURES[0]]) == [TextPart("a"), PICTURES[0]]
        with pytest.raises(TypeError, match="a part is a int; give a text, an ImagePart"):
            as_parts([3])


class TestWire:
    def test_bytes_or_their_name(self) -> None:
        part = PICTURES[1]
        assert from_wire(to_wire(part)) is part
        assert to_wire(part).startswith("data:image/jpeg;base64,")
        assert to_wire(part, {part.sha256}) == f"sha256:{part.sha256}"
        assert reference_in(to_wire(part, [part.sha256])) == part.sha256
        assert reference_in(to_wire(part)) is None is reference_in(3)
        assert encoded_bytes([part, "four"]) == len(part.data) + 4
        assert encoded_bytes(part) == len(part.data)
        assert encoded_bytes(None) == encoded_bytes(object()) == 0

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ("https://example.org/a.png", "no data URI; send data:image/png;base64"),
            ("sha256:00", "no data URI"),
            ("data:image/png,abc", "no data URI"),
            ("data:image/png;base64,a", "is not base64"),
            ("data:image/png;base64,é", "is not base64"),
            ("data:image/png;base64,aGk=", "begins with b'hi'"),
            (3, "an image is a int"),
            (to_wire(SOUNDS[0]), "an image is audio/wav; send a data URI of one"),
        ],
    )
    def test_what_cannot_be_read_is_refused(self, value: object, words: str) -> None:
        with pytest.raises(ContentError, match=words):
            parts_of("", [value])

    @given(st.text("Ab+/=\n\ud800é"))
    def test_any_text_is_read_or_refused(self, value: str) -> None:
        with pytest.raises(ContentError):
            from_wire(f"data:image/png;base64,{value}")

    @pytest.mark.parametrize(("said", "value"), [("image", "//A="), ("audio", "iVBORw0KGgo=")])
    def test_audio_is_no_image(self, said: str, value: str) -> None:
        with pytest.raises(ContentError):
            from_wire(f"data:{said}/png;base64,{value}")

    def test_a_type_that_cannot_be_encoded_is_refused(self) -> None:
        with pytest.raises(
            ContentError, match="'image/gif' is no media type of an image that is known; take image/png"
        ):
            encode_image(Image.new("L", (1, 1)), "image/gif")
