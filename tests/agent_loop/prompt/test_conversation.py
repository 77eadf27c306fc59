"""Conversations of rows with images, in the forms that verl's data sets and its own data loader have."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from toy_tools import picture

from verl_tool.agent_loop.prompt.conversation import read_conversation, read_image, without_images
from verl_tool.content.parts import to_wire
from verl_tool.errors import ConfigError

ONE, TWO = picture(1, (2, 2)), picture(2, (5, 2))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]


def test_tags_of_the_texts_stand_for_the_entries_of_the_column() -> None:
    found = read_conversation(
        user("<image>What is <image>it?"), [{"bytes": ONE.data, "path": None}, to_wire(TWO)], "row 0"
    )
    assert found.images == (ONE, TWO)
    assert found.messages == user(
        [{"type": "image"}, {"type": "text", "text": "What is "}, {"type": "image"}, {"type": "text", "text": "it?"}]
    )


def test_parts_that_hold_their_image_are_taken_as_verls_data_loader_makes_them() -> None:
    from PIL import Image

    opened = Image.open(BytesIO(ONE.data))
    content = [
        {"type": "image", "bytes": ONE.data, "image": opened},
        {"type": "text", "text": "?"},
        {"type": "image", "image": opened},
        {"type": "image_url", "image_url": {"url": to_wire(TWO)}},
    ]
    found = read_conversation(user(content), None, "row 0")
    assert found.images[0] == ONE
    assert found.images[1].decode().tobytes() == ONE.decode().tobytes()
    assert found.images[2] == TWO
    assert [part["type"] for part in found.messages[1]["content"]] == ["image", "text", "image", "image"]


def test_a_row_without_images_keeps_its_texts() -> None:
    messages = user([{"type": "text", "text": "a "}, {"type": "text", "text": "<image>"}])
    assert read_conversation(messages, None, "row 0").messages == user("a <image>")
    assert read_conversation(user("<image>?"), [], "row 0").messages == user("<image>?")


def test_numpys_arrays_and_paths(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "one.png"
    path.write_bytes(ONE.data)
    column = numpy.array([{"bytes": None, "path": str(path)}], dtype=object)
    assert read_conversation(user("<image>"), column, "row 0").images == (ONE,)


@pytest.mark.parametrize(
    ("content", "column", "words"),
    [
        ("<image>", [ONE, TWO], "row 7: 2 images and 1 <image> in its prompt"),
        ("<image><image>", [ONE], "row 7: 1 images and 2 <image> in its prompt"),
        ("?", [ONE], "row 7: 1 images and 0 <image>"),
        ([{"type": "image"}], None, "row 7, message 1, part 0 is an image, and the column 'images' has none"),
        ([{"type": "image", "image": ONE}, {"type": "video", "video": "x"}], None, "a part of type 'video'"),
        ("<image>", [b"GIF89a"], "row 7, image 0: a file that begins with b'GIF89a' is no image"),
        ("<image>", ["http://127.0.0.1/a.png"], "row 7, image 0: 'http://127.0.0.1/a.png' is not fetched"),
        ("<image>", [3], "row 7, image 0: a int is not an image"),
        ("<image>", ["/no/such.png"], "row 7, image 0: .*No such file"),
    ],
)
def test_what_is_wrong_is_named_with_its_row(content: Any, column: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_conversation(user(content), column, "row 7")


def test_audio_is_no_image() -> None:
    with pytest.raises(ConfigError, match="image 0 is audio/flac; give an image"):
        read_image(b"fLaC" + b"\0" * 20, "image 0")


def test_a_conversation_as_texts_alone() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    told = without_images([{"role": "system", "content": "s"}, {"role": "user", "content": parts}], "row 1")
    assert [message["content"] for message in told] == ["s", "<image>a<image>"]
    with pytest.raises(ConfigError, match="row 1, message 0 contains a part of type 'video'"):
        without_images([{"role": "user", "content": [{"type": "image"}, {"type": "video"}]}], "row 1")
    with pytest.raises(ConfigError, match="not a list of messages"):
        without_images("abc", "row 1")  # type: ignore[arg-type]
