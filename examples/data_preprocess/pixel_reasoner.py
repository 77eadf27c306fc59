r"""Questions about images and frames of videos, as Pixel Reasoner trains on (arXiv 2505.15966), for `pixel_reasoner`.

    hf download TIGER-Lab/PixelReasoner-RL-Data --repo-type dataset --local-dir PixelReasoner-RL-Data
    cd PixelReasoner-RL-Data && unzip -q images.zip -d images && unzip -q videos.zip -d videos && cd -
    python examples/data_preprocess/pixel_reasoner.py --dataset_path PixelReasoner-RL-Data

A source's row has `question`, `answer` (a list, whose first entry counts), `image` (names of files: one image, or the
frames of a video), `is_video` and `qid`. A row that is made has the files' paths in `images`, as verl has them, and an
``<image>`` for each in front of its question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rows import (
    WITHOUT_TOOL,
    DatasetPath,
    Limit,
    LocalDir,
    Row,
    RowError,
    Seed,
    TestSize,
    convert,
    divide,
    field,
    has_split,
    load,
    messages,
    row,
    rows_without_tool,
    run,
    save,
)

DATA_SOURCE = "pixel_reasoner"
IMAGE = "<image>"
FOLDERS = {False: "images", True: "videos"}
"""Where images lie, and frames of videos."""
_BOX = {
    "bbox_2d": {
        "type": "array",
        "items": {"type": "number"},
        "description": "The area to zoom in on: left, top, right and bottom edge, in pixels of the image.",
    },
    "target_image": {
        "type": "integer",
        "description": "Number of the image, from 1; 1 is the original image, later ones are those that came back.",
    },
}
_FRAMES = {
    "target_frames": {
        "type": "array",
        "items": {"type": "integer"},
        "description": "Numbers of the frames, from 1; at most 8 of them.",
    }
}
TOOLS = {
    "crop_image": ("Zoom in on an area of an image.", _BOX),
    "select_frames": ("Show some frames of a video again.", _FRAMES),
}
"""Names and arguments are those that Pixel Reasoner's models were warmed up with."""
SYSTEM = "You are a helpful assistant."
CALLING = """{system}

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
LOOKING = (
    "Look at what you are shown, and decide whether a closer look helps: crop_image enlarges a part of an image, and "
    "select_frames shows frames of a video."
)
ANSWERING = "Reason step by step, and put your final answer within \\boxed{}."


def signature(name: str) -> str:
    """A tool as chat templates of Qwen2.5 describe it."""
    description, properties = TOOLS[name]
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": schema}
    return json.dumps({"type": "function", "function": function})


def system_message(use_tool: bool) -> str:
    """What the model is told of its tools, as Qwen2.5's own chat template would say it."""
    return CALLING.format(system=SYSTEM, tools="\n".join(map(signature, TOOLS))) if use_tool else SYSTEM


def as_row(
    source: Mapping[str, Any],
    split: str,
    index: int,
    media: Path,
    use_tool: bool = True,
    instructions: bool = True,
) -> Row:
    """One question. `instructions`: whether the prompt tells how to answer. Raises RowError that names a file that is
    not there."""
    is_video = bool(source.get("is_video"))
    files = [_file(str(name), media, is_video, index) for name in field(source, "image", index, list)]
    answer = field(source, "answer", index, str, list)
    question = field(source, "question", index).strip()
    asked = f"{IMAGE * len(files)}{question}"
    told = f"{asked}\n\n{LOOKING} {ANSWERING}" if use_tool else f"{asked}\n\n{ANSWERING}"
    prompt = messages(system_message(use_tool), told) if instructions else messages(None, asked)
    extra = {"question": question, "qid": str(source.get("qid") or f"{split}_{index}"), "is_video": is_video}
    gold = str(answer if isinstance(answer, str) else answer[0])
    made = row(DATA_SOURCE, prompt, "visual_reasoning", gold, split, index, extra, use_tool)
    return made | {"images": [{"image": str(file)} for file in files]}


def _file(name: str, media: Path, is_video: bool, index: int) -> Path:
    """A file of the row, in the folder of its kind or right in `media`."""
    folder = FOLDERS[is_video]
    for path in (media / folder / name, media / name):
        if path.is_file():
            return path.resolve()
    raise RowError(
        f"row {index}: neither {media / folder / name} nor {media / name} exists; unpack {folder}.zip of the data set "
        f"into {media / folder}, or name its folder by --media"
    )


def main(
    dataset_path: DatasetPath = "PixelReasoner-RL-Data",
    local_dir: LocalDir = Path("data/pixel_reasoner"),
    media: Annotated[
        Path | None,
        typer.Option("--media", help="Folder with images and videos, unpacked; that of --dataset_path if not given."),
    ] = None,
    tool: Annotated[bool, typer.Option(help="Tell the model of the tools, and let it use them.")] = True,
    instructions: Annotated[bool, typer.Option(" /--no_instructions", help="Give images and question alone.")] = True,
    without_tool: Annotated[
        bool, typer.Option("--without_tool", help="Write the test questions once more, to be answered without tools.")
    ] = False,
    videos: Annotated[bool, typer.Option(help="Questions about videos too.")] = True,
    test_size: TestSize = 100,
    seed: Seed = 42,
    limit: Limit = None,
) -> None:
    """Make the Pixel Reasoner data set. `test_size` and `seed` matter only where the source has no test split."""
    local = Path(dataset_path)
    folder = media or (local if local.is_dir() else local.parent)

    def part(split: str) -> list[Mapping[str, Any]]:
        return [each for each in load(dataset_path, split, limit=limit) if videos or not each.get("is_video")]

    if has_split(dataset_path, "test"):
        splits = {split: part(split) for split in ("train", "test")}
    else:
        splits = divide(part("train"), "question", test_size, seed)
    rows = convert(splits, partial(as_row, media=folder, use_tool=tool, instructions=instructions))
    if without_tool:
        make = partial(as_row, media=folder, use_tool=False, instructions=instructions)
        rows |= rows_without_tool(splits["test"], make, f"{DATA_SOURCE}_{WITHOUT_TOOL}")
    save(rows, local_dir)


if __name__ == "__main__":
    run(main)
