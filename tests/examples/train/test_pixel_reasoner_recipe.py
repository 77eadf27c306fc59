"""The recipe that zooms in: the pictures of its small form, and what its tiny vision model learns from."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_module import load_script

pytest.importorskip("datasets")
pd = pytest.importorskip("pandas")
np = pytest.importorskip("numpy")

from PIL import Image  # noqa: E402

EXAMPLES = Path(__file__).parents[3] / "examples"
RECIPE = EXAMPLES / "train" / "pixel_reasoner"
IGNORED = -100
"""Label of a token that is not learned."""
SMALL = {"train_size": 160, "test_size": 8, "seed": 3}


@pytest.fixture(scope="module")
def make_pictures() -> ModuleType:
    return load_script("make_pictures", RECIPE / "make_pictures.py")


@pytest.fixture(scope="module")
def made(make_pictures: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures and rows, made by the recipe's own commands."""
    folder = tmp_path_factory.mktemp("pixel_reasoner")
    make_pictures.main(folder / "pictures", **SMALL)
    sys.path.append(str(EXAMPLES / "data_preprocess"))
    load_script("pixel_reasoner_data", EXAMPLES / "data_preprocess" / "pixel_reasoner.py").main(
        *(str(folder / "pictures"), folder / "data"),
        **{"media": None, "tool": True, "instructions": False, "without_tool": True, "videos": True},
        **{"test_size": 0, "seed": 0, "limit": None},
    )
    return folder


def rows(made: Path, split: str = "train") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pd.read_parquet(made / "data" / f"{split}.parquet").to_dict("records")
    return found


def with_each_digit(make_pictures: ModuleType, seed: int) -> list[Image.Image]:
    """One picture, with all else as it is."""
    picture = make_pictures.Picture.drawn(np.random.default_rng(seed))
    return [replace(picture, digit=digit).image() for digit in range(10)]


def test_from_afar_no_digit_leaves_a_trace(make_pictures: ModuleType) -> None:
    for seed in range(20):
        images = with_each_digit(make_pictures, seed)
        assert len({image.tobytes() for image in images}) == 10
        seen = {image.resize((64, 64), Image.Resampling.BICUBIC).tobytes() for image in images}
        assert len(seen) == 1


def test_the_model_sees_the_same_picture_whatever_the_digit_until_it_zooms_in(make_pictures: ModuleType) -> None:
    pytest.importorskip("torchvision")
    vision = load_vision()
    tokenizer = vision.make_tokenizer(["user"], 300, vision.CHAT_TEMPLATE, vision.VISION)
    processor = vision.make_processor(tokenizer, make_pictures.SEEN).image_processor

    def shown(images: list[Image.Image]) -> Any:
        features = processor(images=images, return_tensors="pt")
        assert features["image_grid_thw"].tolist() == [[1, 4, 4]] * len(images)
        return features["pixel_values"].view(len(images), -1)

    for seed in range(5):
        images, box = with_each_digit(make_pictures, seed), make_pictures.Picture.drawn(np.random.default_rng(seed)).box
        overviews, close = shown(images), shown([image.crop(box) for image in images])
        assert (overviews == overviews[0]).all()
        away = [(close[n] - close[other]).abs().max() for n in range(10) for other in range(n)]
        assert min(away) > 1


def test_the_card_is_in_its_quarter_and_no_level_is_clipped(make_pictures: ModuleType) -> None:
    rng = np.random.default_rng(0)
    for picture in [make_pictures.Picture.drawn(rng) for _ in range(40)]:
        grey = np.asarray(picture.image())[..., 0]
        assert grey.min() > 0
        assert grey.max() < 255
        bright = np.argwhere(grey > make_pictures.GROUND + 4 * make_pictures.NOISE)
        left, top, right, bottom = picture.box
        assert ((bright >= (top, left)) & (bright < (bottom, right))).all()
    levels = make_pictures.CARD + make_pictures.KNOT * 1.0
    assert levels.min() > 3 * make_pictures.NOISE
    assert levels.max() < 255 - 3 * make_pictures.NOISE


def test_no_picture_to_train_on_is_held_out(made: Path) -> None:
    files = sorted((made / "pictures" / "images").iterdir())
    assert len(files) == len({sha256(file.read_bytes()).hexdigest() for file in files}) == 168
    named = [{Path(row["images"][0]["image"]).name for row in rows(made, split)} for split in ("train", "test")]
    assert [len(each) for each in named] == [160, 8]
    assert not named[0] & named[1]


def test_rows_ask_for_the_digit_and_the_held_out_ones_once_more_without_the_tool(made: Path) -> None:
    train, test, without = (rows(made, split) for split in ("train", "test", "without_tool"))
    assert {row["prompt"][0]["content"] for row in train + test + without} == {"<image>Which digit?"}
    assert {row["reward_model"]["ground_truth"] for row in train} == set("0123456789")
    assert [row["reward_model"] for row in without] == [row["reward_model"] for row in test]
    assert [row["use_tool"] for row in test + without] == [True] * 8 + [False] * 8
    sources = {row["data_source"] for row in test}, {row["data_source"] for row in without}
    assert sources == ({"pixel_reasoner"}, {"pixel_reasoner_without_tool"})


def load_vision() -> ModuleType:
    sys.path.append(str(EXAMPLES / "train"))
    module = load_script("from_scratch_vision", EXAMPLES / "train" / "from_scratch_vision.py")
    module.make_tokenizer = sys.modules["from_scratch"].make_tokenizer  # type: ignore[attr-defined]
    return module


@pytest.fixture(scope="module")
def warmup(make_pictures: ModuleType) -> ModuleType:
    pytest.importorskip("torchvision")
    pytest.importorskip("verl")
    sys.path.append(str(RECIPE))
    return load_script("pixel_reasoner_warmup", RECIPE / "warmup.py")


@pytest.fixture(scope="module")
def taught(warmup: ModuleType, made: Path) -> tuple[Any, Any, list[Any], list[Any]]:
    """Tokenizer, how images are read, and rows of both kinds."""
    found: tuple[Any, Any, list[Any], list[Any]] = asyncio.run(warmup.made(rows(made), 0))
    return found


def test_the_lessons_hold_what_the_real_tool_shows(warmup: ModuleType, make_pictures: ModuleType, taught: Any) -> None:
    tokenizer, _, learned, measured = taught
    assert len(measured) == warmup.MEASURED_ROWS
    for lesson in [*learned, *measured]:
        text = tokenizer.decode(lesson["input_ids"])
        overview, *crops = [image.decode() for image in lesson["images"]]
        assert overview.size == (128, 128)
        assert text.count("<tool_call>") == len(crops) <= 1
        assert len(lesson["input_ids"]) <= 32 + 96
        for crop in crops:
            assert "Image Size: 64x64" in text
            [quarter] = [n for n in range(4) if warmup.call_of(n) in text]
            assert crop.tobytes() == overview.crop(make_pictures.box_of(quarter)).tobytes()
            assert lesson["input_ids"].count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 8


def test_a_digit_that_was_not_shown_is_not_learned_but_as_a_guess(warmup: ModuleType, taught: Any) -> None:
    tokenizer, _, learned, measured = taught

    def told(lesson: Any) -> str:
        text: str = tokenizer.decode([label for label in lesson["labels"] if label != IGNORED])
        return text

    kinds = Counter()
    for lesson in learned:
        text, seen = told(lesson), np.asarray(lesson["images"][-1].decode()).max() > 100
        looked = len(lesson["images"]) == 2
        kinds[looked, "<tool_call>" in text, "boxed" in text] += 1
        assert "cropped" not in text
        assert "boxed" not in text or seen
    # Guesses; looks in the right place; in another; and what teaches to read, and where to look.
    assert set(kinds) == {(False, False, True), (True, True, True), (True, True, False), (True, False, True)}
    assert kinds[True, False, True] == len(learned) // 2
    assert all("[" not in told(lesson) and "], " in told(lesson) and "boxed" in told(lesson) for lesson in measured)


async def test_without_the_tool_all_examples_guess(warmup: ModuleType, made: Path) -> None:
    without = [{**row, "use_tool": False} for row in rows(made)]
    tokenizer, _, learned, measured = await warmup.made(without, 0)
    assert {len(lesson["images"]) for lesson in [*learned, *measured]} == {1}
    told = {tokenizer.decode([label for label in lesson["labels"] if label != IGNORED]) for lesson in measured}
    assert told == {"}<|im_end|>"}


def test_a_quarter_is_told_in_single_tokens(warmup: ModuleType, taught: Any) -> None:
    tokenizer, *_ = taught
    calls = [tokenizer.encode(warmup.call_of(quarter), add_special_tokens=False) for quarter in range(4)]
    assert {len(call) for call in calls} == {len(calls[0])}
    assert len(calls[0]) < 16
    assert random.Random(0).choice(calls) in calls
