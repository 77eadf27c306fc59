"""Part of a report: some answers with the images that the model saw, turn by turn."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from eval_service.evaluation.record import Record
from verl_tool.agent_loop.trajectory import Author, Segment

IMAGES = "images"
"""Folder of the images, beside the report."""
MAX_ANSWERS = 8
MAX_CHARACTERS = 2000
"""Of one text."""
_FENCE = re.compile("`{3,}")


def with_images(records: Sequence[Record], folder: Path, most: int = MAX_ANSWERS) -> str:
    """The first answers of different problems in which the model saw images, as Markdown; empty if there are none.

    `folder`: the report's, which has the images in `IMAGES`.
    """
    chosen: dict[int, Record] = {}
    for record in records:
        if record.trajectory is not None and any(segment.image for segment in record.trajectory.segments):
            chosen.setdefault(record.index, record)
    if not chosen:
        return ""
    first = list(chosen.values())[:most]
    lines = ["", f"## What the model saw in {len(first)} of {len(chosen)} problems with images", ""]
    return "\n".join([*lines, *(line for record in first for line in _answer(record, folder))]) + "\n"


def _answer(record: Record, folder: Path) -> Iterator[str]:
    verdict = {None: "not scored", True: "right", False: "wrong"}[record.correct]
    yield f"### Problem {record.index}, answer {record.sample}: {verdict}"
    segments = record.trajectory.segments if record.trajectory is not None else ()
    author: Author | None = None
    for segment in segments:
        if segment.author is Author.TEMPLATE:
            continue
        if segment.author is not author:
            author = segment.author
            yield from ("", f"*{author.value}*")
        yield from ("", *_format(segment, folder))
    yield ""


def _format(segment: Segment, folder: Path) -> list[str]:
    if segment.image is None:
        text = segment.text[:MAX_CHARACTERS]
        fence = "`" * max(3, *(len(found) + 1 for found in _FENCE.findall(text)), 0)
        return [fence + "text", text, fence]
    file = next((folder / IMAGES).glob(f"{segment.image}.*"), None)
    return [f"![image]({IMAGES}/{file.name})" if file is not None else f"(image {segment.image}, which is not here)"]
