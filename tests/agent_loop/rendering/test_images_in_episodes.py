"""A model that reads images: what it is fed turn by turn, in each way of rendering, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from toy_images import PAD, PLACEHOLDER, LookingEngine, ToyImageTokens, image_tokenizer
from toy_model import END, ToyTools
from toy_tools import picture

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.observation import TRUNCATION_MARK
from verl_tool.agent_loop.observation_renderer import InlineRenderer
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import render_prompt
from verl_tool.agent_loop.trajectory import Excluded, Segment, StopReason, Trajectory, write_jsonl
from verl_tool.content.parts import ImagePart, read_media, to_wire
from verl_tool.errors import ConfigError, ContentError
from verl_tool.formats import Call
from verl_tool.protocol import FaultKind, StepResult

STOP = "</python>"
CALL = f"<python>1{STOP}"
ONE, TWO, WIDE = picture(1, (2, 2)), picture(2, (5, 2)), picture(3, (40, 2))
SOUND = read_media(b"fLaC" + b"\0" * 20)
BROKEN = read_media(picture(9, (30, 30)).data[:60])


class Run:
    """One episode of a scripted model that looks at images."""

    def __init__(self, turns: Sequence[str], reply: Any, **options: Any) -> None:
        self.tokenizer = image_tokenizer()
        self.engine = LookingEngine(self.tokenizer, turns)
        self.tools = ToyTools(reply)
        if not options.get("enable_mtrl"):
            options.setdefault("action_stop_tokens", [STOP])
        self.options = EpisodeOptions.load(options)
        self.renderer: InlineRenderer | None = None

    async def __call__(self, *shown: ImagePart) -> Trajectory:
        """`shown`: the images of the prompt."""
        images = ToyImageTokens(self.tokenizer)
        episode = Episode(self.engine, self.tools, self.tokenizer, self.options, image_tokens=images)
        content = [*({"type": "image"} for _ in shown), {"type": "text", "text": "what is it?"}]
        prompt = render_prompt(self.tokenizer, [{"role": "user", "content": content}])
        return await episode.run(prompt, images=shown, trajectory_id="t", renderer=self.renderer)


def answers(*results: StepResult) -> Any:
    return lambda action, n: results[n]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_mtrl": True, "mtrl_sep": "\n[{obs}]\n", "action_stop_tokens": [STOP]},
        {"enable_mtrl": True, "mtrl_role": "user", "action_stop_tokens": [STOP]},
        {"enable_mtrl": True, "mtrl_role": "tool", "action_stop_tokens": [STOP]},
    ],
    ids=["inline", "separator", "user", "tool"],
)
async def test_a_model_sees_each_image_where_the_tool_put_it(options: dict[str, Any]) -> None:
    run = Run(
        [CALL, CALL, "2"],
        answers(
            StepResult("t", "\n<tool_response>\na <image> b\n</tool_response>\n", image=[ONE]),
            StepResult("t", "\n<tool_response>\n<image><image>\n</tool_response>\n", image=[TWO, to_wire(ONE)]),
        ),
        **options,
    )
    trajectory = await run()
    assert trajectory.stop is StopReason.ANSWERED
    assert run.engine.seen == [[], [ONE], [ONE, TWO, ONE]]
    assert trajectory.visible_images == [ONE, TWO, ONE]
    pad = run.tokenizer.special(PAD)
    assert trajectory.response_ids.count(pad) == 2 + 5 + 2
    assert all(m == 0 for t, m in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if t == pad)
    assert f"a {PLACEHOLDER} b" in trajectory.response_text
    assert run.engine.fed[-1].prompt_ids == (trajectory.prompt_ids + trajectory.response_ids)[:-2], "token for token"


async def test_a_tool_cannot_forge_an_image() -> None:
    forged = f"{PLACEHOLDER} {PAD} < image> <image>"
    trajectory = await (run := Run([CALL, "2"], answers(StepResult("t", forged, image=[TWO]))))()
    assert trajectory.visible_images == [TWO]
    assert run.engine.seen[-1] == [TWO]
    assert trajectory.response_ids.count(run.tokenizer.special(PAD)) == 5


class TestPrompts:
    async def test_a_model_sees_the_images_of_its_prompt_at_every_turn(self) -> None:
        run = Run([CALL, "2"], answers(StepResult("t", "<image>", image=[TWO])))
        trajectory = await run(WIDE, ONE)
        assert run.engine.seen == [[WIDE, ONE], [WIDE, ONE, TWO]]
        assert trajectory.visible_images == [WIDE, ONE, TWO]
        assert trajectory.prompt_ids.count(run.tokenizer.special(PAD)) == 42
        assert [s.image for s in trajectory.response if s.image] == [TWO.sha256]
        assert run.engine.fed[-1].prompt_ids == (trajectory.prompt_ids + trajectory.response_ids)[:-2]
        assert trajectory.turn_calls == trajectory.calls

    async def test_an_image_beyond_the_prompts_limit_goes_whole(self) -> None:
        run = Run(["2"], answers(), max_prompt_length=50)
        trajectory = await run(WIDE, ONE)
        assert (trajectory.visible_images, trajectory.prompt_truncated) == ([ONE], True)
        assert len(trajectory.prompt_ids) <= 50
        assert list(trajectory.images) == [ONE.sha256]

    @pytest.mark.parametrize("options", [{}, {"enable_mtrl": True, "mtrl_role": "user"}])
    async def test_an_observation_before_the_first_turn_stands_behind_them(self, options: dict[str, Any]) -> None:
        first = StepResult("t", "look: <image>", image=[TWO])
        run = Run(["2"], answers(first), call_tool_first=True, action_stop_tokens=[STOP], **options)
        trajectory = await run(ONE)
        assert run.engine.seen == [[ONE, TWO]]
        assert trajectory.visible_images == [ONE, TWO]
        assert trajectory.turn_calls == ()
        assert trajectory.num_turns == 1

    async def test_images_for_a_loop_of_text_are_refused(self) -> None:
        run = Run(["2"], answers())
        episode = Episode(run.engine, run.tools, run.tokenizer, run.options)
        with pytest.raises(ConfigError, match="the prompt has 1 images, and this loop carries text only"):
            await episode.run([1], images=[ONE])

    async def test_a_prompt_with_other_places_than_images_is_refused(self) -> None:
        run = Run(["2"], answers())
        episode = Episode(run.engine, None, run.tokenizer, run.options, image_tokens=ToyImageTokens(run.tokenizer))
        with pytest.raises(ContentError, match="2 places"):
            await episode.run(run.tokenizer.encode(PLACEHOLDER * 2), images=[ONE], use_tool=False)


class TestLimits:
    async def test_an_observations_limit_takes_an_image_as_one_piece(self) -> None:
        text = "a" * 50
        result = StepResult("t", f"<image>{text}<image>", image=[ONE, WIDE])
        trajectory = await Run([CALL, "2"], answers(result), max_obs_length=30, truncate_obs_side="right")()
        assert trajectory.visible_images == [ONE]
        assert f"{PLACEHOLDER}aaaaaaaaa{TRUNCATION_MARK}" in trajectory.response_text
        assert (trajectory.calls[0].visible_tokens, trajectory.calls[0].truncated) == (30, True)
        assert list(trajectory.images) == [ONE.sha256]

    async def test_an_image_beyond_the_room_goes_whole(self) -> None:
        room = len(CALL) + 20
        result = StepResult("t", "a" * 15 + "<image>", image=[WIDE])
        trajectory = await Run([CALL], answers(result), max_response_length=room, truncate_response_side="right")()
        assert trajectory.stop is StopReason.MAX_RESPONSE_LENGTH
        assert (len(trajectory.response_ids), trajectory.visible_images) == (len(CALL) + 15, [])

    async def test_an_observation_before_the_first_turn(self) -> None:
        replies = answers(StepResult("t", "look: <image>", image=[ONE]))
        run = Run(["2"], replies, call_tool_first=True)
        trajectory = await run()
        assert run.engine.seen == [[ONE]]
        assert trajectory.prompt_ids.count(run.tokenizer.special(PAD)) == 2


class TestRefusals:
    async def test_audio_is_left_out_by_name_and_the_image_stays(self) -> None:
        run = Run(
            [CALL, CALL, "2"], answers(StepResult("t", "fine"), StepResult("t", "<image>", image=[ONE], audio=[SOUND]))
        )
        trajectory = await run()
        assert "[audio was left out: only text and images can be read here]" in trajectory.calls[1].observation
        assert trajectory.visible_images == [ONE]
        first = Run([CALL, "2"], answers(StepResult("t", "", audio=[SOUND])))
        with pytest.raises(ConfigError, match="answered with audio, and this loop carries text and images only"):
            await first()

    @pytest.mark.parametrize(
        ("image", "words"),
        [("https://example.org/a.png", "no data URI"), ([3], "an image is a int"), ([BROKEN], "cannot be decoded")],
    )
    async def test_an_image_that_cannot_be_read_is_the_fault_of_its_trajectory(self, image: object, words: str) -> None:
        trajectory = await Run([CALL, "2"], answers(StepResult("t", "<image>", image=image)))()
        assert trajectory.stop is StopReason.FAULT
        assert trajectory.fault is not None
        assert trajectory.fault.kind is FaultKind.TOOL_CRASHED
        assert words in trajectory.fault.message
        assert trajectory.excluded is None  # the call may have made it
        opens = await Run(["2"], answers(StepResult("t", "<image>", image=image)), call_tool_first=True)()
        assert opens.fault is not None
        assert opens.excluded is Excluded.FAULT

    async def test_an_image_that_the_model_does_not_take(self) -> None:
        thin = picture(1, (1000, 2))
        trajectory = await Run([CALL, "2"], answers(StepResult("t", "<image>", image=[thin])))()
        assert trajectory.fault is not None
        assert (trajectory.fault.kind, trajectory.fault.message) == (FaultKind.TOOL_CRASHED, "1000 pixels are too wide")
        assert trajectory.excluded is None

    async def test_images_that_a_renderer_loses_are_a_fault(self) -> None:
        class Losing(InlineRenderer):
            def next(self, context: Sequence[int], parts: Sequence[str], calls: Sequence[Call]) -> list[Segment]:
                return super().next(context, ["lost"], calls)

        run = Run([CALL, "2"], answers(StepResult("t", "<image>", image=[ONE])))
        run.renderer = Losing(run.tokenizer, frozenset({run.tokenizer.special(END)}))
        trajectory = await run()
        assert trajectory.fault is not None
        assert "the observation's 1 images are not where the chat template" in trajectory.fault.message

    async def test_a_model_that_writes_a_part_of_an_image(self) -> None:
        trajectory = await Run([f"see {PAD}"], answers())()
        assert trajectory.fault is not None
        assert (trajectory.fault.kind, trajectory.excluded is None) == (FaultKind.MISCONFIGURED, False)


async def test_a_record_names_images_and_they_lie_beside_it_once(tmp_path: Path) -> None:
    result = StepResult("t", "<image><image>", image=[ONE, TWO])
    trajectory = await Run([CALL, CALL, "2"], answers(result, result))()
    line = trajectory.to_json()
    assert ONE.sha256 in line
    assert len(line) < 10_000
    read = Trajectory.from_json(line)
    assert [s.image for s in read.segments if s.image] == [ONE.sha256, TWO.sha256] * 2
    write_jsonl(tmp_path / "records.jsonl", [read])
    assert not (tmp_path / "images").exists()
    write_jsonl(tmp_path / "records.jsonl", [trajectory, trajectory])
    assert {path.name: path.read_bytes() for path in (tmp_path / "images").iterdir()} == {
        f"{image.sha256}.png": image.data for image in (ONE, TWO)
    }
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2
