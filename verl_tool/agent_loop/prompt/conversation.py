"""Read the conversation of a row and its images.

    {"prompt": [{"role": "user", "content": "<image>What is it?"}], "images": [{"bytes": …}]}

As in verl's rows, the n-th ``<image>`` in the texts stands for the n-th entry of the column ``images``. A message may
also contain images as parts, ``{"type": "image", "image": …}``. Both give the same result: the images in order, and
messages whose content is a text or, as chat templates expect, a list of text parts and ``{"type": "image"}``.
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
"""Column with the images for each ``<image>`` in a prompt."""
TAG = "<image>"
OTHER_MEDIA = tuple(column for column in MEDIA_COLUMNS if column != IMAGES_COLUMN)
"""Columns with unsupported media."""
_IMAGE_KEYS = ("bytes", "image", "path", "image_url", "url")
"""Keys of a mapping that may hold an image, in order of preference."""


@dataclass(frozen=True)
class Conversation:
    """The messages and images of a prompt."""

    messages: list[dict[str, Any]]
    """Messages. With images, the content is a list of ``{"type": "text", "text": …}`` and ``{"type": "image"}``."""
    images: tuple[ImagePart, ...] = ()
    """Images in the order of the prompt."""


def read_conversation(messages: Sequence[Mapping[str, Any]], images: object, where: str) -> Conversation:
    """Combine the messages of a row with its column ``images``. Reads image files and encodes decoded images, so call
    it in a worker thread.

    Raises ConfigError that names the row (`where`), the message and the problem.
    """
    column = [read_image(value, f"{where}, image {i}") for i, value in enumerate(_as_list(images))]
    if isinstance(messages, str) or not all(isinstance(message, Mapping) for message in messages):
        raise ConfigError(f"{where}: the prompt is not a list of messages with 'role' and 'content'")
    left = iter(column)
    read: list[dict[str, Any]] = []
    found: list[ImagePart] = []
    for i, message in enumerate(messages):
        place = f"{where}, message {i}"
        parts = list(_parts_of(message.get("content"), left, place))
        held = [part for part in parts if isinstance(part, ImagePart)]
        if not held:
            read += text_messages([message], where)
            continue
        reject_media(message, place)
        found += held
        read.append({**message, "content": [_for_template(part) for part in parts]})
    tags = len(column) - len(list(left)) + sum(str(message.get("content")).count(TAG) for message in read if column)
    if tags != len(column):
        raise ConfigError(f"{where}: {len(column)} images and {tags} {TAG} in its prompt; write one for each image")
    return Conversation(read, tuple(found))


def without_images(messages: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the messages of a row as texts, with ``<image>`` in place of each image part. Raises ConfigError that
    names the row and the message if they contain other media."""
    texts_only = []
    for message in messages:
        parts = _as_list(message.get("content")) if isinstance(message, Mapping) else []
        if any(_is_image(part) for part in parts):
            texts = [{"type": "text", "text": TAG} if _is_image(part) else part for part in parts]
            message = {**message, "content": texts}
        texts_only.append(message)
    return text_messages(texts_only, where)


def read_image(value: object, where: str) -> ImagePart:
    """Read an image of a row: its file's bytes, a data URI, a path, a PIL image, or a mapping with one of them.

    Raises ConfigError that names the image (`where`) and the limit.
    """
    if isinstance(value, Mapping):
        value = next((value[key] for key in _IMAGE_KEYS if value.get(key) is not None), None)
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
    if hasattr(value, "save") and hasattr(value, "convert"):  # a PIL image; PIL may not be installed
        return encode_image(value)  # type: ignore[arg-type]
    raise ContentError(f"a {type(value).__name__} is not an image; give its bytes, a data URI or a path")


def _parts_of(content: object, left: Iterator[ImagePart], where: str) -> Iterator[str | ImagePart]:
    """Yield the texts and images of a message's content."""
    if isinstance(content, str):
        yield from at_tags(content, {"image": left})
        return
    parts = [content] if isinstance(content, Mapping) else _as_list(content)
    for n, part in enumerate(parts):
        if _is_image(part):
            embedded = any(is_present(part.get(key)) for key in _IMAGE_KEYS)
            image = read_image(part, f"{where}, part {n}") if embedded else next(left, None)
            if image is None:
                raise ConfigError(
                    f"{where}, part {n} is an image, and the column {IMAGES_COLUMN!r} has none left for it"
                )
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


def _as_list(value: object) -> list[Any]:
    """Convert a column's value to a list: also a numpy array, as pandas reads parquet, or a missing value."""
    if not is_present(value):
        return []
    if isinstance(value, (list, tuple)):
        return list(value)
    return list(value.tolist()) if hasattr(value, "tolist") else [value]
