"""Answers with images in a report."""

from __future__ import annotations

from pathlib import Path

from toy_tools import picture

from eval_service.evaluation.image_report import with_images
from eval_service.evaluation.record import Record
from verl_tool.agent_loop.trajectory import Author, Segment, StopReason, Trajectory, save_images

ONE, TWO = picture(1), picture(2)


def record(index: int, *segments: Segment, sample: int = 0) -> Record:
    return Record(index, sample, "d", correct=True, trajectory=Trajectory("t", segments, StopReason.ANSWERED))


def test_turns_are_shown_with_their_images_in_order(tmp_path: Path) -> None:
    save_images(tmp_path / "images", [ONE])
    shown = with_images(
        [
            record(0, Segment(Author.PROMPT, (1,), text="no image")),
            record(
                1,
                Segment(Author.PROMPT, (1,), image=ONE.sha256),
                Segment(Author.PROMPT, (1,), text="what?"),
                Segment(Author.MODEL, (2,), text="```\nlook\n```"),
                Segment(Author.TEMPLATE, (3,), text="<|im_end|>"),
                Segment(Author.TOOL, (3,), image=TWO.sha256),
            ),
            record(1, Segment(Author.PROMPT, (1,), image=ONE.sha256), sample=1),
        ],
        tmp_path,
    )
    assert "in 1 of 1 problems" in shown
    assert [line for line in shown.splitlines() if line and not line.startswith("#")] == [
        "*prompt*", f"![image](images/{ONE.sha256}.png)", "```text", "what?", "```",
        "*model*", "````text", "```", "look", "```", "````",
        "*tool*", f"(image {TWO.sha256}, which is not here)",
    ]  # fmt: skip


def test_there_are_so_many_problems_and_none_without_images(tmp_path: Path) -> None:
    records = [record(i, Segment(Author.PROMPT, (1,), image=ONE.sha256)) for i in range(5)]
    assert "in 3 of 5 problems" in (shown := with_images(records, tmp_path, most=3))
    assert shown.count("### Problem") == 3
    assert with_images([record(0, Segment(Author.PROMPT, (1,), text="a"))], tmp_path) == ""
