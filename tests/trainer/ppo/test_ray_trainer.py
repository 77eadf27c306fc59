"""What the trainer adds to verl's rollouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from verl import DataProto  # noqa: E402
from verl_tool.agent_loop.row import VALIDATION  # noqa: E402
from verl_tool.trainer.ppo.ray_trainer import _WatchedRollouts  # noqa: E402


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
