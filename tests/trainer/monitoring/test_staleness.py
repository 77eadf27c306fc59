"""Age of rows and their agreement with the trainer; and the importance weights that verl computes of them."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask  # noqa: E402

from verl_tool.trainer.monitoring.metric_limits import FRESH_DIFF  # noqa: E402
from verl_tool.trainer.monitoring.staleness import fresh_rows, probability_difference, versions_of  # noqa: E402

VERSIONS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)).map(sorted), max_size=8)


@given(VERSIONS, st.integers(0, 3))
def test_fresh_is_what_the_trained_weights_alone_sampled(versions, trained):
    tags = [{"min_global_steps": oldest, "max_global_steps": newest} for oldest, newest in versions]
    assert [versions_of(tag) for tag in tags] == [tuple(each) for each in versions]
    fresh = fresh_rows(tags, trained)
    assert [row for row, each in enumerate(versions) if set(each) == {trained}] == fresh
    assert fresh_rows([tag | {"is_padding": True} for tag in tags], trained) == []


def test_the_difference_is_that_of_the_tokens_in_the_loss():
    ours, engine = torch.tensor([0.5, 0.25, 0.1]).log(), torch.tensor([0.5, 0.5, 0.9]).log()
    told = probability_difference([ours, ours], [ours, engine], [torch.ones(3), torch.tensor([1, 1, 0])])
    assert told == {f"{FRESH_DIFF}_mean": pytest.approx(0.05), f"{FRESH_DIFF}_max": pytest.approx(0.25)}
    assert probability_difference([ours], [engine], [torch.zeros(3)]) == {}
    assert probability_difference([], [], []) == {}


def test_verl_s_weights_are_those_of_the_equation():
    """min(pi_trained / pi_sampled, 2) of each token; what the console and the docs name tells of them."""
    ratios = torch.tensor([[0.5, 1.0, 3.0], [1.0, 9.0, 1.0]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 1]])
    sampled = torch.full_like(ratios, math.log(0.1))
    told, kept, metrics = compute_rollout_correction_and_rejection_mask(
        sampled + ratios.log(), sampled, mask, rollout_is="token", rollout_is_threshold=2.0
    )
    weights = told.batch["rollout_is_weights"]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 1.0, 2.0], [1.0, 0.0, 1.0]]))
    assert torch.equal(kept, mask)
    used = weights[mask.bool()]
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(1.1)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(2.0)
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 5)
    effective = (used.sum() ** 2 / (len(used) * (used**2).sum())).item()
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(effective, rel=1e-4)
