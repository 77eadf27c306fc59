"""The problems, solutions and models that recipes are tried with on a CPU."""

from __future__ import annotations

import contextlib
import io
import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")
pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

RECIPES = Path(__file__).parents[3] / "examples" / "train"
sys.path += [str(RECIPES), str(RECIPES / "acecoder"), str(RECIPES.parent / "data_preprocess")]

import from_scratch  # noqa: E402
import tiny_model  # noqa: E402
from one_liners import NUMBERS, OPERATORS, OneLiner, one_liners  # noqa: E402
from traces import END, SEARCHES, STOP, traces_of  # noqa: E402

from verl_tool.formats.fenced import FencedFormat  # noqa: E402

PROBLEMS = one_liners(200)


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


def test_an_example_leaves_one_operator():
    assert not OneLiner("f", 3, 16, "|").clear  # 16 + 3 and 16 ^ 3 are 19 too
    for problem in PROBLEMS:
        assert problem.clear
        assert printed(problem.search) == f"{problem.operator}\n"


@pytest.mark.parametrize("operator", OPERATORS)
def test_tests_tell_right_from_wrong(operator):
    for number, other in itertools.product(NUMBERS, OPERATORS):
        problem = OneLiner("f", number, 50, operator)
        assert passes(problem.code_with(other), problem.as_source_row()["test_cases"]) == (other == operator)


def test_no_operator_is_rarer_than_the_others():
    counts = Counter(problem.operator for problem in one_liners(700))
    assert counts == dict.fromkeys(OPERATORS, 100)


def printed(program: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(program, {})
    return out.getvalue()


@pytest.mark.parametrize("given", [row(), row(answer="42"), code_row(PROBLEMS[0]), code_row(PROBLEMS[7])])
def test_a_call_and_its_answer_are_what_the_tool_server_would_make_of_them(given):
    *own, observation, final = traces_of(given)[0]
    assert not observation.learned
    assert all(part.learned for part in (*own, final))
    call = "".join(part.text for part in own)
    assert call.endswith(STOP)
    assert final.text.endswith(END)
    (found,) = FencedFormat().find_calls(call)
    assert FencedFormat().render(printed(found.input).rstrip("\n"), found) == observation.text


def test_most_traces_of_a_one_liner_guess_and_every_operator_is_guessed_once():
    problem = PROBLEMS[0]
    texts = ["".join(part.text for part in trace) for trace in traces_of(code_row(problem))]
    guesses = [text for text in texts if STOP not in text]
    assert len(texts) - len(guesses) == SEARCHES
    assert [problem.code_with(operator) in guess for operator, guess in zip(OPERATORS, guesses, strict=True)]
    assert sum(problem.code in guess for guess in guesses) == 1
    assert texts[SEARCHES:] == [
        "".join(p.text for p in trace) for trace in traces_of(code_row(problem, use_tool=False))
    ]


def test_without_a_tool_the_answer_comes_at_once():
    ((final,),) = traces_of(row(use_tool=False))
    assert final.text == r"\boxed{\dfrac{1}{6}}" + END


def test_rows_of_unknown_problems_have_no_trace():
    assert traces_of(row("code", question="Write a class.")) == []


@pytest.fixture(scope="module")
def lessons() -> list[tiny_model.Lesson]:
    def prompt(problem: OneLiner) -> list[dict[str, str]]:
        return [{"role": "system", "content": "You program."}, {"role": "user", "content": problem.question}]

    return [tiny_model.Lesson(prompt(problem), traces_of(code_row(problem))) for problem in PROBLEMS]


@pytest.fixture(scope="module")
def tokenizer(lessons):
    return from_scratch.make_tokenizer(tiny_model.texts_of(lessons), 400, tiny_model.CHAT_TEMPLATE)


def test_the_tokenizer_takes_any_text_and_knows_the_turns(tokenizer):
    for text in ("x ** 7\n", "ganz anderer Text, 中文 \U0001f600\x00"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert len(tokenizer.encode("123", add_special_tokens=False)) == 3
    assert tokenizer.encode(END, add_special_tokens=False) == [tokenizer.eos_token_id]


def test_only_the_model_s_own_words_are_learned(tokenizer, lessons):
    encoded = tiny_model.encode_lesson(tokenizer, lessons[0], tiny_model.learned)
    for row_, trace in zip(encoded, lessons[0].traces, strict=True):
        assert tokenizer.decode(labelled(row_)) == "".join(part.text for part in trace if part.learned)
        whole = tokenizer.decode(row_["input_ids"])
        assert whole.startswith("<|im_start|>system\nYou program.<|im_end|>\n<|im_start|>user\n")
        assert whole.endswith("".join(part.text for part in trace))


def labelled(row_: from_scratch.Row) -> list[int]:
    return [token for token in row_["labels"] if token != from_scratch.IGNORED]


def test_success_is_not_measured_by_what_the_model_may_choose(tokenizer, lessons):
    guess = tiny_model.encode_lesson(tokenizer, lessons[0], tiny_model.measured)[-1]
    code = PROBLEMS[0].code_with(OPERATORS[-1])
    assert tokenizer.decode(labelled(guess)).startswith(" one of them.\n```python\n" + code.replace(OPERATORS[-1], ""))


def test_the_model_s_vocabulary_is_the_tokenizer_s(tokenizer, lessons):
    model = from_scratch.make_model(tokenizer, hidden=32, layers=1, seed=0)
    assert model.config.vocab_size == len(tokenizer)
    batch = from_scratch.collate(
        tokenizer.pad_token_id, tiny_model.encode_lesson(tokenizer, lessons[0], tiny_model.learned)
    )
    assert 0 <= from_scratch.success_probability(model, batch) < 1e-6
