"""Trajectories in other projects' forms: what a form carries comes back as it was, and what it does not is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from atif_schema import check_atif
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from verl_tool.agent_loop.trajectory import (
    DELEGATED,
    Author,
    CallRecord,
    RowContext,
    Segment,
    StopReason,
    Trajectory,
    write_jsonl,
)
from verl_tool.errors import ConfigError
from verl_tool.protocol import Fault, FaultKind
from verl_tool.trajectories import atif, openai_messages, training_trace
from verl_tool.trajectories.trajectories_cli import app

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
IDS = st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple)
FAULT = Fault(kind=FaultKind.SANDBOX, message="gone", retryable=False)
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

ANSWERS = (f"So: {CALL}", f"<think>\nHm.\n</think>\n\n{CALL}", "hm</think>", "<think></think>", "a <think>b</think> c")


@st.composite
def model_segments(draw: st.DrawFn, known: bool) -> Segment:
    ids = draw(IDS)
    log_probs = tuple(draw(st.lists(st.floats(-30, 0), min_size=len(ids), max_size=len(ids))))
    return Segment(Author.MODEL, ids, log_probs if known else None, draw(TEXTS | st.sampled_from(ANSWERS)))


@st.composite
def trajectories(draw: st.DrawFn, known: bool = True) -> Trajectory:
    """Any number of turns, each with a call, an observation or neither; `known`: with log-probabilities."""
    segments = [Segment(Author.PROMPT, draw(IDS), text=draw(TEXTS))]
    segments += draw(st.lists(st.builds(Segment, st.just(Author.TOOL), IDS, st.none(), TEXTS), max_size=1))
    prompt, calls = len(segments), []
    for step in range(draw(st.integers(0 if not known else 1, 3))):
        segments.append(draw(model_segments(known)))
        if draw(st.booleans()):
            calls.append(CallRecord(step, segments[-1].text, draw(TEXTS), names=("add",), seconds=0.5))
            segments += [Segment(Author.TOOL, draw(IDS), text=draw(TEXTS)), Segment(Author.TEMPLATE, (7,), text="\n")]
    extra = draw(st.dictionaries(TEXTS, st.integers() | TEXTS | st.none(), max_size=2))
    stop = draw(st.sampled_from(StopReason))
    reward = draw(st.none() | st.floats(-1, 1))
    fault = FAULT if stop is StopReason.FAULT else None
    made = Trajectory("t/1", tuple(segments), stop, prompt, tuple(calls), fault, reward=reward, extra=extra)
    return replace(made, images={})


def travelled(document: Any) -> Any:
    return json.loads(json.dumps(document, allow_nan=False))


@settings(deadline=None)
@given(trajectories(known=True) | trajectories(known=False))
def test_atif_brings_back_the_trajectory_that_was_written(trajectory: Trajectory) -> None:
    written = atif.write(trajectory)
    assert written.not_carried == ()
    assert atif.read(travelled(written.result)).result == trajectory
    check_atif(travelled(written.result))


@st.composite
def cut_trajectories(draw: st.DrawFn) -> Trajectory:
    """Rollouts of several rows: contexts that were cut, with or without a summary, and sub-agents."""
    segments, contexts, row, agents = [Segment(Author.PROMPT, (1,), text="p")], [], 0, 0
    for _ in range(draw(st.integers(1, 3))):
        segments.append(replace(draw(model_segments(known=True)), row=row))
        if draw(st.booleans()):
            agents += 1
            contexts.append(RowContext(draw(IDS), DELEGATED))
            part = {"row": len(contexts), "agent": agents}
            segments.append(replace(draw(model_segments(known=True)), **part))
            segments.append(Segment(Author.TOOL, draw(IDS), text="seen by the sub-agent", **part))
        segments.append(Segment(Author.TOOL, draw(IDS), text=draw(TEXTS), row=row))
        if draw(st.booleans()):
            summary = draw(st.booleans())
            if summary:
                segments.append(replace(draw(model_segments(known=True)), row=row, summary=True))
            contexts.append(RowContext(draw(IDS), "summarise" if summary else "window"))
            row = len(contexts)
    return Trajectory("t/2", tuple(segments), StopReason.MAX_TURNS, contexts=tuple(contexts), reward=0.5)


@settings(deadline=None)
@given(cut_trajectories())
def test_atif_has_the_prompt_of_each_answer_and_a_document_for_each_subagent(trajectory: Trajectory) -> None:
    document = travelled(atif.write(trajectory).result)
    check_atif(document)
    assert atif.read(document).result == trajectory
    steps = [
        *document["steps"],
        *(step for each in document.get("subagent_trajectories", ()) for step in each["steps"]),
    ]
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    sampled = [each["prompt_token_ids"] + each["completion_token_ids"] for each in metrics]
    assert len(sampled) == sum(segment.generated for segment in trajectory.segments)
    for row in trajectory.rows:
        *_, last = (i for i, segment in enumerate(row.segments) if segment.generated)
        assert [token for segment in row.segments[: last + 1] for token in segment.tokens] in sampled
    assert not any("sub-agent" in text for text in map(str, document["steps"]))


@settings(deadline=None)
@given(trajectories(known=True))
def test_openenv_brings_back_the_trajectory_that_was_written(trajectory: Trajectory) -> None:
    written = training_trace.write(trajectory)
    assert written.not_carried == ()
    document = travelled(written.result)
    assert training_trace.read(document).result == trajectory
    for turn in document["turns"]:
        sampled = len(turn["completion_token_ids"])
        assert len(turn["per_token_logps"]) == sampled
        assert turn["loss_mask"] == [0] * len(turn["prompt_token_ids"]) + [1] * sampled


@given(trajectories(known=False))
def test_openenv_leaves_out_turns_without_log_probabilities_and_says_so(trajectory: Trajectory) -> None:
    written = training_trace.write(trajectory)
    assert written.result["turns"] == []
    assert any("without prompt or log-probabilities" in words for words in written.not_carried) == bool(
        trajectory.num_turns
    )


PLAIN = st.text("abc .\n", max_size=9)
CALLS = st.lists(
    st.builds(
        lambda name, arguments: {"name": name, "arguments": json.dumps(arguments)},
        st.sampled_from(["add", "search"]),
        st.dictionaries(st.sampled_from("xyz"), st.integers() | PLAIN, max_size=2),
    ),
    max_size=2,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages = [{"role": "system", "content": draw(PLAIN)}] * draw(st.integers(0, 1))
    messages.append({"role": "user", "content": draw(PLAIN)})
    count = 0
    for _ in range(draw(st.integers(0, 3))):
        message: dict[str, Any] = {"role": "assistant", "content": draw(PLAIN)}
        calls = draw(CALLS)
        if calls:
            ids = [f"call_{count + i}" for i in range(len(calls))]
            message["tool_calls"] = [
                {"id": name, "type": "function", "function": call} for name, call in zip(ids, calls, strict=True)
            ]
            count += len(calls)
        messages.append(message)
        if calls:
            told = [draw(PLAIN), *[""] * (len(calls) - 1)]
            messages += [{"role": "tool", "tool_call_id": n, "content": t} for n, t in zip(ids, told, strict=True)]
        elif draw(st.booleans()):
            messages.append({"role": "user", "content": "More."})
    return messages


@settings(deadline=None)
@given(conversations())
def test_messages_come_back_as_they_were(messages: list[dict[str, Any]]) -> None:
    read = openai_messages.read({"messages": messages})
    assert any("tokens" in words for words in read.not_carried)
    assert openai_messages.write(read.result).result == {"messages": messages}


MODEL = Segment(Author.MODEL, (5, 6), (-0.5, -1.0), f"Let me see. {CALL}<|im_end|>")
STORED = Trajectory(
    "abc",
    (
        Segment(Author.PROMPT, (1, 2), text="<|im_start|>user\nWhat is 1+2?"),
        MODEL,
        Segment(Author.TOOL, (8,), text="3"),
        Segment(Author.TEMPLATE, (9,), text="<|im_start|>"),
        Segment(Author.MODEL, (3,), (-0.25,), "3"),
    ),
    StopReason.ANSWERED,
    calls=(CallRecord(0, MODEL.text, "3", names=("add",)),),
    reward=1.0,
    extra={"index": 0},
)


def test_a_rollout_of_several_rows_is_carried_by_atif_and_refused_by_openenv() -> None:
    segments = (
        Segment(Author.PROMPT, (1,), text="p"),
        Segment(Author.MODEL, (2, 3), (-1.0, -1.0), "ab"),
        Segment(Author.MODEL, (4,), (-1.0,), "c", row=1),
    )
    cut = Trajectory("t", segments, StopReason.ANSWERED, contexts=(RowContext((1, 9), "window"),))
    assert atif.read(atif.write(cut).result).result == cut
    with pytest.raises(ConfigError, match="has 2 training rows"):
        training_trace.write(cut)


def test_thoughts_are_apart_from_the_message() -> None:
    turn = Segment(Author.MODEL, (5,), (-0.5,), "<think>\nAdd them.\n</think>\n\n3")
    step = atif.write(replace(STORED, segments=(STORED.segments[0], turn), calls=())).result["steps"][1]
    assert (step["reasoning_content"], step["message"]) == ("Add them.", "3")


def test_what_other_projects_see() -> None:
    document = atif.write(STORED).result
    assert [step["source"] for step in document["steps"]] == ["user", "agent", "agent"]
    (call,) = document["steps"][1]["tool_calls"]
    assert (call["function_name"], call["arguments"]) == ("add", {"a": 1, "b": 2})
    assert document["steps"][1]["observation"]["results"] == [{"source_call_id": call["tool_call_id"], "content": "3"}]
    assert document["steps"][2]["metrics"]["prompt_token_ids"] == [1, 2, 5, 6, 8, 9]
    messages = openai_messages.write(STORED, [{"role": "user", "content": "What is 1+2?"}]).result["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == "Let me see. "
    assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}


def test_documents_of_other_projects_are_read() -> None:
    ours = atif.write(STORED).result
    read = atif.read({name: value for name, value in ours.items() if name != "extra"})
    assert [(s.author, s.tokens, s.text) for s in read.result.segments] == [
        (Author.PROMPT, (1, 2), "<|im_start|>user\nWhat is 1+2?"),
        (Author.MODEL, (5, 6), MODEL.text),
        (Author.TOOL, (8, 9), "3"),
        (Author.MODEL, (3,), "3"),
    ]
    assert read.result.response_log_probs == [-0.5, -1.0, 0.0, 0.0, -0.25]
    assert read.not_carried == ("how it ended, faults, rewards",)
    for step in ours["steps"][1:]:
        del step["metrics"]
    read = atif.read(ours)
    assert not any(segment.tokens for segment in read.result.segments)
    assert "tokens" in read.not_carried[1]
    trace = training_trace.write(STORED).result
    del trace["turns"][0]["metadata"]["verl_tool"]
    assert training_trace.read(trace).result.response_mask == [1, 1, 0, 0, 1]


def test_a_document_that_somebody_changed_is_read_as_it_is_now() -> None:
    document = atif.write(STORED).result
    document["steps"][2]["message"] = "It is four."
    assert atif.read(document).result.segments[-1].text == "It is four."


@pytest.mark.parametrize(
    ("read", "document", "told"),
    [
        (atif.read, {"schema_version": "ATIF-v2.0", "steps": []}, "schema_version"),
        (training_trace.read, {"schema_version": 2, "turns": []}, "schema_version"),
        (openai_messages.read, {"messages": [{"role": "judge"}]}, "messages.0.role"),
    ],
)
def test_what_is_in_no_such_form_is_refused(read: Any, document: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(document)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)], env={"COLUMNS": "200"})


def test_the_command_converts_there_and_back(tmp_path: Path) -> None:
    source, there, back = tmp_path / "step_1.jsonl", tmp_path / "harbor", tmp_path / "back.jsonl"
    write_jsonl(source, [STORED, replace(STORED, trajectory_id="../b")])
    assert "2 trajectories written" in run(source, there, "--to", "atif").output
    assert sorted(path.name for path in there.iterdir()) == ["000001_abc.json", "000002____b.json"]
    assert run(there, back, "--to", "verl_tool").exit_code == 0
    assert back.read_text().splitlines()[0] == json.dumps(json.loads(STORED.to_json()), ensure_ascii=False)
    told = run(source, tmp_path / "chat.jsonl", "--to", "openai").output
    assert "not carried: tokens, log-probabilities and masks (2 of 2)" in told
    assert "--data FILE" in told


def test_the_command_brings_the_rows_messages(tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "What is 1+2?"}], "reward_model": {"ground_truth": "3"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    write_jsonl(tmp_path / "step_1.jsonl", [STORED])
    run(tmp_path / "step_1.jsonl", tmp_path / "chat.jsonl", "--to", "openai", "--data", tmp_path / "rows.jsonl")
    (line,) = (tmp_path / "chat.jsonl").read_text().splitlines()
    assert json.loads(line)["messages"][0] == {"role": "user", "content": "What is 1+2?"}


def test_the_command_says_what_it_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text('{"a": 1}\n')
    result = run(tmp_path / "odd.jsonl", tmp_path / "out.jsonl", "--to", "atif")
    assert result.exit_code == 2
    assert "odd.jsonl:1: this is in none of the forms" in " ".join(result.output.split())
    assert run(tmp_path / "nowhere", tmp_path / "out.jsonl", "--to", "atif").exit_code == 2
