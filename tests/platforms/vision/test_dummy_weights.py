from __future__ import annotations

import pytest

pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from verl_tool.platforms.vision.dummy_weights import constant  # noqa: E402


def test_random_weights_leave_the_constants():
    from vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights
    from vllm.model_executor.models.vision import FusedInputNorm

    norm = constant(FusedInputNorm)(image_mean=[0.5] * 3, image_std=[0.25] * 3, rescale_factor=1 / 255)
    before = {name: values.clone() for name, values in norm.named_buffers()}
    assert set(before) == {"weight", "bias"}
    initialize_dummy_weights(torch.nn.Sequential(norm), None)
    assert all(torch.equal(values, before[name]) for name, values in norm.named_buffers())
    assert norm.state_dict() == {}
