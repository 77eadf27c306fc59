"""Images in the text of an observation: where they stand, and what a limit leaves of them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_images import PAD, PLACEHOLDER, ToyImageTokens, image_tokenizer
from toy_model import ToyTokenizer
from toy_tools import picture

from verl_tool.agent_loop.observation import TRUNCATION_MARK
from verl_tool.agent_loop.options import Side
from verl_tool.agent_loop.rendering.images import ImagePlacer, Piece, images_in, pieces_of
from verl_tool.agent_loop.trajectory import Author, Segment
from verl_tool.agent_loop.trajectory_builder import cut_segments
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ContentError

TOKENIZER = image_tokenizer()
PLACER = ImagePlacer(ToyImageTokens(TOKENIZER), TOKENIZER)
PICTURES = [picture(red, (width, 2)) for red, width in enumerate((1, 5, 30))]
TEXTS = st.text("ab é.", min_size=1, max_size=60)
PIECES = st.lists(TEXTS | st.sampled_from(PICTURES), min_size=1, max_size=6)
SIDES = st.sampled_from(["left", "right", "middle"])


def size(pieces: list[Piece]) -> int:
    tokens = [TOKENIZER.encode(p) if isinstance(p, str) else PLACER.tokens.of(p) for p in joined(pieces)]
    return sum(map(len, tokens))


def joined(pieces: list[Piece]) -> list[Piece]:
    """With texts that follow one another put together, as they are rendered."""
    whole: list[Piece] = []
    for piece in pieces:
        if whole and isinstance(piece, str) and isinstance(whole[-1], str):
            whole[-1] += piece
        else:
            whole.append(piece)
    return whole


def test_the_nth_tag_is_the_nth_image() -> None:
    one, two, _ = PICTURES
    outputs = ["a<image>", "b", "<image>c<image>"]
    assert pieces_of(outputs, [one, two]) == [["a", one], ["b"], [two, "c<image>"]]
    assert pieces_of(["", "<image>"], [one]) == [[""], [one]]
    assert images_in(pieces_of(outputs, PICTURES)) == PICTURES


def test_each_placeholder_of_a_prompt_becomes_the_tokens_of_its_image() -> None:
    one, two, _ = PICTURES
    ids = TOKENIZER.encode(f"a{PLACEHOLDER}{PLACEHOLDER}b")
    segments = PLACER.prompt(ids, [two, one])
    assert [(s.author, s.image) for s in segments] == [
        (Author.PROMPT, image) for image in (None, two.sha256, one.sha256, None)
    ]
    assert [len(s.tokens) for s in segments] == [1, 7, 3, 1]
    assert PLACER.further_tokens([two, one]) == sum(len(s.tokens) for s in segments) - len(ids)
    assert [s.tokens for s in PLACER.prompt(TOKENIZER.encode("ab"))] == [tuple(b"ab")]


@pytest.mark.parametrize(
    ("text", "images"), [(f"a{PLACEHOLDER}", 0), (f"a{PLACEHOLDER}", 2), ("a", 1), (f"{PAD}{PLACEHOLDER}", 1)]
)
def test_a_prompt_with_other_places_than_images_is_refused(text: str, images: int) -> None:
    with pytest.raises(
        ContentError, match=f"the prompt has {text.count(PAD)} places for images .* and {images} images"
    ):
        PLACER.prompt(TOKENIZER.encode(text), PICTURES[:images])


@settings(max_examples=60)
@given(PIECES, st.integers(0, 120), SIDES)
def test_what_is_left_fits_and_images_are_whole(pieces: list[Piece], limit: int, side: Side) -> None:
    pieces = joined(pieces)
    left = PLACER.truncate(pieces, limit, side)
    assert size(left) <= limit
    if size(pieces) <= limit:
        assert left == pieces
        return
    before, kept = images_in([pieces]), images_in([left])
    marks = [n for n, piece in enumerate(left) if isinstance(piece, str) and TRUNCATION_MARK in piece]
    if any(isinstance(piece, ImagePart) for piece in pieces):
        assert len(marks) == 1 or left == [""]
        head = images_in([left[: marks[0]]]) if marks else []
        assert before[: len(head)] == head
        assert before[len(before) - (len(kept) - len(head)) :] == kept[len(head) :]
        assert side != "left" or not head
        assert side != "right" or head == kept


def test_an_image_that_fits_stays_whole_and_one_that_does_not_goes() -> None:
    mark = len(TOKENIZER.encode(TRUNCATION_MARK))
    one, _, wide = PICTURES
    text = "a" * 40
    assert PLACER.truncate([one, text], mark + 3 + 4, "right") == [one, f"aaaa{TRUNCATION_MARK}"]
    assert PLACER.truncate([one, text], mark + 3 + 4, "left") == [f"{TRUNCATION_MARK}aaaaaaa"]
    assert PLACER.truncate([text, wide, "b"], mark + 20, "left") == [f"{TRUNCATION_MARK}b"]
    assert PLACER.truncate([wide], 5, "left") == [""]


def test_megabytes_are_cut_before_they_are_encoded() -> None:
    encoded: list[int] = []

    class Counting(ToyTokenizer):
        def encode(self, text: str) -> list[int]:
            encoded.append(len(text))
            return super().encode(text)

    tokenizer = Counting(specials=TOKENIZER.special_tokens[3:])
    placer = ImagePlacer(ToyImageTokens(tokenizer), tokenizer)
    left = placer.truncate(["a" * 10_000_000, PICTURES[0], "b" * 10_000_000], 60, "middle")
    assert left == ["a" * 22 + TRUNCATION_MARK + "b" * 21]
    assert max(encoded) <= 61 * 64


class TestSegments:
    def test_each_placeholder_becomes_the_tokens_of_its_image(self) -> None:
        text = f"see {PLACEHOLDER}{PLACEHOLDER} both"
        around = Segment(Author.TEMPLATE, tuple(TOKENIZER.encode("\n")), text="\n")
        segments = [around, Segment(Author.TOOL, tuple(TOKENIZER.encode(text)), text=text), around]
        placed = PLACER.replace_placeholders(segments, PICTURES[:2])
        assert placed is not None
        assert [(s.author.value, s.text, s.image) for s in placed[1:-1]] == [
            ("tool", "see ", None),
            ("tool", PLACEHOLDER, PICTURES[0].sha256),
            ("tool", PLACEHOLDER, PICTURES[1].sha256),
            ("tool", " both", None),
        ]
        assert [len(s.tokens) for s in placed] == [1, 4, 3, 7, 5, 1]
        assert PLACER.replace_placeholders(segments, PICTURES) is None
        assert PLACER.replace_placeholders(segments, PICTURES[:1]) is None

    def test_tokens_of_another_kind_are_refused(self) -> None:
        class Other(ToyImageTokens):
            def of(self, image: ImagePart) -> list[int]:
                return [7]

        segment = Segment(Author.TOOL, tuple(TOKENIZER.encode(PLACEHOLDER)))
        with pytest.raises(ValueError, match=r"an image of 1 x 2 pixels has the tokens .7., and the placeholder"):
            ImagePlacer(Other(TOKENIZER), TOKENIZER).replace_placeholders([segment], PICTURES[:1])

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 50), SIDES)
    def test_a_cut_keeps_or_drops_an_image_whole(self, kinds: list[int], room: int, side: Side) -> None:
        segments = [
            Segment(Author.TOOL, tuple(PLACER.tokens.of(PICTURES[kind])), image=PICTURES[kind].sha256)
            if kind < 3
            else Segment(Author.TEMPLATE, tuple(TOKENIZER.encode("abcdefgh")))
            for kind in kinds
        ]
        cut = cut_segments(segments, room, side, TOKENIZER)
        assert sum(len(s.tokens) for s in cut) <= room
        assert all(s in segments for s in cut if s.image is not None)
        if side == "right":
            assert [t for s in segments for t in s.tokens][: sum(len(s.tokens) for s in cut)] == [
                t for s in cut for t in s.tokens
            ]
