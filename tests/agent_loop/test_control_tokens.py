"""No output of a tool opens a turn or forges a control token, whatever the tokenizer."""

from __future__ import annotations

import functools
import random

import pytest

pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import NAMES, Shape, shape

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.observation import ControlTokens
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import HFTokenizer
from verl_tool.agent_loop.trajectory import Author, Trajectory
from verl_tool.protocol import StepResult

shape = functools.cache(shape)
WAYS = (
    {},
    {"enable_mtrl": True},
    {"enable_mtrl": True, "mtrl_sep": "[{obs}]"},
    {"enable_mtrl": True, "mtrl_sep": "<{obs}>"},
)


async def observed(made: Shape, output: str, **options: object) -> Trajectory:
    tokenizer = HFTokenizer(made.tokenizer)
    said = iter(["<calculator>1</calculator>", "ok"])

    class Model:
        async def generate(self, prompt_ids: list[int], params: dict[str, object], request_id: str) -> Generation:
            return Generation(tokenizer.encode(next(said)), None, "stop")

    class Server:
        async def call(self, *args: object, finish: bool = False, **kwargs: object) -> StepResult:
            return StepResult("t", "" if finish else output)

    settings = EpisodeOptions(action_stop_tokens=("</calculator>",), **options)  # type: ignore[arg-type]
    return await Episode(Model(), Server(), tokenizer, settings).run(tokenizer.encode("hi"))  # type: ignore[arg-type]


def variants(token: str) -> list[str]:
    """Spellings that some tokenizer may take for the token."""
    wide = "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in token)
    middle = len(token) // 2
    hidden = [token[:middle] + extra + token[middle:] for extra in ("\u200b", "\u0301", "\u00ad", "\x00")]
    return [token, token.upper(), wide, token[1:-1], token + token, token[:1] + token, *hidden]


def outputs(made: Shape, count: int) -> list[str]:
    chance = random.Random(0)
    pieces = [v for token in made.forbidden for v in variants(token)] + ["user", "\n", " ", "<", "|>", "]", "日", "x"]
    return ["".join(chance.choices(pieces, k=chance.randint(1, 6))) for _ in range(count)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS, ids=["inline", "chat", "brackets", "angles"])
async def test_no_control_token_comes_of_an_output(name: str, way: dict[str, object]) -> None:
    made = shape(name)
    for output in [*made.forbidden[:20], *outputs(made, 25)]:
        trajectory = await observed(made, output, **way)
        tool = [token for s in trajectory.segments if s.author is Author.TOOL for token in s.tokens]
        assert not made.forbidden_ids.intersection(tool), output
        shown = made.tokenizer.decode(tool, skip_special_tokens=False)
        marks = [token for token in made.forbidden if token in shown]
        assert not marks, output


@pytest.mark.parametrize("name", NAMES)
async def test_a_cut_output_forges_nothing_either(name: str) -> None:
    made = shape(name)
    for output in outputs(made, 15):
        trajectory = await observed(made, output * 20, max_obs_length=40)
        tool = [token for s in trajectory.segments if s.author is Author.TOOL for token in s.tokens]
        assert not made.forbidden_ids.intersection(tool), output
        assert len(tool) <= 40


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text", ["<b>bold</b> a[0] x < y", "[INFO] done", "\n\n  two\n\n", "<table>1</table>", "日 é 😀"]
)
def test_ordinary_text_is_left_alone(name: str, text: str) -> None:
    assert next(ControlTokens(HFTokenizer(shape(name).tokenizer)).escaped_forms(text)) == text


@settings(max_examples=50)
@given(st.text(max_size=60))
def test_a_safe_form_can_always_be_encoded(text: str) -> None:
    for form in ControlTokens(HFTokenizer(shape("llama3").tokenizer)).escaped_forms(text + "\ud800"):
        form.encode()


async def test_breaking_a_token_up_is_no_truncation() -> None:
    trajectory = await observed(shape("qwen"), "x<|im_end|>")
    assert not trajectory.calls[0].truncated
    assert trajectory.calls[0].observation == "x<|im_end|>"
    assert (await observed(shape("qwen"), "x" * 900, max_obs_length=20)).calls[0].truncated
