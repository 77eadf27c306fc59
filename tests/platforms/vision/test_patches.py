"""What the patches for models with images rely on in verl and vLLM, told by a digest of its source.

A failure here means: the code of another package has changed. Read what changed, see whether the patch is still needed
and still right, and write down the new digest.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("torch")

from verl_tool.platforms.vision.patches import PATCHES

AGENT_LOOP = "verl.experimental.agent_loop.agent_loop:AgentLoopWorker"
ENGINE = "verl.workers.engine.fsdp.transformer_impl:FSDPEngine"
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer"
RELIED_ON = {
    # packed_images: who makes the model's inputs, what is read of them before the trainer, and who uses them.
    f"{AGENT_LOOP}._compute_multi_modal_inputs": "9cdb25215a3b78db",
    f"{AGENT_LOOP}._compute_position_ids": "b8fb375b0b2c5cec",
    "verl.utils.model:extract_multi_modal_inputs": "2c29f286747d8c90",
    # row_images
    "verl.utils.dataset.rl_dataset:RLHFDataset._build_messages": "56d13500ebd084de",
    # sent_images
    f"{SERVER}.generate": "7bcfbc45fef4ec34",
    "verl.workers.rollout.utils:qwen2_5_vl_dedup_image_tokens": "2e117e8a2b9e3b02",
    # placeholder_ban: which tokens vLLM does not sample, and how.
    "verl.workers.rollout.utils:get_vision_placeholder_token_ids": "a6b6784da0d29c40",
    "verl.workers.rollout.vllm_rollout.utils:monkey_patch_compute_logits": "ad1dbb8fc3a01b09",
    f"{ENGINE}._build_module": "d8c47c162dc90795",
    # equal_lengths
    "verl.workers.utils.padding:left_right_2_no_padding": "9f010fa85e675a7e",
    "verl.utils.tensordict_utils:maybe_fix_3d_position_ids": "7e4d7c28b3502223",
    # batch_of_text
    "verl.models.transformers.qwen2_vl:_get_input_embeds": "9c26194f2dc3cddc",
    # dummy_weights
    "vllm.model_executor.models.vision:FusedInputNorm": "ed294cc695210c61",
    "vllm.model_executor.model_loader.weight_utils:initialize_dummy_weights": "51b903fc63aeddd5",
}
OTHERWISE: dict[str, dict[str, str]] = {
    "0.9.1": {
        f"{AGENT_LOOP}._compute_multi_modal_inputs": "57ce6f0ea395e99c",
        f"{SERVER}.generate": "ea45828267c4470e",
        "verl.workers.rollout.vllm_rollout.utils:monkey_patch_compute_logits": "6cac132514455f24",
        "verl.workers.utils.padding:left_right_2_no_padding": "63d71cac822f21fa",
    }
}
"""Digests of another verl that is supported."""


def source(where: str) -> str:
    """The text of a function or class, whatever stands in its place by now."""
    module, _, name = where.partition(":")
    top, *parts = module.split(".")
    spec = find_spec(top)
    assert spec is not None
    folder = Path(next(iter(spec.submodule_search_locations or ())))
    text = folder.joinpath(*parts).with_suffix(".py").read_text()
    body: ast.AST = ast.parse(text)
    for each in name.split("."):
        body = next(node for node in ast.iter_child_nodes(body) if getattr(node, "name", None) == each)
    return ast.get_source_segment(text, body) or ""


@pytest.mark.parametrize("where", RELIED_ON)
def test_source_is_what_the_patch_was_written_for(where: str) -> None:
    if find_spec(where.partition(".")[0]) is None:
        pytest.skip("vLLM is not installed")
    known = OTHERWISE.get(version("verl"), {}).get(where, RELIED_ON[where])
    assert hashlib.sha256(source(where).encode()).hexdigest()[:16] == known


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.attribute)
def test_patch_is_in_force(patch) -> None:
    if "vllm" in patch.module:
        pytest.importorskip("vllm")
    found = vars(importlib.import_module(patch.module))[patch.attribute]
    changed = [found, *vars(found).values()] if isinstance(found, type) else [found]
    assert any(getattr(each, "__module__", "").startswith("verl_tool.platforms.vision") for each in changed)
