"""One step of an earlier run: its batch in its places, with the rewards of then."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from verl_loop import ScriptedEngine, make_loop, make_tokenizer

from verl_tool.agent_loop.trajectory import (
    POLICY_INDUCED,
    REWARD_FAULT,
    Author,
    Excluded,
    Segment,
    StopReason,
    Trajectory,
    write_jsonl,
)
from verl_tool.agent_loop.verl.stored_step import STORED_LINE, LostRolloutError, StoredStep
from verl_tool.errors import ConfigError

LOOP = ("actor_rollout_ref.agent.enable_agent=false", "actor_rollout_ref.rollout.n=2")
PROMPT = [{"role": "user", "content": "?"}]


def stored(words: str, reward: float | None = 1.0, excluded: Excluded | None = None, **extra: Any) -> Trajectory:
    segments = (
        Segment(Author.PROMPT, (5, 6)),
        Segment(Author.MODEL, tuple(words.encode()), (-0.5,) * len(words), words),
    )
    told = {"index": 0, "step": 3, **extra}
    return Trajectory(f"then-{words}", segments, StopReason.ANSWERED, reward=reward, excluded=excluded, extra=told)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two groups among one another, of which the second lost a sample; all rows have one index."""
    info = {"acc": 1.0, "shaping/length": None, "curiosity_bonus": 0.25}
    lines = [
        stored("a", group=0, reward_extra_info=info),
        stored("b", group=1, reward=None, excluded=Excluded.GRADER, reward_fault="it crashed"),
        stored("c", group=0, reward=0.0, provoked="a bomb"),
    ]
    write_jsonl(tmp_path / "step_3.jsonl", lines)
    return tmp_path


def test_prompts_are_given_its_groups_as_they_come(folder: Path) -> None:
    step = StoredStep(folder, 3, 2)
    assert [step.sample_of(*asked) for asked in (("p", 1), ("q", 0), ("p", 0))] == [2, 1, 0]
    for prompt, sample in (("q", 1), ("r", 0)):
        with pytest.raises(LostRolloutError, match="the run lost it"):
            step.sample_of(prompt, sample)


def test_each_has_the_reward_of_then_without_what_the_trainer_added(folder: Path) -> None:
    step = StoredStep(folder, 3, 2)
    graded, faulted, provoked = (step.at(line) for line in range(3))
    assert (graded.reward, graded.told["acc"], faulted.reward) == (0.75, 1.0, 0.0)
    assert math.isnan(graded.told["shaping/length"])
    assert "curiosity_bonus" not in graded.told
    assert (faulted.told[REWARD_FAULT], faulted.trajectory.excluded) == ("it crashed", None)
    assert (provoked.told[REWARD_FAULT], provoked.told[POLICY_INDUCED]) == ("", "a bomb")
    assert (provoked.trajectory.reward, provoked.trajectory.extra) == (None, {"index": 0})


def test_records_that_tell_no_groups_are_grouped_by_their_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "step_3.jsonl", [stored("a", index=4), stored("b", index=5), stored("c", index=4)])
    step = StoredStep(tmp_path, 3, 2)
    assert [step.sample_of("p", sample) for sample in (0, 1)] == [0, 2]
    with pytest.raises(ConfigError, match="2 have the same index, of 1 a prompt"):
        StoredStep(tmp_path, 3, 1)


def test_what_cannot_be_made_again_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no step_4\.jsonl; steps that are stored: 3"):
        StoredStep(folder, 4, 2)
    with pytest.raises(ConfigError, match="has 3 trajectories, and the batch has more"):
        StoredStep(folder, 3, 2).at(3)
    image = replace(stored("i"), segments=(Segment(Author.PROMPT, (1,), image="0" * 64),))
    write_jsonl(folder / "step_5.jsonl", [image])
    with pytest.raises(ConfigError, match="holds trajectories with images"):
        StoredStep(folder, 5, 2)
    (folder / "step_6.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"step_6\.jsonl has a line that is no trajectory"):
        StoredStep(folder, 6, 2)


async def test_the_loop_gives_them_to_either_trainer_and_nobody_grades(folder: Path) -> None:
    tokenizer = make_tokenizer()
    engine = ScriptedEngine(tokenizer)
    loop = make_loop(tokenizer, engine, *LOOP, f"actor_rollout_ref.replay={folder}", "actor_rollout_ref.replay_step=3")
    older = await loop.run({}, raw_prompt=PROMPT, index=9, priority=2)
    newer = await loop.run({}, raw_prompt=PROMPT, index=9, uid="p", session_id=0)
    assert [output.response_ids for output in (older, newer)] == [[*b"c"], [*b"a"]]
    assert [output.reward_score for output in (older, newer)] == [0.0, 0.75]
    assert [output.extra_fields[STORED_LINE] for output in (older, newer)] == [2, 0]
    assert newer.extra_fields["reward_extra_info"]["acc"] == 1.0
    assert newer.extra_fields["min_global_steps"] == 3
    assert engine.asked == []
