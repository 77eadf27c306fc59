"""The trainings of the smoke test: what their metrics must show, the GPU form's config, and all of them for real."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("vllm")
torch = pytest.importorskip("torch")

from verl_tool.doctor.gpu_smoke import tiny_models, training_parts  # noqa: E402
from verl_tool.doctor.gpu_smoke.part import PARTS, PartContext, PartFailed, PartSkipped  # noqa: E402
from verl_tool.doctor.gpu_smoke.part_process import run_part  # noqa: E402
from verl_tool.doctor.gpu_smoke.tiny_models import ROOT  # noqa: E402

GOOD = {"actor/grad_norm": 0.5, "agent/faulted": 0.0, "training/rollout_probs_diff_mean": 1e-6, "timing_s/step": 2.0}


def test_figures_of_good_steps():
    figures = training_parts.step_figures({1: GOOD, 2: GOOD}, (1, 2))
    assert figures == {"step_seconds": 2.0, "probability_difference_mean": 1e-6, "grad_norm": 0.5}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"actor/grad_norm": 0.0}, "the gradient is 0"),
        ({"actor/grad_norm": float("nan")}, "actor/grad_norm is nan"),
        ({"agent/faulted": 0.25}, "25% of the trajectories"),
    ],
)
def test_a_step_that_is_not_as_it_should_fails_the_part(change: dict[str, Any], cause: str):
    with pytest.raises(PartFailed, match=cause):
        training_parts.step_figures({1: GOOD, 2: GOOD | change}, (1, 2))


def test_a_step_that_is_missing_fails_the_part():
    with pytest.raises(PartFailed, match="step 2 is not among"):
        training_parts.step_figures({1: GOOD}, (1, 2))


@pytest.mark.parametrize(("device", "profile"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_the_options_are_those_of_the_recipes_own_variables(tmp_path, device, profile):
    """`DRY_RUN=command` of the recipe's script: every variable that is set is one that it knows."""
    context = PartContext(device, tmp_path)
    environment = training_parts._environment(context, tmp_path / "run") | {"DRY_RUN": "command"}
    overrides = training_parts._overrides(context)
    script = ROOT / "examples" / "train" / "calculator" / "train.sh"
    printed = subprocess.run(
        ["bash", str(script), *overrides], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert printed[printed.index("--config-name") + 1] == profile
    assert "trainer.n_gpus_per_node=1" in printed
    assert f"tool_server.start={training_parts._HERE / 'count_tool.py'}" in printed
    assert set(overrides) <= set(printed)
    without_flash_attention = "++critic.model.use_remove_padding=false" in printed
    assert without_flash_attention == (device == "cuda" and not training_parts.find_spec("flash_attn"))


@pytest.mark.parametrize("check", [training_parts.check_fp8, training_parts.check_ulysses, training_parts.check_fsdp2])
def test_what_needs_a_gpu_says_so_on_a_cpu(tmp_path, check):
    with pytest.raises(PartSkipped):
        check(PartContext("cpu", tmp_path))


def test_a_training_reports_an_engine_that_takes_no_weights_before_the_deadline(tmp_path):
    timeout = f"actor_rollout_ref.weight_sync_timeout={training_parts.WEIGHT_SYNC_SECONDS}"
    assert timeout in training_parts._overrides(PartContext("cuda", tmp_path))
    trainings = [part for part in PARTS if part.function.startswith(training_parts.__name__) and not part.after]
    assert min(part.seconds for part in trainings) > 2 * training_parts.WEIGHT_SYNC_SECONDS


def test_fp8_scales_of_the_model_for_fp8_have_the_shape_that_vllm_expects(tmp_path, monkeypatch):
    """verl's own quantization of each weight, which loses a dimension of a scale if the weight has 128 columns."""
    from verl.utils.vllm import vllm_quant_utils

    block = training_parts.FP8_BLOCK
    monkeypatch.setattr(vllm_quant_utils, "is_fp8_weight", lambda name, model: name.endswith("proj.weight"))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(
        vllm_quant_utils,
        "scaled_fp8_blockwise",
        lambda weight, weight_block_size: (weight, torch.ones([-(-size // block) for size in weight.shape])),
    )

    def scales(hidden: int) -> list[tuple[int, ...]]:
        path = tiny_models.make_text_model(tmp_path, hidden)
        model = tiny_models.load_text_model(path, "cpu")
        config = SimpleNamespace(weight_block_size=[block, block])
        found = vllm_quant_utils.quant_weights(model.named_parameters(), model, config)
        return [tuple(value.shape) for name, value in found if name.endswith("_scale_inv")]

    assert {len(shape) for shape in scales(training_parts.FP8_HIDDEN)} == {2}
    assert 1 in {len(shape) for shape in scales(tiny_models.HIDDEN)}


@pytest.mark.parametrize(
    ("stderr", "log", "words"),
    [
        ("error: no GPU\nSee refleaks.html\n", "ValueError: of a worker\n", "error: no GPU"),
        ("See refleaks.html\n", "ValueError: of a worker\nends\n", "ValueError: of a worker"),
        ("killed\n", None, "killed"),
        ("", "", "it printed nothing"),
    ],
)
def test_the_reason_of_a_failed_training_is_its_own(tmp_path, stderr, log, words):
    (tmp_path / "stderr").write_text(stderr)
    if log is not None:
        (tmp_path / "log").write_text(log)
    assert training_parts.last_words(tmp_path / "stderr", tmp_path / "log") == words


@pytest.mark.e2e
@pytest.mark.timeout(7200)
@pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="for machines without accelerator")
def test_all_parts_on_this_cpu(tmp_path):
    """Engine and trainings for real, in the order of the table, with the parts' own deadlines."""
    context = PartContext("cpu", tmp_path)
    for part in PARTS:
        result = run_part(part, context, 1500)
        skipped = part.name in ("sleep", "fsdp2", "fp8", "ulysses")
        assert result.status == ("skipped" if skipped else "passed"), (part.name, result.reason)
