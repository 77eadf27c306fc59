"""What an observation is made of: text, images and audio. An image or audio is a file's bytes, named by their hash.

    crop = encode_image(picture.crop(box))                       # a PIL image; or read_media(bytes_of_a_file)
    ToolResult(parts=["Here is the crop:", crop])

On the wire an observation is verl-tool's: a text in which ``<image>`` and ``<audio>`` stand where they are, and beside
it lists of data URIs; in place of one that the receiver has already, ``sha256:`` and its hash. `tagged` and `parts_of`
go from parts to that text and back, `to_wire` and `from_wire` from a part to such a string and back.

Of an image only the header is read here, so that nothing is decoded before its size is known. `ImagePart.decode` takes
tens of milliseconds: call it in a worker, never in an event loop.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from typing import IO, TYPE_CHECKING, Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

from verl_tool.errors import ContentError

if TYPE_CHECKING:
    from PIL.Image import Image

_KINDS = {
    "image/png": rb"\x89PNG\r\n\x1a\n",
    "image/jpeg": rb"\xff\xd8\xff",
    "image/webp": rb"RIFF.{4}WEBP",
    "audio/wav": rb"RIFF.{4}WAVE",
    "audio/flac": rb"fLaC",
    "audio/ogg": rb"OggS",
    "audio/mpeg": rb"ID3|\xff[\xe2-\xff]",
}
"""How a file of each media type begins."""
_BEGINNING = re.compile(rb"|".join(rb"(%s)" % magic for magic in _KINDS.values()), re.DOTALL)
_TAG = re.compile(r"<(image|audio)>")
_DATA_URI = re.compile(r"data:[^,;]{0,100}(?:;[^,;]{0,100}){0,4};base64,", re.IGNORECASE)
_REFERENCE = "sha256:"


@dataclass(frozen=True)
class ContentLimits:
    """What one observation may hold."""

    image_bytes: int = 8 << 20
    """Of one image, as encoded."""
    image_pixels: int = 16 << 20
    """Of one image; three bytes each once it is decoded."""
    audio_bytes: int = 16 << 20
    media: int = 64
    """Images and audios together."""
    media_bytes: int = 32 << 20
    """Of all of them."""
    types: Collection[str] = frozenset(_KINDS)
    """Media types that are taken."""


LIMITS = ContentLimits()


@dataclass(frozen=True)
class TextPart:
    """Text."""

    text: str


@dataclass(frozen=True)
class ImagePart:
    """An image, as it was encoded. Made by `read_media` or `encode_image`; equal to any other of the same bytes."""

    data: bytes = field(repr=False, compare=False)
    media_type: str = field(compare=False)
    width: int = field(compare=False)
    """Pixels."""
    height: int = field(compare=False)
    sha256: str
    """Of `data`, hexadecimal."""

    def __reduce__(self) -> tuple[Any, ...]:
        # One of them in the process that it is sent to as well.
        return _known_image, (self.data, self.media_type, self.width, self.height, self.sha256)

    def decode(self) -> Image:
        """The first frame in RGB, transparent pixels on white. Takes tens of milliseconds: call it in a worker.

        Raises ContentError if the file is broken.
        """
        from PIL import Image

        try:
            with Image.open(BytesIO(self.data), formats=[_format_of(self.media_type)]) as opened:
                opened.load()
                if not opened.has_transparency_data:
                    return opened.convert("RGB")
                opaque = opened.convert("RGBA")
        except Exception as error:  # a decoder of anybody's bytes raises what it likes
            raise ContentError(f"{self.media_type} of {len(self.data)} bytes cannot be decoded: {error}") from error
        white = Image.new("RGB", opaque.size, (255, 255, 255))
        white.paste(opaque, mask=opaque.getchannel("A"))
        return white


@dataclass(frozen=True)
class AudioPart:
    """Audio, as it was encoded. Made by `read_media`."""

    data: bytes = field(repr=False, compare=False)
    media_type: str = field(compare=False)
    sha256: str
    """Of `data`, hexadecimal."""


MediaPart: TypeAlias = "ImagePart | AudioPart"
Part: TypeAlias = "TextPart | ImagePart | AudioPart"
_Media = TypeVar("_Media", bound="MediaPart")

_read: WeakValueDictionary[str, MediaPart] = WeakValueDictionary()
"""By hash: the same file is held once in a process, however many trajectories have it."""


def _known_image(*values: Any) -> MediaPart:
    part = ImagePart(*values)
    return _read.setdefault(part.sha256, part)


def read_media(data: bytes, limits: ContentLimits = LIMITS) -> MediaPart:
    """The image or audio that a file is, told by its first bytes. Only its header is read.

    Raises ContentError that names the value, the limit and the remedy.
    """
    found = _BEGINNING.match(data)
    kind = list(_KINDS)[(found.lastindex or 0) - 1] if found else None
    if kind is None or kind not in limits.types:
        raise ContentError(
            f"a file that begins with {data[:12]!r} is {kind or 'no image or audio that is known'}; taken are "
            f"{', '.join(sorted(limits.types))}: encode it so"
        )
    maximum = limits.image_bytes if kind.startswith("image/") else limits.audio_bytes
    if len(data) > maximum:
        raise ContentError(f"{kind} of {len(data)} bytes; at most {maximum} are taken: send a smaller or coarser one")
    name = sha256(data).hexdigest()
    part = _read.get(name)
    if part is None:
        part = (
            AudioPart(data, kind, name)
            if kind.startswith("audio/")
            else ImagePart(data, kind, *_size(data, kind), name)
        )
    if isinstance(part, ImagePart) and part.width * part.height > limits.image_pixels:
        raise ContentError(
            f"{kind} of {part.width} x {part.height} pixels; at most {limits.image_pixels} are taken: scale it down"
        )
    return _read.setdefault(name, part)


def encode_image(
    image: Image, media_type: str = "image/png", limits: ContentLimits = LIMITS, **options: Any
) -> ImagePart:
    """A PIL image as a part; `options` are those of its ``save``, such as ``quality=90``.

    Takes tens of milliseconds: call it in a worker. Raises ContentError if the result is beyond `limits`.
    """
    if media_type == "image/jpeg" and image.mode != "RGB":
        image = image.convert("RGB")  # a JPEG has no transparency and no palette
    with _file_in_memory() as file:
        image.save(file, _format_of(media_type), **options)
        file.seek(0)
        part = read_media(file.read(), limits)
    assert isinstance(part, ImagePart)
    return part


def _file_in_memory() -> IO[bytes]:
    """A file of the system where it has such ones: while Pillow writes to it, other threads go on."""
    return BytesIO() if sys.platform != "linux" else open(os.memfd_create("image"), "w+b")


def as_parts(values: Iterable[object]) -> list[Part]:
    """Strings and parts as parts. Raises TypeError for anything else."""
    parts: list[Part] = []
    for value in values:
        if not isinstance(value, (str, TextPart, ImagePart, AudioPart)):
            raise TypeError(f"a part is a {type(value).__name__}; give a text, an ImagePart or an AudioPart")
        parts.append(TextPart(value) if isinstance(value, str) else value)
    return parts


def reject_too_much(parts: Iterable[Part], limits: ContentLimits = LIMITS) -> None:
    """Raises ContentError if these are too many images and audios for one observation, or too large together."""
    sizes = [len(part.data) for part in parts if not isinstance(part, TextPart)]
    if len(sizes) > limits.media:
        raise ContentError(f"{len(sizes)} images and audios in one observation; at most {limits.media}: give fewer")
    if sum(sizes) > limits.media_bytes:
        raise ContentError(
            f"images and audios of {sum(sizes)} bytes in one observation; at most {limits.media_bytes}: give fewer, or "
            "smaller ones"
        )


def tagged(parts: Iterable[Part]) -> tuple[str, list[ImagePart], list[AudioPart]]:
    """An observation's text, in which ``<image>`` and ``<audio>`` stand for the images and audios beside it.

    Such tags in the text itself are broken up by a blank, if there is any image or audio that they could stand for.
    """
    texts, tags = [""], []
    images: list[ImagePart] = []
    audios: list[AudioPart] = []
    for part in parts:
        if isinstance(part, TextPart):
            texts[-1] += part.text
            continue
        if isinstance(part, ImagePart):
            images.append(part)
        else:
            audios.append(part)
        tags.append("<image>" if isinstance(part, ImagePart) else "<audio>")
        texts.append("")
    if tags:
        texts = [_TAG.sub(r"< \1>", text) for text in texts]
    return "".join(f"{text}{tag}" for text, tag in zip(texts, [*tags, ""], strict=True)), images, audios


def parts_of(
    observation: str, image: object = None, audio: object = None, limits: ContentLimits = LIMITS
) -> list[Part]:
    """The parts of an observation as it came: its text, and what stands beside it (a data URI, a part, or a list).

    The n-th ``<image>`` is the n-th image; tags beyond the images are text, and images beyond the tags come last.
    Raises ContentError for what cannot be read, or is beyond `limits`.
    """
    media = {
        "image": iter(_each(image, ImagePart, limits)),
        "audio": iter(_each(audio, AudioPart, limits)),
    }
    parts = as_parts(at_tags(observation, media))
    parts += [*media["image"], *media["audio"]]
    reject_too_much(parts, limits)
    return parts


def at_tags(text: str, media: Mapping[str, Iterator[_Media]]) -> Iterator[str | _Media]:
    """What stands between the tags of a text, and for each ``<image>`` and ``<audio>`` the next of `media["image"]` and
    `media["audio"]`. Where there is none any more, or no such media at all, the tag is text."""
    start = 0
    for tag in _TAG.finditer(text):
        part = next(media.get(tag[1], iter(())), None)
        if part is None:
            continue
        if start < tag.start():
            yield text[start : tag.start()]
        yield part
        start = tag.end()
    if start < len(text):
        yield text[start:]


def to_wire(part: MediaPart, known: Collection[str] = ()) -> str:
    """A part as a data URI, or as a reference if its receiver has what `known` names (hashes)."""
    if part.sha256 in known:
        return f"{_REFERENCE}{part.sha256}"
    return f"data:{part.media_type};base64,{base64.b64encode(part.data).decode()}"


def from_wire(value: str, limits: ContentLimits = LIMITS) -> MediaPart:
    """The part that a data URI holds. Raises ContentError."""
    found = _DATA_URI.match(value)
    if found is None:
        raise ContentError(f"{value[:40]!r} is no data URI; send data:image/png;base64,…")
    # Four characters are three bytes: what is too large is not decoded.
    maximum = max(limits.image_bytes, limits.audio_bytes)
    if len(value) - found.end() > (maximum // 3 + 1) * 4:
        raise ContentError(
            f"a data URI of {len(value)} characters; at most {maximum} bytes are taken: send a smaller one"
        )
    try:
        data = base64.b64decode(value[found.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise ContentError(f"the data URI {value[:40]!r}… is not base64: {error}") from None
    part = read_media(data, limits)
    reported, held = value[5:].partition("/")[0].lower(), part.media_type.partition("/")[0]
    if reported in ("image", "audio") and reported != held:
        raise ContentError(f"the data URI {value[:40]!r}… says {reported} and holds {part.media_type}; say which it is")
    return part


def reference_in(value: object) -> str | None:
    """The hash that a reference names; None if it is none."""
    return value.removeprefix(_REFERENCE) if isinstance(value, str) and value.startswith(_REFERENCE) else None


def listed(value: object) -> Sequence[object]:
    """What stands beside an observation, as a list: nothing, one, or several."""
    if value is None:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)


def encoded_bytes(value: object) -> int:
    """How much what stands beside an observation holds, as it is encoded; what cannot be read counts nothing."""
    held = (each.data if isinstance(each, (ImagePart, AudioPart)) else each for each in listed(value))
    return sum(len(each) for each in held if isinstance(each, (str, bytes)))


def _each(value: object, kind: type[MediaPart], limits: ContentLimits) -> Iterator[MediaPart]:
    for each in listed(value):
        part = from_wire(each, limits) if isinstance(each, str) else each
        if not isinstance(part, kind):
            description = part.media_type if isinstance(part, (ImagePart, AudioPart)) else f"a {type(part).__name__}"
            raise ContentError(
                f"an {'image' if kind is ImagePart else 'audio'} is {description}; send a data URI of one"
            )
        yield part


def _format_of(media_type: str) -> str:
    """Pillow's name of it. Raises ContentError."""
    if media_type not in _KINDS or not media_type.startswith("image/"):
        known = ", ".join(kind for kind in _KINDS if kind.startswith("image/"))
        raise ContentError(f"{media_type!r} is no media type of an image that is known; take {known}")
    return media_type.removeprefix("image/").upper()


def _size(data: bytes, kind: str) -> tuple[int, int]:
    """Width and height by the header. Raises ContentError."""
    from PIL import Image, WebPImagePlugin  # noqa: F401  # without it, Pillow loads all of its plug-ins for a WebP

    try:
        with Image.open(BytesIO(data), formats=[_format_of(kind)]) as opened:
            return opened.size
    except Exception as error:  # a reader of anybody's bytes raises what it likes, and for a bomb an error of its own
        raise ContentError(f"{kind} of {len(data)} bytes cannot be read: {error}; encode it anew") from error
