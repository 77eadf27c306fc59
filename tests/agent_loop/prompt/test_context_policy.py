"""What the model is fed in each mode of `context`, and that each turn is trained behind what it was sampled from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import END, ScriptedEngine, Template, ToyTokenizer, ToyTools

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.options import SUMMARY_CONTINUATION, SUMMARY_PROMPT, EpisodeOptions
from verl_tool.agent_loop.tokenizer import render_prompt
from verl_tool.agent_loop.trajectory import StopReason, Trajectory
from verl_tool.content.parts import ImagePart
from verl_tool.errors import ConfigError
from verl_tool.protocol import StepResult

STOP = "</python>"
QUESTION = [{"role": "user", "content": "1+1?"}]
MODES: dict[str, dict[str, Any]] = {
    "append": {},
    "drop_thoughts": {},
    "window": {"context_turns": 2},
    "window_above": {"context_turns": 1, "context_tokens": 150},
    "summarise": {"context_tokens": 120, "summary_tokens": 40},
}
CHAT = {"enable_mtrl": True, "formats": ["python_tags"]}


def options_of(mode: str, **options: Any) -> EpisodeOptions:
    stops = {} if options.get("enable_mtrl") else {"action_stop_tokens": [STOP]}
    return EpisodeOptions.load({"context": mode.partition("_above")[0], **MODES[mode], **stops, **options})


async def run(turns: list[Any], mode: str, **options: Any) -> tuple[Trajectory, ScriptedEngine, ToyTokenizer]:
    reply = options.pop("reply", lambda action, n: f"<obs{n}>")
    tokenizer = ToyTokenizer()
    engine, tools = ScriptedEngine(tokenizer, turns), ToyTools(reply)
    episode = Episode(engine, tools, tokenizer, options_of(mode, **options))
    trajectory = await episode.run(render_prompt(tokenizer, QUESTION), trajectory_id="t")
    return trajectory, engine, tokenizer


def assert_trained_as_seen(trajectory: Trajectory, engine: ScriptedEngine) -> None:
    """Each turn stands in one row, behind the very tokens that it was sampled from; all tokens once."""
    rows = [(row.prompt_ids + row.response_ids, row) for row in trajectory.rows]
    trained = 0
    for fed in engine.fed:
        n = len(fed.prompt_ids)
        [row] = [
            row
            for ids, row in rows
            if n >= len(row.prompt_ids) and ids[: n + len(fed.token_ids)] == fed.prompt_ids + fed.token_ids
        ]
        start = n - len(row.prompt_ids)
        end = start + len(fed.token_ids)
        assert row.response_mask[start:end] == [1] * len(fed.token_ids)
        assert row.response_log_probs is not None
        assert row.response_log_probs[start:end] == fed.log_probs
        trained += len(fed.token_ids)
    assert trained == sum(sum(row.response_mask) for row in trajectory.rows) == sum(trajectory.response_mask)
    covered = sorted(
        place for places in trajectory.row_spans for start, n in places for place in range(start, start + n)
    )
    assert covered == list(range(len(trajectory.response_ids)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chat", [False, True])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
async def test_each_turn_is_trained_behind_what_it_was_sampled_from(mode, chat, data):
    words = st.text("ab \n", max_size=20)
    thought = st.sampled_from(["", "<think>hm</think>\n\n", "so</think>"])
    turns = data.draw(st.lists(st.tuples(thought, words).map("".join), min_size=1, max_size=9))
    calls = [f"{turn}<python>{i}{STOP}" for i, turn in enumerate(turns)]
    limits = data.draw(st.sampled_from([{}, {"max_response_length": 150}, {"max_model_len": 260}]))
    trajectory, engine, _ = await run([*calls, *["end"] * 9], mode, **(CHAT if chat else {}), **limits)
    assert_trained_as_seen(trajectory, engine)
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


async def test_thoughts_of_earlier_turns_are_dropped_and_trained_where_they_were_seen():
    turns = [f"<think>long</think>\n\na<python>0{STOP}", f"b<python>1{STOP}", "<think>x</think>c"]
    trajectory, engine, tokenizer = await run(turns, "drop_thoughts")
    fed = [tokenizer.decode(each.prompt_ids) for each in engine.fed]
    prompt = tokenizer.decode(trajectory.prompt_ids)
    assert fed == [prompt, f"{prompt}a<python>0{STOP}<obs0>", f"{prompt}a<python>0{STOP}<obs0>b<python>1{STOP}<obs1>"]
    first, second = trajectory.rows  # nothing is dropped of the second turn: it goes on
    assert tokenizer.decode(first.response_ids) == f"{turns[0]}<obs0>"
    assert tokenizer.decode(second.prompt_ids) == fed[1]
    assert tokenizer.decode(second.response_ids) == f"b<python>1{STOP}<obs1><think>x</think>c{END}"
    assert trajectory.contexts[0].reason == "drop_thoughts"


async def test_the_marker_that_a_template_opens_thoughts_with_goes_too():
    """As those of DeepSeek's distilled models: the prompt of each turn ends in it."""

    class Opens(Template):
        def render(self, messages: Any, add_generation_prompt: bool) -> str:
            return super().render(messages, add_generation_prompt) + ("<think>\n" if add_generation_prompt else "")

    tokenizer = ToyTokenizer(Opens())
    turns = [f"long</think>\n\na<python>{i}</python>" for i in range(2)]
    engine, tools = ScriptedEngine(tokenizer, [*turns, "x</think>c"]), ToyTools(lambda action, n: f"<obs{n}>")
    episode = Episode(engine, tools, tokenizer, options_of("drop_thoughts", **CHAT))
    trajectory = await episode.run(render_prompt(tokenizer, QUESTION), trajectory_id="t")
    fed = [tokenizer.decode(each.prompt_ids) for each in engine.fed]
    assert [text.count("<think>") for text in fed] == [1, 1, 1]
    assert all(text.endswith("<think>\n") for text in fed)
    assert "long" not in "".join(fed)
    assert_trained_as_seen(trajectory, engine)


async def test_a_window_keeps_the_prompt_and_the_last_turns():
    turns = [f"{i}<python>{i}{STOP}" for i in range(4)]
    trajectory, engine, tokenizer = await run([*turns, "end"], "window")
    prompt = tokenizer.decode(trajectory.prompt_ids)
    pairs = [f"{i}<python>{i}{STOP}<obs{i}>" for i in range(4)]
    fed = [tokenizer.decode(each.prompt_ids).removeprefix(prompt) for each in engine.fed]
    assert fed == ["", pairs[0], pairs[0] + pairs[1], pairs[1] + pairs[2], pairs[2] + pairs[3]]
    assert len(trajectory.rows) == 3
    assert trajectory.num_turns == 5
    assert [row.num_turns for row in trajectory.rows] == [3, 1, 1]


@pytest.mark.parametrize("chat", [False, True])
async def test_the_model_writes_a_summary_and_goes_on_from_it(chat):
    turns = [f"a<python>0{STOP}", "notes", "end"]
    options = CHAT if chat else {}
    trajectory, engine, tokenizer = await run(turns, "summarise", reply=lambda *_: "x" * 120, **options)
    asked, continued = (tokenizer.decode(fed.prompt_ids) for fed in engine.fed[1:])
    prompt = tokenizer.decode(trajectory.prompt_ids)
    assert "x" * 120 + f"\n\n{SUMMARY_PROMPT}" in asked
    assert continued.startswith(f"{prompt}notes")
    assert SUMMARY_CONTINUATION in continued
    assert "x" * 120 not in continued
    assert engine.fed[1].params["max_tokens"] == 40
    assert "stop" not in engine.fed[1].params
    assert trajectory.stop is StopReason.ANSWERED
    # The summary is sampled and trained, and is no turn: a reward looks at the turns.
    assert trajectory.num_turns == 2
    assert "notes" not in trajectory.model_text
    assert [segment.summary for segment in trajectory.response if segment.generated] == [False, True, False]
    assert set(trajectory.turn_ids) == {0, 1, 2}
    assert_trained_as_seen(trajectory, engine)


async def test_a_summary_that_is_cut_at_its_limit_is_taken_as_it_is():
    turns = [f"a<python>0{STOP}", "n" * 99, "end"]
    trajectory, engine, tokenizer = await run(turns, "summarise", reply=lambda *_: "x" * 120)
    assert trajectory.stop is StopReason.ANSWERED
    assert "n" * 40 in tokenizer.decode(engine.fed[2].prompt_ids)


async def test_a_trajectory_ends_after_so_many_invalid_calls_in_a_row():
    def reply(action: str, n: int) -> StepResult:
        return StepResult("t", f"<obs{n}>", valid="good" in action)

    calls = [f"<python>{word}{STOP}" for word in ("bad", "good", "bad", "bad", "bad")]
    trajectory, _, _ = await run([*calls, "end"], "append", reply=reply, max_invalid_calls=2)
    assert trajectory.stop is StopReason.INVALID_CALLS
    assert [call.valid for call in trajectory.calls] == [False, True, False, False]
    assert not trajectory.stop.finished
    unlimited, _, _ = await run([*calls, "end"], "append", reply=reply)
    assert unlimited.stop is StopReason.ANSWERED


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"context": "window"}, "needs context_turns"),
        ({"context": "summarise"}, "needs context_tokens"),
        ({"context_turns": 2}, "no effect with context=append"),
        ({"context": "drop_thoughts", "context_tokens": 9}, "no effect with context=drop_thoughts"),
        ({"context": "summarise", "context_tokens": 90, "max_model_len": 90}, "not below max_model_len=90"),
        ({"rolling_with_prompt": True}, "set context=window"),
    ],
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        EpisodeOptions.load({"action_stop_tokens": [STOP], **options})


async def test_images_are_refused():
    tokenizer = ToyTokenizer()
    episode = Episode(ScriptedEngine(tokenizer, ["end"]), ToyTools(str), tokenizer, options_of("window"))
    with pytest.raises(ConfigError, match="context=append"):
        await episode.run([1], images=[ImagePart(b"", "image/png", 1, 1, "0")])
