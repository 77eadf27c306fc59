"""What `deterministic=true` sets and refuses, and that two trainings with it are the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("verl")

from calculator_run import ACTOR, ROLLOUT, TRAINS_ON_CPU, Calculator, small_run
from verl_loop import composed

from verl_tool.agent_loop.trajectory import read_jsonl
from verl_tool.errors import ConfigError
from verl_tool.replay.compare_runs import compare_runs
from verl_tool.trainer.determinism import SequentialIds, make_deterministic

LATE_TOOL = """
import asyncio, random
from verl_tool.servers.tools import CallError, tool
from verl_tool.servers.tools._arithmetic import ExpressionError, as_text, evaluate

@tool(aliases=("SimpleCalculatorTool",))
async def late(expression: str) -> str:
    '''Calculates, after a time that is another one for each call.

    Args:
        expression: such as 2*(13.1-3)
    '''
    await asyncio.sleep(random.SystemRandom().uniform(0, 0.5))
    try:
        return as_text(evaluate(expression), 15)
    except ExpressionError as error:
        raise CallError(str(error)) from error
"""


def test_it_sets_verls_options_and_keeps_the_seed_that_is_given() -> None:
    config = composed("platform=cpu", "data.seed=7")
    make_deterministic(config)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.max_num_seqs, rollout.enable_prefix_caching, config.data.seed) == (1, False, 7)
    assert config.actor_rollout_ref.actor.fsdp_config.full_determinism
    assert not config.data.validation_shuffle
    assert not rollout.full_determinism  # vLLM's invariant kernels fail on CPUs
    on_gpus = composed()
    on_gpus.actor_rollout_ref.rollout.name = "vllm"
    make_deterministic(on_gpus)
    assert on_gpus.actor_rollout_ref.rollout.full_determinism
    assert on_gpus.actor_rollout_ref.rollout.max_num_seqs > 1
    assert on_gpus.data.seed is not None


@pytest.mark.parametrize(
    ("override", "cause"),
    [
        ("trainer.v1.trainer_mode=separate_async", "set trainer.v1.trainer_mode=sync"),
        ("algorithm.filter_groups.enable=true", "which come first"),
        ("actor_rollout_ref.rollout.name=sglang", "'sglang'; the engine"),
        ("actor_rollout_ref.rollout.seed=null", "seed=None; set it to a whole number"),
        ("actor_rollout_ref.rollout.seed=-1", "seed=-1"),
    ],
)
def test_what_cannot_be_is_refused(override: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        make_deterministic(composed("platform=cpu", "trainer.use_v1=true", override))


def test_ids_are_the_same_for_the_same_step_and_in_order_as_text() -> None:
    ids, again = SequentialIds(), SequentialIds()
    drawn = []
    for step in (3, 20):
        for validation in (False, True):
            ids.begin(step, validation=validation)
            drawn += [str(ids.uuid4()) for _ in range(300)]
    assert drawn == sorted(set(drawn))
    again.begin(20, validation=True)
    assert str(again.uuid4()) == drawn[-300]


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tool") / "late.py"
    path.write_text(LATE_TOOL)
    return path


@TRAINS_ON_CPU[0]
@TRAINS_ON_CPU[1]
@pytest.mark.e2e
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("use_v1", ["false", "true"])
def test_two_trainings_are_the_same(tmp_path: Path, calculator: Calculator, tool: Path, use_v1: str) -> None:
    """Several updates a step, validations that sample, and a tool whose answers come in another order each time."""
    names = ("once", "again", "other")
    once, again, other = (_trained(tmp_path / name, calculator, tool, use_v1, name) for name in names)
    report = compare_runs(once, again)
    assert report.differences == []
    assert report.line_counts["metrics.jsonl"] == 3
    assert report.line_counts["step_2.jsonl"] == 64
    assert _order_of_answers(once) != _order_of_answers(again)
    samples = [trajectory.response_ids for trajectory in read_jsonl(once / "trajectories" / "step_1.jsonl")]
    assert any(samples[8 * row] != samples[8 * row + 1] for row in range(8))  # one seed for all would give the same
    assert len(compare_runs(once, other).differences) > 60


def _trained(folder: Path, calculator: Calculator, tool: Path, use_v1: str, name: str) -> Path:
    run = small_run(
        folder,
        calculator,
        *(f"trainer.use_v1={use_v1}", "algorithm.adv_estimator=grpo", "deterministic=true"),
        f"tool_server.start='{tool},finish'",
        *(f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_micro_batch_size_per_gpu=32"),
        *(f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.val_kwargs.temperature=0.7"),
        *([f"{ROLLOUT}.seed=43"] if name == "other" else []),
    )
    run.finish()
    return folder


def _order_of_answers(folder: Path) -> list[int]:
    """Trajectories by the time that their calls took."""
    lines = [json.loads(line) for line in (folder / "trajectories" / "step_1.jsonl").read_text().splitlines()]
    waited = [sum(call["seconds"] for call in line["calls"]) for line in lines]
    return sorted(range(len(lines)), key=lambda row: waited[row])
