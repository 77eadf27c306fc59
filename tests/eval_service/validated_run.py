"""What the trainer's validation of the calculator model wrote, and whether the endpoint writes the same."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from calculator_run import AGENT, ROLLOUT, Calculator, small_run

from eval_service.evaluation.asking import Asker, Asking
from eval_service.evaluation.dataset import read_problems
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


async def answers(url: str, model: str, run: ValidatedRun) -> list[Trajectory]:
    """The endpoint's trajectories by its own sampling, which is that of the run's validation, as the evaluator asks."""
    async with Asker(Asking(base_url=f"{url}/v1", model=model)) as asker:
        records = await asyncio.gather(*(asker.ask(problem, 0) for problem in read_problems(run.data)))
    assert [record.error for record in records] == [None] * len(records)
    return [record.trajectory for record in records if record.trajectory is not None]


def assert_equal(served: list[Trajectory], trained: list[Trajectory]) -> None:
    """All tokens, who wrote them, all images, why each trajectory ended, each call: the same, in whichever order."""
    assert len(served) == len(trained) > 0
    assert any(0 in t.response_mask for t in served), "no trajectory holds a tool output; nothing is shown"
    assert _by_prompt(served) == _by_prompt(trained)


def _by_prompt(trajectories: list[Trajectory]) -> dict[Any, Any]:
    return {
        (tuple(t.prompt_ids), *(segment.image for segment in t.segments[: t.prompt_segments])): (
            t.response_ids,
            [(len(segment.tokens), segment.image) for segment in t.response if segment.image],
            t.response_mask,
            t.stop,
            [(call.action, call.observation, call.valid) for call in t.calls],
        )
        for t in trajectories
    }
