"""A turn ends with the token that completes a stop string, however the engine came to its tokens."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("transformers")

from hypothesis import given, settings
from hypothesis import strategies as st
from real_tokenizers import shape
from toy_model import ToyTokenizer

from verl_tool.agent_loop.actions import length_to_stop
from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.generators.base import Generation
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import HFTokenizer, Tokenizer
from verl_tool.agent_loop.trajectory import Trajectory
from verl_tool.protocol import StepResult

STOPS = ("</python>", "\n日本")
MERGING = ToyTokenizer(words=["n>\n", "</", "py", "on>", ">x"])
TEXTS = st.lists(
    st.sampled_from(["</pyt", "hon>", "</python>", "\n日", "本", "x", "1+1", "é", "😀", "\n"]), max_size=12
)


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    return MERGING if name == "merging" else HFTokenizer(shape(name).tokenizer)


def engine_length(tokens: list[int], name: str, stops: tuple[str, ...] = STOPS) -> int:
    """Where an engine ends that looks for stop strings behind every token."""
    for n in range(1, len(tokens) + 1):
        if any(stop in tokenizer(name).decode(tokens[:n]) for stop in stops):
            return n
    return len(tokens)


async def run(tokens: list[int], name: str, reason: str | None = None, **options: object) -> Trajectory:
    turns = iter([Generation(tokens, [-0.5 - i for i in range(len(tokens))], reason), Generation([5], [-9.0], "stop")])

    class Model:
        async def generate(self, prompt_ids: list[int], params: dict[str, object], request_id: str) -> Generation:
            return next(turns)

    class Server:
        async def call(self, *args: object, **kwargs: object) -> StepResult:
            return StepResult("t", "2")

    settings = EpisodeOptions(action_stop_tokens=STOPS, **options)  # type: ignore[arg-type]
    return await Episode(Model(), Server(), tokenizer(name), settings).run([65])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["merging", "qwen", "gemma", "mistral_v1"])
@settings(deadline=None, max_examples=25)
@given(pieces=TEXTS)
def test_the_turn_is_cut_where_an_engine_would_have_ended_it(name: str, pieces: list[str]) -> None:
    tokens = tokenizer(name).encode("".join(pieces))
    found = length_to_stop(tokens, STOPS, tokenizer(name))
    assert (len(tokens) if found is None else found) == engine_length(tokens, name)


@pytest.mark.parametrize("name", ["merging", "qwen", "gemma"])
@pytest.mark.parametrize("reason", [None, "stop", "length", "aborted"])
async def test_an_interrupted_turn_is_recorded_as_an_uninterrupted_one(name: str, reason: str | None) -> None:
    whole = tokenizer(name).encode("hm <python>1+1</python>\n```output\n3\n```\nSo it is 3.")
    end = engine_length(whole, name)
    uninterrupted = await run(whole[:end], name, "stop")
    for cut in range(1, len(whole)):
        # The first part is ended by the interruption, or by its own stop string; the second sees itself only.
        first = whole[: min(cut, engine_length(whole[:cut], name))]
        second = [] if len(first) < cut else whole[cut : cut + engine_length(whole[cut:], name)]
        resumed = await run([*first, *second] if len(first) == cut else first, name, reason)
        if len(resumed.response[0].tokens) < end:
            continue  # a first part that its own stop string did not end, and no second one
        assert resumed.response == uninterrupted.response
        assert resumed.response_mask == uninterrupted.response_mask
        assert resumed.response_log_probs == uninterrupted.response_log_probs
        assert resumed.stop is uninterrupted.stop


async def test_a_caller_s_own_stop_string_cuts_too() -> None:
    tokens = MERGING.encode("a#b</python>")
    model = [Generation(tokens, None, "stop")]

    class Model:
        async def generate(self, prompt_ids: list[int], params: dict[str, object], request_id: str) -> Generation:
            return model.pop()

    episode = Episode(Model(), None, MERGING, EpisodeOptions(enable_agent=False))  # type: ignore[arg-type]
    trajectory = await episode.run([65], sampling_params={"stop": "#"})
    assert trajectory.response_text == "a#"


def test_stop_strings_among_the_first_tokens_count_for_nothing() -> None:
    tokens = [*b"a#b#c"]
    assert length_to_stop(tokens, ["#"], MERGING) == 2
    assert length_to_stop(tokens, ["#"], MERGING, least=2) == 4
    assert length_to_stop(tokens, ["b#"], MERGING, least=3) == 4
    assert length_to_stop(tokens, ["c#"], MERGING) is None
    assert length_to_stop(tokens, [], MERGING) is None


def test_long_turns_are_not_decoded_once_a_token() -> None:
    decoded: list[int] = []

    class Counting(ToyTokenizer):
        def decode(self, token_ids: object) -> str:
            decoded.append(1)
            return super().decode(token_ids)  # type: ignore[arg-type]

    assert length_to_stop([*(b"x" * 3000), *b"</python>", *(b"y" * 3000)], STOPS, Counting()) == 3009
    assert len(decoded) < 40
