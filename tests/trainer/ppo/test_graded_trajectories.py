"""Faults by cause: who is left out, what the metrics and records tell, and when a run ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from omegaconf import OmegaConf  # noqa: E402
from solved_trajectories import faulted, solved  # noqa: E402
from stored_rows import StoredRows  # noqa: E402

from verl import DataProto  # noqa: E402
from verl_tool.agent_loop.trajectory import (  # noqa: E402
    LOOP_FAULT,
    POLICY_INDUCED,
    REWARD_FAULT,
    Excluded,
    StopReason,
    Trajectory,
    read_jsonl,
)
from verl_tool.protocol import Fault, FaultKind  # noqa: E402
from verl_tool.trainer.ppo.graded_trajectories import GradedTrajectory, TooManyFaultsError  # noqa: E402
from verl_tool.trainer.ppo.ray_trainer import AgentRayPPOTrainer  # noqa: E402
from verl_tool.trainer.ppo.replay import ValidGroupFilter  # noqa: E402
from verl_tool.trainer.ppo.rollout_log import Rewards, RolloutLog  # noqa: E402
from verl_tool.trainer.ppo.valid_rows import penalise_rows_in_loss, summarise_valid_rows  # noqa: E402

AWAY = "grader: MyRewards: KeyError: 'answer'"


def aborted(name: str = "c") -> Trajectory:
    return replace(solved(name), stop=StopReason.ABORTED, excluded=Excluded.ABORTED)


def provoked(name: str = "d") -> Trajectory:
    """A tool crashed on the model's call: it counts."""
    fault = Fault(kind=FaultKind.TOOL_CRASHED, message="tool x: ValueError", retryable=False)
    return replace(faulted(name), fault=fault, excluded=None)


def added(trajectories: list[Trajectory], most: float = 1.0, folder=None, sampled=None, **told) -> RolloutLog:
    log = RolloutLog(folder, most, sampled)
    log.add(trajectories, [1.0] * len(trajectories), 1, validation=False, grading=Rewards(**told))
    return log


def test_metrics_by_cause(tmp_path):
    columns = {REWARD_FAULT: ["", "", "", "", AWAY, ""], POLICY_INDUCED: ["", "", "", "", "", "RecursionError"]}
    trajectories = [solved("a"), faulted("b"), aborted("c"), provoked("d"), solved("e"), solved("f")]
    metrics = added(trajectories, folder=tmp_path, columns=columns).take_metrics()
    sixth = pytest.approx(1 / 6)
    for cause in ("unreachable", "aborted", "tool_crashed", "grader", "grader_crashed"):
        assert metrics[f"agent/fault/{cause}"] == sixth
    assert metrics["agent/faulted"] == pytest.approx(5 / 6)
    assert metrics["agent/excluded"] == pytest.approx(3 / 6)
    for reason in ("fault", "aborted", "grader"):
        assert metrics[f"agent/excluded/{reason}"] == sixth
    assert (metrics["agent/excluded/provokable"], metrics["agent/excluded/not_provokable"]) == (0, pytest.approx(0.5))
    kept = list(read_jsonl(tmp_path / "step_1.jsonl"))
    assert [t.excluded for t in kept] == [None, Excluded.FAULT, Excluded.ABORTED, None, Excluded.GRADER, None]
    assert [t.reward for t in kept] == [1.0, None, None, 1.0, None, 1.0]
    assert kept[4].extra["reward_fault"] == AWAY
    assert kept[5].extra["provoked"] == "RecursionError"


@pytest.mark.parametrize(
    ("trajectory", "columns", "words"),
    [
        (solved(), {REWARD_FAULT: [AWAY] * 4}, r"grader 4.*MyRewards: KeyError: 'answer'"),
        (solved(), {POLICY_INDUCED: [AWAY] * 4}, "grader_crashed 4"),
        (aborted(), {}, "aborted 4.*engine"),
        (faulted(), {}, "unreachable 4.*nobody listens"),
        (provoked(), {}, "tool_crashed 4"),
    ],
)
def test_whatever_the_cause_most_faulted_ends_the_run(trajectory, columns, words):
    with pytest.raises(TooManyFaultsError, match=words):
        added([trajectory] * 4, 0.5, columns=columns)


def test_as_many_as_are_allowed_end_nothing():
    added([], 0.0)
    added([faulted("a"), aborted("b"), solved("c"), solved("d")], 0.5)
    with pytest.raises(TooManyFaultsError, match=r"3 of 4 .*unreachable 2, aborted 1.*nobody listens"):
        added([faulted("a"), aborted("b"), faulted("c"), solved("d")], 0.5)
    with pytest.raises(TooManyFaultsError, match="1 of 1"):
        added([aborted()], 0.0)


@pytest.mark.parametrize(
    ("excluded", "fault", "provokable"),
    [
        (Excluded.OVERLONG, None, True),
        (Excluded.SINGLETON, FaultKind.TOOL_CRASHED, True),
        (Excluded.SINGLETON, None, False),
        (Excluded.FAULT, FaultKind.UNREACHABLE, False),
    ],
)
def test_what_a_model_could_bring_about_is_told(excluded, fault, provokable):
    kind = fault and Fault(kind=fault, message="", retryable=False)
    assert GradedTrajectory(replace(solved(), fault=kind, excluded=excluded)).provokable == provokable


def test_what_did_not_come_and_what_was_filtered_count_too():
    log = RolloutLog(None, 0.5)
    with pytest.raises(TooManyFaultsError, match="lost 3"):
        log.add([solved()] * 2, None, 1, validation=False, lost=3)
    filtered = Rewards().outcomes([faulted(), faulted()], None)
    with pytest.raises(TooManyFaultsError, match="unreachable 2"):
        log.add([solved()], None, 1, validation=False, filtered=filtered)


def test_who_is_left_alone_is_told(tmp_path):
    log = added([solved("a"), faulted("b"), solved("c"), solved("d")], folder=tmp_path, sampled=2, groups=list("xxyy"))
    assert log.take_metrics()["agent/excluded/lone"] == 0.25
    kept = list(read_jsonl(tmp_path / "step_1.jsonl"))
    assert [t.excluded for t in kept] == [Excluded.SINGLETON, Excluded.FAULT, None, None]
    assert kept[0].reward == 1.0


def test_a_step_that_samples_twice_keeps_both(tmp_path):
    log = RolloutLog(tmp_path, 0.5)
    (tmp_path / "step_3.jsonl").write_text("of an earlier start\n")
    for name in "ab":
        log.add([solved(name)], [0.0], 3, validation=False)
    assert [t.trajectory_id for t in read_jsonl(tmp_path / "step_3.jsonl")] == ["a", "b"]
    assert log.take_metrics()["agent/tool/submit/calls"] == 2
    assert log.take_metrics() == {}


class _Quiet:
    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def older_trainer(log: RolloutLog) -> AgentRayPPOTrainer:
    trainer = AgentRayPPOTrainer.__new__(AgentRayPPOTrainer)
    trainer._rollouts, trainer._progress = log, _Quiet()
    trainer.global_steps = trainer.total_training_steps = 1
    trainer.config = OmegaConf.create({"algorithm": {"adv_estimator": "remax"}})
    return trainer


def column(values: list) -> np.ndarray:
    made = np.empty(len(values), dtype=object)
    made[:] = values
    return made


def test_greedy_baselines_are_no_trajectories_of_the_training(tmp_path):
    """ReMax: two samples and a greedy answer for each of two prompts; the second greedy answer faulted."""
    log, n = RolloutLog(tmp_path, 0.5), 6
    trajectories = [solved(str(i)) for i in range(n - 1)] + [faulted("5")]
    scores = torch.zeros(n, 3)
    scores[:5, 2] = 1.0
    output = DataProto.from_dict(
        tensors={"response_mask": torch.ones(n, 3, dtype=torch.int64), "rm_scores": scores},
        non_tensors={
            "trajectory": column(trajectories),
            LOOP_FAULT: column([False] * 5 + [True]),
            "action_mask": column([[0, 0, 0]] * n),
            "turn_ids": column([[1, 1, 1]] * n),
        },
    )
    prompts = DataProto.from_dict(
        tensors={"x": torch.zeros(n, 1)},
        non_tensors={"uid": column(list("aabbab")), "__do_sample__": np.array([True] * 4 + [False] * 2)},
        meta_info={"global_steps": 1},
    )
    older_trainer(log)._on_rollout(prompts, output)
    assert [t.excluded for t in read_jsonl(tmp_path / "step_1.jsonl")] == [
        None,
        None,
        Excluded.SINGLETON,
        Excluded.SINGLETON,
    ]
    assert [t.trajectory_id for t in read_jsonl(tmp_path / "baseline_1.jsonl")] == ["4", "5"]
    metrics = log.take_metrics()
    assert (metrics["agent/faulted"], metrics["agent/excluded/lone"]) == (0.0, 0.5)
    assert output.batch["rm_scores"].sum(-1).isnan().tolist() == [False] * 5 + [True]


class _Controller:
    value = 0.1

    def update(self, current_kl: float, n_steps: int) -> None:
        self.seen = (current_kl, n_steps)


def test_kl_in_reward_is_of_rows_in_the_loss():
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty

    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    tensors = {
        "response_mask": mask,
        "token_level_scores": torch.ones(3, 2),
        "old_log_probs": torch.full((3, 2), -1.0),
        "ref_log_prob": torch.full((3, 2), -1.5),
    }
    controller, penalise = _Controller(), penalise_rows_in_loss(apply_kl_penalty)
    data, metrics = penalise(DataProto.from_dict(tensors=tensors), kl_ctrl=controller, kl_penalty="kl")
    assert controller.seen == (pytest.approx(0.5), 2)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    assert data.batch["token_level_rewards"].tolist() == [
        pytest.approx([0.95, 0.95]),
        pytest.approx([0.95, 1.0]),
        [1.0, 1.0],
    ]
    data, _ = penalise(DataProto.from_dict(tensors={**tensors, "response_mask": mask * 0}), kl_ctrl=controller)
    assert torch.equal(data.batch["token_level_rewards"], torch.ones(3, 2))


@pytest.mark.parametrize(("invalid", "mean"), [([0, 0, 1], 0.5), ([1, 1, 1], None), ([0, 0, 0], 0.0)])
def test_scores_of_invalid_rows_are_in_no_mean(invalid, mean):
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    ones = torch.ones(3, 2)
    scores = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, -1.0]])
    tensors = {
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "advantages": ones,
        "returns": ones,
        "values": ones,
        "prompts": ones,
        "responses": ones,
        "attention_mask": torch.ones(3, 4),
        "response_mask": torch.ones(3, 2) * (1 - torch.tensor(invalid).unsqueeze(1)),
    }
    batch = DataProto.from_dict(tensors=tensors, non_tensors={LOOP_FAULT: column(invalid)})
    metrics = summarise_valid_rows(compute_data_metrics)(batch=batch, use_critic=True)
    assert metrics.get("critic/score/mean") == mean
    assert not [name for name, value in metrics.items() if value != value]


@pytest.mark.parametrize(
    ("values", "filtered"),
    [
        ([1, 1, 1, 1], True),
        ([1, 1, 1, None], True),
        ([0, 0, None], True),
        ([1, None, None, None], True),
        ([1, 0, None], False),
        ([None, None], False),
        ([1], False),
    ],
)
@pytest.mark.parametrize("metric", ["acc", "reward"])
def test_groups_are_filtered_by_the_rows_that_count(values, filtered, metric, monkeypatch):
    """None is a fault, of which verl-tool's loop tells NaN. The reward is the row's, not a column of that name. Every
    second record is of another loop."""
    store = StoredRows()
    monkeypatch.setattr("verl_tool.trainer.ppo.replay.tq", store)
    rows = {
        f"u_{i}_0": {
            "extra_fields": {
                "trajectory": (faulted() if value is None else solved()).to_json(),
                LOOP_FAULT: value is None,
                "reward_extra_info": {"acc": float("nan") if value is None else float(value), "reward": float(i)},
            },
            "rm_scores": torch.tensor([0.0, value or 0.0]),
        }
        for i, value in enumerate(values)
    }
    store.put(rows)
    buffer = ValidGroupFilter(
        trainer_mode="sync",
        trainer_config={},  # type: ignore[arg-type]
        max_off_policy_threshold=1,
        max_off_policy_strategy="drop",
        sampler_kwargs={},  # type: ignore[arg-type]
        refill_fn=lambda n: None,
        filter_groups_metric=metric,
    )
    buffer.partitions["train"] = {key: {} for key in rows}
    buffer.finished_keys["train"] = {"u"}
    for _ in range(2):
        assert buffer._dapo_filtered_keys("train")[0] == ({"u"} if filtered else set())
    assert len(buffer.take_filtered()) == (len(values) if filtered else 0)
    assert buffer._dapo_filtered_keys("val")[0] == set()
