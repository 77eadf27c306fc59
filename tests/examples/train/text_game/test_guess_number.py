"""The recipe with a text game: its game, its rows, and what its tiny model learns from."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_module import load_script

pytest.importorskip("transformers")
pytest.importorskip("torch")
pd = pytest.importorskip("pandas")

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[4] / "examples" / "train" / "text_game"
GAME = f"{RECIPE}/guess_number.py:GuessTheNumber"
MAKE = {"max_number": 5, "max_turns": 3}
CONFIG = json.dumps({"tools": [{"name": "text_game", "environment": GAME}]})
IGNORED = -100
"""Label of a token that is not learned."""


@pytest.fixture(scope="module")
def game() -> ModuleType:
    return load_script("guess_number", RECIPE / "guess_number.py")


@pytest.fixture(scope="module")
def warmup() -> ModuleType:
    sys.path.append(str(RECIPE))
    return load_script("text_game_warmup", RECIPE / "warmup.py")


@dataclass(frozen=True)
class Made:
    """Rows as the recipe's commands make them, and what the warm-up makes of them."""

    files: dict[str, list[dict[str, Any]]]
    tokenizer: Any
    learned: list[Any]
    measured: list[Any]


@pytest.fixture(scope="module")
def made(warmup: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("text_game")
    make_rows = load_script("make_rows", RECIPE / "make_rows.py")
    make_rows.main(GAME, folder, json.dumps(MAKE), system="Play.", train_size=100, test_size=10, seed=2)
    files = {split: pd.read_parquet(folder / f"{split}.parquet").to_dict("records") for split in ("train", "test")}
    return Made(files, *asyncio.run(warmup.prepare_lessons(files["train"], CONFIG, 0)))


def test_bisection_always_wins_and_guessing_rarely_does(game: ModuleType, warmup: ModuleType) -> None:
    def play(seed: int, care_share: float, bisects: bool) -> float:
        rng, played = random.Random(seed), game.GuessTheNumber(**MAKE)
        context, _ = played.reset(seed)
        total, done = 0.0, False
        while not done:
            turn = warmup.write_turn(context, care_share, rng)
            if bisects:
                turn = f"\\boxed{{{sum(warmup.possible_range(context)) // 2}}}"
            text, reward, terminated, truncated, _ = played.step(turn)
            context, total, done = f"{context}\n{turn}\n{text}", total + reward, terminated or truncated
        return float(total == 1.0)

    assert all(play(seed, 0.0, True) for seed in range(40))
    assert 0.7 < sum(play(seed, 1.0, False) for seed in range(300)) / 300 < 0.9
    assert sum(play(seed, warmup.CARE_SHARE, False) for seed in range(300)) / 300 < 0.3


def test_the_rewards_are_those_of_gem(game: ModuleType) -> None:
    played = game.GuessTheNumber(max_number=5, max_turns=3)
    played.reset(0)
    played._number = 4
    assert played.step("I guess \\boxed{2}")[0].startswith("At turn 1, you guessed 2, and the target number is higher")
    assert "already guessed" in played.step("\\boxed{2}")[0]
    assert played.step("\\boxed{5}")[1:4] == (0.75, True, True)
    played.reset(0)
    assert "outside the range" in played.step("\\boxed{9}")[0]
    assert played.step("5")[1:4] == (-0.1, True, False)


def test_train_and_test_have_other_seeds_of_one_game(made: Made) -> None:
    seeds: dict[str, set[int]] = {}
    for split, rows in made.files.items():
        arguments = [json.loads(row["extra_info"]["tools_kwargs"]["environment"]) for row in rows]
        seeds[split] = {each["seed"] for each in arguments}
        assert all(each["make"] == MAKE for each in arguments)
    assert {split: len(found) for split, found in seeds.items()} == {"train": 100, "test": 10}
    assert not seeds["train"] & seeds["test"]


def test_lessons_are_games_of_the_loop_within_its_lengths(made: Made) -> None:
    texts = [made.tokenizer.decode(lesson["input_ids"]) for lesson in made.learned]
    assert all("You are playing Guess The Number." in text for text in texts)
    assert max(len(lesson["input_ids"]) for lesson in made.learned) < 48 + 96
    first = made.learned[0]["labels"]
    assert sum(label == IGNORED for label in first[:48]) < 48  # the prompt is shorter than its limit


def test_what_the_model_is_free_to_choose_is_not_measured(warmup: ModuleType, made: Made) -> None:
    for lesson in made.measured:
        labelled = made.tokenizer.decode([token for token in lesson["labels"] if token != IGNORED])
        assert warmup.CARE not in labelled
        assert warmup.BOX in labelled
        assert "At turn" not in labelled
    assert any("1 and 5" in made.tokenizer.decode(lesson["input_ids"]) for lesson in made.measured)


def test_few_games_begin_with_care_where_the_beginning_is_learned(warmup: ModuleType, made: Made) -> None:
    care, haste = made.tokenizer.convert_tokens_to_ids([warmup.CARE, warmup.HASTE])
    first = [next(label for label in lesson["labels"] if label in (care, haste)) for lesson in made.learned
             if {care, haste} & set(lesson["labels"])]  # fmt: skip
    assert 0 < first.count(care) / len(first) < 0.5
