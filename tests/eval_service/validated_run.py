"""What the trainer's validation of the calculator model wrote, and whether the endpoint writes the same."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from calculator_run import AGENT, ROLLOUT, Calculator, small_run

from verl_tool.agent_loop.trajectory import Trajectory, read_jsonl

RESPONSE_LENGTH = 144


@dataclass(frozen=True)
class ValidatedRun:
    """A run of the trainer that validated a model (greedy, as is verl's default) and did not train it."""

    folder: Path
    """Holds the run's config, and no weights."""
    model: Path
    data: Path
    """The validation's problems, in order."""
    trajectories: list[Trajectory]

    @property
    def service_arguments(self) -> list[str]:
        return ["--from_run", str(self.folder), "--model", str(self.model)]

    @property
    def questions(self) -> list[str]:
        parquet = pytest.importorskip("pyarrow.parquet")
        return [row["prompt"][0]["content"] for row in parquet.read_table(self.data).to_pylist()]


def validated_run(folder: Path, calculator: Calculator, *mode: str) -> ValidatedRun:
    """Run the trainer's validation with the options `mode`."""
    run = small_run(
        folder,
        calculator,
        "algorithm.adv_estimator=grpo",
        "trainer.use_v1=false",
        "trainer.val_only=true",
        "trainer.val_before_train=true",
        f"data.max_response_length={RESPONSE_LENGTH}",
        f"{ROLLOUT}.max_model_len={RESPONSE_LENGTH + 48}",
        f"{AGENT}.max_turns=3",
        *mode,
    )
    run.finish()
    trajectories = list(read_jsonl(folder / "trajectories/validation_0.jsonl"))
    return ValidatedRun(folder, calculator.model, calculator.data / "test.parquet", trajectories)


async def answers(client: Any, model: str, questions: list[str]) -> list[Trajectory]:
    """The endpoint's trajectories by its own sampling, which is that of the run's validation."""
    told = await asyncio.gather(
        *(
            client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": question}],
                extra_body={"return_trajectory": True},
            )
            for question in questions
        )
    )
    return [Trajectory.from_json(json.dumps(answer.choices[0].trajectory)) for answer in told]


def assert_equal(served: list[Trajectory], trained: list[Trajectory]) -> None:
    """All tokens, who wrote them, why each trajectory ended, each call: the same, in whichever order."""
    assert len(served) == len(trained) > 0
    assert any(0 in t.response_mask for t in served), "no trajectory holds a tool output; nothing is shown"
    assert _by_prompt(served) == _by_prompt(trained)


def _by_prompt(trajectories: list[Trajectory]) -> dict[tuple[int, ...], Any]:
    return {
        tuple(t.prompt_ids): (
            t.response_ids,
            t.response_mask,
            t.stop,
            [(call.action, call.observation, call.valid) for call in t.calls],
        )
        for t in trajectories
    }
