"""Trajectories of an earlier run in place of an engine's: each row's, in their order, ungraded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("verl")

from verl_loop import ScriptedEngine, make_loop, make_tokenizer

from verl_tool.agent_loop.trajectory import Author, Excluded, Segment, StopReason, Trajectory, write_jsonl
from verl_tool.agent_loop.verl.stored_rollouts import StoredRollouts
from verl_tool.errors import ConfigError

LOOP = ("actor_rollout_ref.agent.enable_agent=false",)


def stored(index: int, words: str, **changes: object) -> Trajectory:
    segments = (
        Segment(Author.PROMPT, (5, 6)),
        Segment(Author.MODEL, tuple(words.encode()), (-0.5,) * len(words), words),
    )
    made = Trajectory(f"then-{words}", segments, StopReason.ANSWERED, reward=1.0, extra={"index": index, "step": 1})
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "step_2.jsonl", [stored(0, "c"), stored(1, "d")])
    write_jsonl(tmp_path / "step_1.jsonl", [stored(0, "a"), stored(0, "b", excluded=Excluded.SINGLETON)])
    write_jsonl(tmp_path / "validation_0.jsonl", [stored(0, "v")])
    return tmp_path


def test_each_row_has_its_own_in_the_order_of_steps_and_then_from_the_first_again(folder: Path) -> None:
    rollouts = StoredRollouts(folder)
    assert [rollouts.next(0, validation=False).model_text for _ in range(4)] == ["a", "b", "c", "a"]
    assert rollouts.next(1, validation=False).model_text == "d"
    assert rollouts.next(0, validation=True).model_text == "v"


def test_they_are_as_before_they_were_graded(folder: Path) -> None:
    rollouts = StoredRollouts(folder)
    for _ in range(2):
        told = rollouts.next(0, validation=False)
        assert (told.reward, told.excluded) == (None, None)


def test_what_is_not_stored_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no trajectory of row 1 of a validation"):
        StoredRollouts(folder).next(1, validation=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"has no step_N\.jsonl"):
        StoredRollouts(tmp_path / "empty")
    write_jsonl(folder / "step_3.jsonl", [stored(7, "i", segments=(Segment(Author.PROMPT, (1,), image="0" * 64),))])
    with pytest.raises(ConfigError, match="holds images"):
        StoredRollouts(folder).next(7, validation=False)


async def test_the_loop_gives_them_to_verl_and_asks_no_engine(folder: Path) -> None:
    tokenizer = make_tokenizer()
    engine = ScriptedEngine(tokenizer)
    loop = make_loop(tokenizer, engine, *LOOP, f"actor_rollout_ref.replay={folder}")
    prompt = [{"role": "user", "content": "?"}]
    outputs = [await loop.run({}, raw_prompt=prompt, index=0, global_steps=4) for _ in range(2)]
    assert [output.response_ids for output in outputs] == [[*b"a"], [*b"b"]]
    assert [output.prompt_ids for output in outputs] == [[5, 6], [5, 6]]
    assert outputs[0].response_logprobs == [-0.5]
    assert outputs[0].response_mask == [1]
    assert outputs[0].extra_fields["min_global_steps"] == 4
    record = outputs[1].extra_fields["trajectory"]
    assert (record.extra, record.trajectory_id == "then-b") == ({"index": 0}, False)
    assert engine.asked == []
