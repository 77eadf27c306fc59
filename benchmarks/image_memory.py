"""What the images of a step of training hold in memory.

    python benchmarks/image_memory.py --json outputs/benchmarks/image_memory.json

Each step runs ``--trajectories`` at once in the loop, over an engine that answers at once; a tool answers each of their
``--images`` turns with a picture of a megapixel, which nobody has seen before. All of them are kept until the last is
done, with what verl's trainer is given for them, as in a real step. Told are the resident memory above that of before
the first step, at the end of each step and when it is forgotten; and what the pixels of the same images are in the form
in which verl carries them from its loop to its workers. torchvision is needed (``source scripts/env.sh train``).
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.generators.qwen_images import VIDEO_PAD, QwenImages
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.verl.agent_loop import model_inputs
from verl_tool.content.parts import from_wire, read_media, to_wire
from verl_tool.platforms.vision.packed_images import PACKED
from verl_tool.protocol import StepResult

SIDE = 1024
"""Pixels of a picture's side."""
BYTES_A_PIXEL = 24
"""Of verl's ``pixel_values``: three colours in float32, for two frames."""
SPECIALS = ["<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", VIDEO_PAD]


@dataclass(frozen=True)
class Step:
    """Memory of one step, in MiB."""

    step: int
    files: float
    """The image files together."""
    packed: float
    """What the trainer is given."""
    held: float
    """Resident, all trajectories held."""
    forgotten: float
    """Resident, none held."""
    pixels: float
    """The same images as verl carries them."""


class Tools:
    """Answers each call with a picture of its own."""

    def __init__(self) -> None:
        noise = Image.frombytes("L", (128, 128), random.Random(0).randbytes(128 * 128))
        file = BytesIO()
        noise.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB").save(file, "JPEG", quality=80)
        self._file, self._answered = file.getvalue(), 0

    async def call(self, trajectory_id: str, action: str, **_: Any) -> StepResult:
        """See `Tools`."""
        self._answered += 1
        # A comment tells the files apart.
        comment = self._answered.to_bytes(8, "big")
        data = self._file[:2] + b"\xff\xfe\x00\x0a" + comment + self._file[2:]
        # Through the wire's form, as the client reads it.
        return StepResult(trajectory_id, "<image>", image=[from_wire(to_wire(read_media(data)))])


class Engine:
    """Says the same short line at once."""

    def __init__(self, line: list[int]) -> None:
        self._line = line

    async def generate(self, prompt_ids: list[int], params: dict[str, Any], request_id: str, images: Any = ()) -> Any:
        """See `ImageGenerator`."""
        await asyncio.sleep(0)
        return Generation(self._line, [-1.0] * len(self._line), "stop")


def main(
    trajectories: Annotated[int, typer.Option(help="In one step.")] = 500,
    images: Annotated[int, typer.Option(help="Of one trajectory.")] = 8,
    steps: Annotated[int, typer.Option(help="One behind the other.")] = 4,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there.")] = None,
) -> None:
    """Measure, and print a table."""
    found = asyncio.run(measured(trajectories, images, steps))
    table = Table(title=f"{trajectories} trajectories with {images} pictures of {SIDE} x {SIDE}, MiB")
    for title in ("step", "image files", "given to the trainer", "resident, held", "resident, forgotten", "as pixels"):
        table.add_column(title, justify="right")
    for step in found:
        table.add_row(*(f"{value:,.0f}" for value in asdict(step).values()))
    Console().print(table)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps([asdict(step) for step in found], indent=1))


async def measured(trajectories: int, images: int, steps: int) -> list[Step]:
    """One after the other."""
    tokenizer = small_tokenizer()
    reading = QwenImages(Qwen2VLImageProcessor(patch_size=16), tokenizer)
    options = EpisodeOptions(
        max_turns=images, min_turns=images, enable_mtrl=True, mtrl_sep="\n{obs}\n", max_obs_length=4096
    )
    episode = Episode(Engine(tokenizer.encode("look")), Tools(), tokenizer, options, image_tokens=reading)
    prompt = tokenizer.encode("what is it?")
    await episode.run(prompt)
    before, found = resident(), []
    for number in range(steps):
        held = await asyncio.gather(*(episode.run(prompt) for _ in range(trajectories)))
        inputs = [await asyncio.to_thread(model_inputs, reading, trajectory.visible_images) for trajectory in held]
        shown = {image.sha256: image for trajectory in held for image in trajectory.visible_images}
        assert len(shown) == trajectories * images
        files = sum(len(image.data) for image in shown.values())
        packed = sum(each[PACKED].nbytes for each in inputs)
        pixels = sum(image.width * image.height for image in shown.values()) * BYTES_A_PIXEL
        at_end = resident()
        del held, inputs, shown
        found.append(Step(number + 1, *(mib(n) for n in (files, packed, at_end - before, resident() - before, pixels))))
    return found


def small_tokenizer() -> HFTokenizer:
    """One byte, one token, and those for images."""
    from tokenizers import pre_tokenizers

    letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Qwen2Tokenizer(vocab=letters, merges=[], eos_token=SPECIALS[0], pad_token=SPECIALS[0], unk_token=None)
    made.add_special_tokens({"additional_special_tokens": SPECIALS[1:]})
    return HFTokenizer(made)


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return psutil.Process().memory_info().rss


def mib(n: float) -> float:
    """Bytes as MiB."""
    return round(n / (1 << 20), 1)


if __name__ == "__main__":
    typer.run(main)
