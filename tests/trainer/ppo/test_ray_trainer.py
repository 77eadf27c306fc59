"""What the trainer adds to verl's rollouts."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from omegaconf import OmegaConf  # noqa: E402
from verl.trainer.ppo.ray_trainer import RayPPOTrainer  # noqa: E402
from verl_loop import composed  # noqa: E402

from verl import DataProto  # noqa: E402
from verl_tool.agent_loop.row import VALIDATION  # noqa: E402
from verl_tool.trainer.monitoring.token_records import mean_advantages, tokens_of  # noqa: E402
from verl_tool.trainer.ppo.ray_trainer import RECORD_LINE, AgentRayPPOTrainer, _WatchedRollouts  # noqa: E402
from verl_tool.trainer.ppo.rollout_log import TOKENS_TIMER, RolloutLog  # noqa: E402


class Manager:
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        return prompts


@pytest.mark.parametrize("validates", [True, False])
def test_the_loop_is_told_that_a_row_is_of_a_validation(validates: bool) -> None:
    seen: list[Any] = []
    prompts = DataProto.from_dict({"x": torch.zeros(3, 1)}, {"uid": np.array(["a", "b", "c"], dtype=object)})
    prompts.meta_info["validate"] = validates
    rollouts = _WatchedRollouts(Manager(), seen.append, lambda _, output: seen.append(output))
    output = rollouts.generate_sequences(prompts)
    assert seen == [prompts, output]
    assert output.non_tensor_batch.get(VALIDATION, np.array([])).tolist() == ([True] * 3 if validates else [])


@pytest.mark.parametrize(("resumed_at", "trained"), [(2, False), (3, False), (1, True)])
def test_a_finished_run_that_is_started_again_trains_no_further_step(
    monkeypatch: pytest.MonkeyPatch, resumed_at: int, trained: bool
) -> None:
    class TrainedError(Exception):
        pass

    class Rows:
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Any:
            raise TrainedError

    def load(trainer: RayPPOTrainer) -> None:
        trainer.global_steps = resumed_at

    monkeypatch.setattr(RayPPOTrainer, "_load_checkpoint", load)
    trainer = AgentRayPPOTrainer.__new__(AgentRayPPOTrainer)
    trainer.config = composed("trainer.val_before_train=false", "trainer.total_epochs=5", "trainer.logger=[]")
    trainer.total_training_steps, trainer.train_dataloader = 2, Rows()
    trainer.checkpoint_manager = SimpleNamespace(update_weights=lambda _step: None)
    trainer._init_dump_executor()
    with pytest.raises(TrainedError) if trained else contextlib.nullcontext():
        trainer.fit()
    trainer._shutdown_dump_executor()


def test_what_is_known_of_tokens_stands_beside_their_records(tmp_path) -> None:
    """By the line of the record, in whatever order the batch is trained on; greedy baselines have none."""
    trainer = AgentRayPPOTrainer.__new__(AgentRayPPOTrainer)
    trainer.config = OmegaConf.create({"algorithm": {"rollout_correction": None}})
    trainer._rollouts = RolloutLog(tmp_path, 1.0, tokens_every=2)
    trainer.global_steps = 2
    batch = DataProto.from_dict(
        {
            "responses": torch.zeros(3, 4),
            "attention_mask": torch.tensor([[0, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]]),
            "response_mask": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 1, 0]]),
            "advantages": torch.tensor([[0.5] * 4, [-0.5] * 4, [9.0] * 4]),
            "old_log_probs": torch.arange(12.0).reshape(3, 4),
        },
        {RECORD_LINE: np.array([1, 0, -1], dtype=object)},
    )
    assert set(trainer._store_tokens(batch)) == {TOKENS_TIMER}
    first, second = (tokens_of(tmp_path / "step_2.jsonl", line) for line in (0, 1))
    assert first["log_probs"].tolist() == [4.0, 5.0, 6.0, 7.0]
    assert first["mask"].tolist() == [1, 0, 1, 1]
    assert second["advantages"].tolist() == [0.5, 0.5]
    assert mean_advantages(tmp_path / "step_2.jsonl", 2).tolist() == [-0.5, 0.5]
    trainer.global_steps = 3
    assert trainer._store_tokens(batch) == {}
    assert [path.name for path in tmp_path.iterdir()] == ["step_2.tokens.npz"]
