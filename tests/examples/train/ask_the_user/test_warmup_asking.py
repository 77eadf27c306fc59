"""The recipe that asks a user: its data, its domain, and what its tiny model learns from."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from environment_dialogue import Dialogues, write_call
from script_module import load_script

pytest.importorskip("datasets")
pytest.importorskip("transformers")
pytest.importorskip("torch")
pd = pytest.importorskip("pandas")

from verl_tool.environments.user import UserEnvironment, UserGroundTruth, UserRow  # noqa: E402

EXAMPLES = Path(__file__).parents[4] / "examples"
RECIPE = EXAMPLES / "train" / "ask_the_user"
IGNORED = -100
"""Label of a token that is not learned."""


@dataclass(frozen=True)
class PreparedRecipe:
    """Data as the recipe's command makes it, and what the warm-up makes of it."""

    data: ModuleType
    warmup: ModuleType
    train: list[dict[str, Any]]
    test: list[dict[str, Any]]
    tokenizer: Any
    learned: list[Any]
    measured: list[Any]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedRecipe:
    folder = tmp_path_factory.mktemp("ask_the_user")
    sys.path += [str(EXAMPLES / "data_preprocess"), str(RECIPE)]
    data = load_script("ask_the_user", EXAMPLES / "data_preprocess" / "ask_the_user.py")
    warmup = load_script("ask_the_user_warmup", RECIPE / "warmup.py")
    data.main(folder, train_size=500, test_size=32, seed=0)
    train, test = (pd.read_parquet(folder / f"{split}.parquet").to_dict("records") for split in ("train", "test"))
    return PreparedRecipe(data, warmup, train, test, *asyncio.run(warmup.prepare_lessons(train, 0)))


def environment_of(row: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(row["extra_info"]["tools_kwargs"]["environment"]))


def test_a_request_names_all_but_one_detail_and_no_test_order_is_trained_on(prepared: PreparedRecipe) -> None:
    orders: dict[str, set[str]] = {"train": set(), "test": set()}
    for split, rows in (("train", prepared.train), ("test", prepared.test)):
        for row in rows:
            environment = environment_of(row)
            UserRow.model_validate({name: value for name, value in environment.items() if name != "name"})
            truth = UserGroundTruth.model_validate_json(row["reward_model"]["ground_truth"])
            assert truth.actions is not None
            [action] = truth.actions
            missing = row["extra_info"]["missing"]
            named = prepared.warmup.named_words(environment["script"]["first"])
            assert named == {kind: word for kind, word in action.arguments.items() if kind != missing}
            orders[split].add(json.dumps(action.arguments))
    assert len(orders["test"]) == 32
    assert not orders["train"] & orders["test"]


async def test_only_asking_for_what_is_missing_leads_to_the_order(prepared: PreparedRecipe) -> None:
    row = prepared.test[0]
    truth = json.loads(row["reward_model"]["ground_truth"])
    order, missing = truth["actions"][0]["arguments"], row["extra_info"]["missing"]
    other = next(kind for kind in order if kind != missing)
    guess = order | {missing: next(word for word in prepared.data.WORDS[missing] if word != order[missing])}
    price = f"price {truth['outputs'][0]}"
    async with Dialogues([UserEnvironment(domain=RECIPE / "orders.py")]) as dialogues:
        right = await dialogues.play(
            [f"Which {missing}?", write_call("order", **order), price], environment_of(row), truth
        )
        wrong = await dialogues.play(
            [f"Which {other}?", write_call("order", **guess), price], environment_of(row), truth
        )
        silent = await dialogues.play([write_call("order", **order), "price?"], environment_of(row), truth)
    assert right.turn_calls[0].observation == f"{order[missing]}."
    assert price in right.turn_calls[1].observation
    assert wrong.turn_calls[0].observation == prepared.data.KNOWN
    scores = [each.verdict.score for each in (right, wrong, silent) if each.verdict is not None]
    assert scores == [1.0, 0.0, 0.0]


def test_lessons_are_short_and_only_what_the_model_writes_is_learned(prepared: PreparedRecipe) -> None:
    assert max(len(lesson["input_ids"]) for lesson in [*prepared.learned, *prepared.measured]) <= 96
    for lesson in prepared.measured:
        learned = prepared.tokenizer.decode([token for token in lesson["labels"] if token != IGNORED])
        assert "Which" not in learned, "the first token is not measured: it is what training decides"
        assert learned.count("<tool_call>") == 1
        assert "<tool_response>" not in learned
        assert prepared.data.KNOWN not in learned


def test_the_majority_of_lessons_guess_and_few_request_what_is_missing(prepared: PreparedRecipe) -> None:
    rows = prepared.train[prepared.warmup.MEASURED_ROWS :]
    right = guesses = 0
    for row, lesson in zip(rows, prepared.learned, strict=True):
        text = prepared.tokenizer.decode([token for token in lesson["labels"] if token != IGNORED])
        right += f"Which {row['extra_info']['missing']}?" in text
        guesses += "Which" not in text
    assert 0.1 < right / len(rows) < 0.3
    assert 0.55 < guesses / len(rows) < 0.75
