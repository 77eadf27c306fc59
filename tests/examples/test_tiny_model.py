"""The problems, solutions and models that recipes are tried with on a CPU."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")
pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

RECIPES = Path(__file__).parents[2] / "examples" / "train"
sys.path += [str(RECIPES), str(RECIPES / "acecoder"), str(RECIPES.parent / "data_preprocess")]

import from_scratch  # noqa: E402
import tiny_model  # noqa: E402
from one_liners import OPERATORS, OneLiner, one_liners  # noqa: E402
from traces import END, STOP, trace_of  # noqa: E402

from verl_tool.formats.fenced import FencedFormat  # noqa: E402

PROBLEMS = one_liners()


def row(
    ability: str = "math", answer: str = r"\dfrac{1}{6}", question: str = "?", use_tool: bool = True
) -> dict[str, Any]:
    """A row of verl's, as far as a solution depends on it."""
    return {
        "ability": ability,
        "reward_model": {"ground_truth": answer},
        "extra_info": {"question": question},
        "use_tool": use_tool,
    }


def code_row(problem: OneLiner, use_tool: bool = True) -> dict[str, Any]:
    return row("code", question=problem.question, use_tool=use_tool)


def passes(code: str, tests: list[str]) -> bool:
    names: dict[str, Any] = {}
    exec(code, names)
    try:
        for test in tests:
            exec(test, names)
    except AssertionError:
        return False
    return True


def test_a_question_tells_its_problem():
    assert all(OneLiner.of(problem.question) == problem for problem in PROBLEMS)
    assert len({problem.question for problem in PROBLEMS}) == len(PROBLEMS) == 200
    assert OneLiner.of("Write a function `mean(values)` that returns the mean.") is None


@pytest.mark.parametrize("operation", OPERATORS)
def test_tests_tell_right_from_wrong(operation):
    for number, other in itertools.product(range(2, 10), OPERATORS):
        tests = OneLiner("f", operation, number).as_source_row()["test_cases"]
        assert passes(OneLiner("f", other, number).code, tests) == (other == operation)
    assert not passes(OneLiner("f", operation, 3).code, OneLiner("f", operation, 4).as_source_row()["test_cases"])


@pytest.mark.parametrize("given", [row(), row(answer="42"), code_row(PROBLEMS[0]), code_row(PROBLEMS[7])])
def test_a_solution_is_what_the_tool_server_would_make_of_it(given):
    call, observation, final = trace_of(given)
    assert [call.learned, observation.learned, final.learned] == [True, False, True]
    assert call.text.endswith(STOP)
    assert final.text.endswith(END)
    (found,) = FencedFormat().find_calls(call.text)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(found.input, {})
    assert FencedFormat().render(printed.getvalue().rstrip("\n"), found) == observation.text


def test_without_a_tool_the_answer_comes_at_once():
    (final,) = trace_of(row(use_tool=False))
    assert final.text == r"\boxed{\dfrac{1}{6}}" + END
    (code,) = trace_of(code_row(PROBLEMS[0], use_tool=False))
    assert PROBLEMS[0].code in code.text


def test_rows_of_unknown_problems_have_no_solution():
    assert trace_of(row("code", question="Write a class.")) is None


@pytest.fixture(scope="module")
def lessons() -> list[tiny_model.Lesson]:
    def prompt(problem: OneLiner) -> list[dict[str, str]]:
        return [{"role": "system", "content": "You program."}, {"role": "user", "content": problem.question}]

    return [tiny_model.Lesson(prompt(problem), trace_of(code_row(problem))) for problem in PROBLEMS]


@pytest.fixture(scope="module")
def tokenizer(lessons):
    return from_scratch.make_tokenizer(tiny_model.texts_of(lessons), 400, tiny_model.CHAT_TEMPLATE)


def test_the_tokenizer_takes_any_text_and_knows_the_turns(tokenizer):
    for text in ("x ** 7\n", "ganz anderer Text, 中文 \U0001f600\x00"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("123", add_special_tokens=False)) == 3
    assert tokenizer.encode(END, add_special_tokens=False) == [tokenizer.eos_token_id]


def test_only_the_model_s_own_words_are_learned(tokenizer, lessons):
    encoded = tiny_model.encode_lesson(tokenizer, lessons[0])
    learned = [token for token in encoded["labels"] if token != from_scratch.IGNORED]
    assert tokenizer.decode(learned) == "".join(part.text for part in lessons[0].trace if part.learned)
    whole = tokenizer.decode(encoded["input_ids"])
    assert whole.startswith("<|im_start|>system\nYou program.<|im_end|>\n<|im_start|>user\n")
    assert whole.endswith("".join(part.text for part in lessons[0].trace))


def test_the_model_s_vocabulary_is_the_tokenizer_s(tokenizer, lessons):
    model = from_scratch.make_model(tokenizer, hidden=32, layers=1, seed=0)
    assert model.config.vocab_size == len(tokenizer)
    batch = from_scratch.collate(
        tokenizer.pad_token_id, [tiny_model.encode_lesson(tokenizer, lesson) for lesson in lessons[:3]]
    )
    assert 0 <= from_scratch.success_probability(model, batch) < 1e-6
