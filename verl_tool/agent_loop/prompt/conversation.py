"""The conversation of a row, and the images in it.

    {"prompt": [{"role": "user", "content": "<image>What is it?"}], "images": [{"bytes": …}]}

As in verl's rows the n-th ``<image>`` of the texts stands for the n-th entry of the column ``images``; a message may
also hold its images as parts, ``{"type": "image", "image": …}``. What comes of both is the same: messages whose content
is a text, or a list of parts of text and ``{"type": "image"}``, as chat templates take it, and the images in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_tool.agent_loop.row import MEDIA_COLUMNS, is_present, reject_media, text_messages
from verl_tool.content.parts import LIMITS, ImagePart, at_tags, encode_image, from_wire, read_media
from verl_tool.errors import ConfigError, ContentError

IMAGES_COLUMN = "images"
"""Column of the images that ``<image>`` in a prompt stands for."""
TAG = "<image>"
OTHER_MEDIA = tuple(column for column in MEDIA_COLUMNS if column != IMAGES_COLUMN)
"""Columns that are refused beside it."""
_OF_AN_IMAGE = ("bytes", "image", "path", "image_url", "url")
"""Keys of a mapping under which an image may be, best first."""


@dataclass(frozen=True)
class Conversation:
    """What a prompt is made of."""

    messages: list[dict[str, Any]]
    """The content of one with images is a list of ``{"type": "text", "text": …}`` and ``{"type": "image"}``."""
    images: tuple[ImagePart, ...] = ()
    """In the order of their places."""


def read_conversation(messages: Sequence[Mapping[str, Any]], images: object, where: str) -> Conversation:
    """The messages of a row with what its column ``images`` holds. Reads files and, for images that are decoded
    already, encodes them: call it in a worker if there may be any.

    Raises ConfigError that names the row (`where`), the message and what is wrong with it.
    """
    column = [read_image(value, f"{where}, image {i}") for i, value in enumerate(_listed(images))]
    if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
        raise ConfigError(f"{where}: the prompt is not a list of messages with 'role' and 'content'")
    left = iter(column)
    description: list[dict[str, Any]] = []
    found: list[ImagePart] = []
    for i, message in enumerate(messages):
        place = f"{where}, message {i}"
        parts = list(_parts_of(message.get("content"), left, place))
        held = [part for part in parts if isinstance(part, ImagePart)]
        if not held:
            description += text_messages([message], where)
            continue
        reject_media(message, place)
        found += held
        description.append({**message, "content": [_for_template(part) for part in parts]})
    places = (
        len(column) - len(list(left)) + sum(str(message.get("content")).count(TAG) for message in description if column)
    )
    if places != len(column):
        raise ConfigError(f"{where}: {len(column)} images and {places} {TAG} in its prompt; write one for each image")
    return Conversation(description, tuple(found))


def without_images(messages: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """The messages of a row as texts, with ``<image>`` for each part that is an image. Raises ConfigError that names
    the row and the message if they hold other media."""
    description = []
    for message in messages:
        parts = _listed(message.get("content")) if isinstance(message, Mapping) else []
        if any(_is_image(part) for part in parts):
            texts = [{"type": "text", "text": TAG} if _is_image(part) else part for part in parts]
            message = {**message, "content": texts}
        description.append(message)
    return text_messages(description, where)


def read_image(value: object, where: str) -> ImagePart:
    """An image of a row: its file's bytes, a data URI, a path, a PIL image, or a mapping that holds one of them.

    Raises ConfigError that names the image (`where`) and the limit.
    """
    if isinstance(value, Mapping):
        value = next((value[key] for key in _OF_AN_IMAGE if value.get(key) is not None), None)
        value = value["url"] if isinstance(value, Mapping) and "url" in value else value
    try:
        part = _read(value)
    except (ContentError, OSError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(part, ImagePart):
        raise ConfigError(f"{where} is {part.media_type}; give an image")
    return part


def _read(value: object) -> Any:
    if isinstance(value, ImagePart):
        return value
    if isinstance(value, bytes):
        return read_media(value)
    if isinstance(value, str) and value.startswith("data:"):
        return from_wire(value)
    if isinstance(value, (str, os.PathLike)):
        if "://" in str(value) and not str(value).startswith("file://"):
            raise ContentError(f"{str(value)[:80]!r} is not fetched; put the image's bytes into the row")
        path = Path(str(value).removeprefix("file://"))
        maximum = LIMITS.image_bytes
        with path.open("rb") as file:
            return read_media(file.read(maximum + 1))
    if hasattr(value, "save") and hasattr(value, "convert"):  # PIL's, which need not be there
        return encode_image(value)  # type: ignore[arg-type]
    raise ContentError(f"a {type(value).__name__} is no image; give its bytes, a data URI or a path")


def _parts_of(content: object, left: Iterator[ImagePart], where: str) -> Iterator[str | ImagePart]:
    """Texts and images of a message's content."""
    if isinstance(content, str):
        yield from at_tags(content, {"image": left})
        return
    parts = [content] if isinstance(content, Mapping) else _listed(content)
    for n, part in enumerate(parts):
        if _is_image(part):
            own = any(is_present(part.get(key)) for key in _OF_AN_IMAGE)
            image = read_image(part, f"{where}, part {n}") if own else next(left, None)
            if image is None:
                raise ConfigError(f"{where}, part {n} is an image and the row has none for it; give as many as places")
            yield image
        elif isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            yield part["text"]
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ConfigError(
                f"{where} contains a part of type {kind!r}; only text and images are carried. Leave it out"
            )


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def _for_template(part: str | ImagePart) -> dict[str, Any]:
    return {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part}


def _listed(value: object) -> list[Any]:
    """A column of lists; numpy's arrays as pandas reads parquet, and gaps in it."""
    if not is_present(value):
        return []
    if isinstance(value, (list, tuple)):
        return list(value)
    return list(value.tolist()) if hasattr(value, "tolist") else [value]
