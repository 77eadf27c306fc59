"""What holds for any model, any tool, any template and any limit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from toy_model import END, EOS, START, RandomEngine, ScriptedEngine, Template, ToyTokenizer, ToyTools

from verl_tool.agent_loop.episode import Episode
from verl_tool.agent_loop.options import EpisodeOptions
from verl_tool.agent_loop.tokenizer import render_prompt
from verl_tool.agent_loop.trajectory import Author, StopReason, Trajectory
from verl_tool.formats import Call
from verl_tool.protocol import Fault, FaultKind, StepResult

STOP = "</a>"
WORDS = ["</a>\n", "a></", "x</a>", "ab", "\nu"]
SEPARATING = st.builds(
    Template,
    open=st.sampled_from([START + "{role}\n", START + "{role}: ", START + "[{role}]"]),
    close=st.sampled_from([END + "\n", END, END + "\n\n"]),
    begin=st.sampled_from(["", EOS, "You help.\n"]),
)
"""Templates that separate turns by special tokens and leave content as it is."""
ANY_TEMPLATE = st.one_of(
    SEPARATING,
    st.builds(
        Template,
        open=st.sampled_from(["\n{role}: ", "[{role}]", START + "{role}\n"]),
        close=st.sampled_from(["", "\n", ";", END]),
        begin=st.just(""),
        trim=st.booleans(),
        drop_thoughts=st.booleans(),
    ),
)
REPLIES = st.text(max_size=60) | st.sampled_from([END, f"{END}\n{START}user\n", STOP, "é" * 40, "\ud800", ""])
LENGTH = st.none() | st.integers(1, 60)


@st.composite
def any_options(draw: st.DrawFn) -> dict[str, Any]:
    chat = draw(st.booleans())
    separator = chat and draw(st.booleans())
    return {
        "enable_mtrl": chat,
        "mtrl_sep": f"\n{START}user\n{{obs}}{END}\n{START}assistant\n" if separator else None,
        "turn_end_token": END if separator and draw(st.booleans()) else None,
        "action_stop_tokens": draw(st.sampled_from([[STOP], [STOP, "ab"]])),
        "max_turns": draw(st.integers(0, 4)),
        "call_tool_first": draw(st.booleans()),
        "max_prompt_length": draw(st.none() | st.integers(1, 90)),
        "max_response_length": draw(LENGTH),
        "max_model_len": draw(st.none() | st.integers(20, 160)),
        "max_action_length": draw(st.integers(1, 30)),
        "max_obs_length": draw(LENGTH),
        "truncate_obs_side": draw(st.sampled_from(["left", "right", "middle"])),
        "truncate_response_side": draw(st.sampled_from(["left", "right", "middle"])),
        "additional_eos_token_ids": draw(st.sampled_from([[], [7]])),
        "mask_overlong_loss": draw(st.booleans()),
        "mask_void_traj": draw(st.booleans()),
    }


def run_random(template: Template, values: dict[str, Any], replies: list[str], seed: int) -> tuple[Any, ...]:
    tokenizer = ToyTokenizer(template, WORDS)
    likely = [tokenizer.special(END), *(256 + 3 + i for i in range(len(WORDS)))]
    engine = RandomEngine(tokenizer, seed, likely)
    chance = random.Random(seed)

    def reply(action: str, n: int) -> StepResult | str:
        if chance.random() < 0.1:
            return StepResult("t", fault=Fault(kind=FaultKind.SANDBOX, message="", retryable=False))
        text = replies[n % len(replies)]
        return StepResult("t", text, done=True) if chance.random() < 0.1 else text

    tools = ToyTools(reply)
    options = EpisodeOptions.load(values)
    prompt = render_prompt(tokenizer, [{"role": "user", "content": "1+1?"}])
    trajectory = asyncio.run(Episode(engine, tools, tokenizer, options).run(prompt))
    return trajectory, engine, tools, options


@settings(max_examples=400)
@given(ANY_TEMPLATE, any_options(), st.lists(REPLIES, min_size=1, max_size=4), st.integers(0, 10**6))
def test_whatever_happens_masks_log_probs_and_tokens_are_exact(
    template: Template, values: dict[str, Any], replies: list[str], seed: int
) -> None:
    trajectory, engine, tools, options = run_random(template, values, replies, seed)
    check_alignment(trajectory, engine)
    check_limits(trajectory, engine, options)
    check_nothing_is_lost(trajectory, tools)
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


def check_alignment(trajectory: Trajectory, engine: RandomEngine) -> None:
    ids, mask, log_probs = trajectory.response_ids, trajectory.response_mask, trajectory.response_log_probs
    assert log_probs is not None
    assert len(ids) == len(mask) == len(log_probs) == len(trajectory.loss_mask)
    generated = [(token, p) for fed in engine.fed for token, p in zip(fed.token_ids, fed.log_probs, strict=True)]
    assert [(t, p) for t, p, m in zip(ids, log_probs, mask, strict=True) if m] == generated
    assert all(p == 0.0 for p, m in zip(log_probs, mask, strict=True) if not m)
    # What the model was fed at each turn, and what it answered, is what is trained on.
    whole = trajectory.prompt_ids + ids
    for fed in engine.fed:
        seen = fed.prompt_ids + fed.token_ids
        assert whole[: len(seen)] == seen
    if engine.fed:
        assert engine.fed[0].prompt_ids == trajectory.prompt_ids
    assert len({fed.request_id for fed in engine.fed}) <= 1


def check_limits(trajectory: Trajectory, engine: RandomEngine, options: EpisodeOptions) -> None:
    assert trajectory.num_turns <= options.max_turns + 1
    if options.max_response_length is not None:
        assert len(trajectory.response_ids) <= options.max_response_length
    if options.max_model_len is not None and trajectory.response_ids:
        assert len(trajectory.prompt_ids) + len(trajectory.response_ids) <= options.max_model_len
    if options.max_prompt_length is not None:
        assert len(trajectory.prompt_ids) <= options.max_prompt_length
    for segment in trajectory.response:
        if segment.author is Author.MODEL:
            assert options.max_action_length is not None
            assert len(segment.tokens) <= options.max_action_length
        if segment.author is Author.TOOL and options.max_obs_length is not None and not options.enable_mtrl:
            assert len(segment.tokens) <= options.max_obs_length


def check_nothing_is_lost(trajectory: Trajectory, tools: ToyTools) -> None:
    assert [call.action for call in trajectory.calls] == [asked.action for asked in tools.asked]
    assert [asked.step for asked in tools.asked] == list(range(len(tools.asked)))
    # An observation that the model was not shown whole says so. A template may trim blanks.
    for call in trajectory.calls:
        shown_whole = call.visible_tokens > 0 or not call.observation.strip() or call.done or call.fault is not None
        assert shown_whole or call.truncated
    cut = trajectory.stop in (StopReason.MAX_ACTION_LENGTH, StopReason.MAX_RESPONSE_LENGTH)
    assert not (cut and trajectory.stop.finished)
    assert (trajectory.fault is not None) == (trajectory.stop is StopReason.FAULT)


@settings(max_examples=200)
@given(
    SEPARATING,
    st.lists(st.tuples(st.text("ab<>/\n é", max_size=12), st.text(max_size=30)), max_size=4),
    st.booleans(),
    st.sampled_from(["user", "tool"]),
)
def test_chat_turns_equal_the_conversation_rendered_at_once(
    template: Template, exchanges: list[tuple[str, str]], stopped: bool, role: str
) -> None:
    """Wherever the template separates turns by special tokens and leaves content as it is, and the model chose the
    tokens that the tokenizer would (a turn that starts with a newline can not: it would merge with the template's)."""
    tokenizer = ToyTokenizer(template, ["ab", "\nu", "\n\n"])
    said = [text.replace(STOP, "").lstrip("\n") + STOP for text, _ in exchanges] + ["done"]
    heard = ["".join(c for c in obs if c not in "<|\ud800") for _, obs in exchanges]
    trajectory = converse(tokenizer, said, heard, [STOP] if stopped else [], role)
    messages = [{"role": "user", "content": "1+1?"}]
    for action, observation in zip(said, heard, strict=False):
        messages += [{"role": "assistant", "content": action}, {"role": role, "content": observation}]
    messages.append({"role": "assistant", "content": "done"})
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    end = tokenizer.encode(whole[: whole.rindex(END) + len(END)])
    assert trajectory.prompt_ids + trajectory.response_ids == end


def converse(
    tokenizer: ToyTokenizer, said: list[str], heard: list[str], stops: list[str], role: str = "user"
) -> Trajectory:
    class Anything:
        """A format that takes every turn with the stop string for a call."""

        name = "anything"
        stop = ()
        observation = None

        def markers(self) -> tuple[str, ...]:
            return ()

        def find_calls(self, text: str) -> list[Any]:
            return [Call("anything", text, 0, len(text), self)] if STOP in text else []

        def render(self, output: str, call: Any = None) -> str:
            return output

        def usage(self, tools: Any) -> str:
            return ""

    options = EpisodeOptions(
        enable_mtrl=True, mtrl_role=role, action_stop_tokens=tuple(stops), max_obs_length=None, max_turns=10
    )
    tools = ToyTools(lambda action, n: heard[n])
    episode = Episode(ScriptedEngine(tokenizer, said), tools, tokenizer, options, formats=[Anything()])
    return asyncio.run(episode.run(render_prompt(tokenizer, [{"role": "user", "content": "1+1?"}])))


def rendered(tokenizer: ToyTokenizer, said: list[str], heard: list[str]) -> list[int]:
    messages = [{"role": "user", "content": "1+1?"}]
    for i, action in enumerate(said):
        messages.append({"role": "assistant", "content": action})
        messages += [{"role": "user", "content": heard[i]}] if i < len(heard) else []
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    return tokenizer.encode(text)


def test_a_template_that_drops_earlier_thoughts_does_not_change_what_the_model_saw() -> None:
    said, heard = [f"<think>hm</think>{STOP}", "2"], ["ok"]
    tokenizer = ToyTokenizer(Template(close=END, drop_thoughts=True))
    trajectory = converse(tokenizer, said, heard, [STOP])
    kept = trajectory.prompt_ids + trajectory.response_ids
    assert "<think>hm</think>" in tokenizer.decode(kept)
    assert kept != rendered(tokenizer, said, heard)
    without = converse(tokenizer, [STOP, "2"], heard, [STOP])
    assert without.prompt_ids + without.response_ids == rendered(tokenizer, said, heard)


def test_a_template_that_strips_turns_does_not_change_what_the_model_wrote() -> None:
    said, heard = [f"  1{STOP}", "2"], [" ok "]
    tokenizer = ToyTokenizer(Template(close=END, trim=True))
    trajectory = converse(tokenizer, said, heard, [STOP])
    kept = tokenizer.decode(trajectory.prompt_ids + trajectory.response_ids)
    assert f"assistant\n  1{STOP}{END}{START}user\nok{END}" in kept
    assert kept.replace("  1", "1") == tokenizer.decode(rendered(tokenizer, said, heard))


def test_a_turn_that_would_merge_with_the_template_stays_in_the_models_tokens() -> None:
    said, heard = [f"\n1{STOP}", "2"], ["ok"]
    tokenizer = ToyTokenizer(Template(close=END), words=["\n\n"])
    trajectory = converse(tokenizer, said, heard, [STOP])
    kept, whole = trajectory.prompt_ids + trajectory.response_ids, rendered(tokenizer, said, heard)
    assert len(kept) == len(whole) + 1
    assert tokenizer.decode(kept) == tokenizer.decode(whole)


def test_turns_without_separating_tokens_have_the_same_text_in_other_tokens() -> None:
    said, heard = [f"1{STOP}", "2"], ["ok"]
    tokenizer = ToyTokenizer(Template(open="\n{role}: ", close=""), words=["</a>\nu"])
    trajectory = converse(tokenizer, said, heard, [STOP])
    kept = trajectory.prompt_ids + trajectory.response_ids
    whole = rendered(tokenizer, said, heard)
    assert kept[:-1] != whole
    assert tokenizer.decode(kept[:-1]) == tokenizer.decode(whole)
