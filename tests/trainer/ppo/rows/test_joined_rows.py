"""Advantages, penalties and corrections do not depend on how rollouts are cut into rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from cut_rollouts import Rows, cut, make_rollouts  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from verl.trainer.ppo.core_algos import (  # noqa: E402
    ADV_ESTIMATOR_REGISTRY,
    AdaptiveKLController,
    agg_loss,
)
from verl.trainer.ppo.metric_utils import compute_data_metrics  # noqa: E402
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch  # noqa: E402
from verl.trainer.ppo.v1 import utils as verl_utils  # noqa: E402

from verl_tool.trainer.ppo.advantage import without_invalid  # noqa: E402
from verl_tool.trainer.ppo.rows.joined_rows import JoinedRows, aggregate_on_rollouts, joining, on_rollouts  # noqa: E402
from verl_tool.trainer.ppo.rows.rollout_index import RolloutIndex  # noqa: E402
from verl_tool.trainer.ppo.turns.mt_grpo import MT_GRPO  # noqa: E402

TOLERANCE = 2e-6
CONFIG = OmegaConf.create(
    {
        "gamma": 0.9,
        "lam": 0.95,
        "use_pf_ppo": False,
        "gdpo_reward_keys": ["acc", "form"],
        "norm_adv_by_std_in_grpo": True,
        "f_norm": 1.0,
        "mt_grpo": {"turn_weight": 1.0, "outcome_weight": 1.0},
    }
)
ESTIMATORS = sorted(ADV_ESTIMATOR_REGISTRY)


@pytest.fixture(autouse=True, scope="module")
def _an_estimator_of_a_users_own() -> Iterator[None]:
    """One that a cut would change: it tells the place of each token in its rollout."""

    def count_tokens(response_mask: Any, **_: Any) -> Any:
        return (place := response_mask.cumsum(1).float()), place

    ADV_ESTIMATOR_REGISTRY["counts_tokens"] = count_tokens
    yield
    del ADV_ESTIMATOR_REGISTRY["counts_tokens"]


def advantages(rows: Rows, estimator: str, monkeypatch: Any) -> dict[tuple[str, int], float]:
    data = copy.deepcopy(rows.data)
    if estimator != "remax":
        data.batch.pop("reward_baselines")

    def compute_with_prompts(data: Any, *args: Any, **kwargs: Any) -> Any:
        """GDPO takes the length of the response from these; the newer trainer's batch has none."""
        data.batch["prompts"] = torch.ones(len(data), 1)
        data.batch["attention_mask"] = torch.ones(len(data), 1 + data.batch["response_mask"].shape[1], dtype=torch.long)
        return compute_advantage(data, *args, **kwargs)

    monkeypatch.setattr(verl_utils, "compute_advantage", without_invalid(compute_with_prompts))
    compute = on_rollouts(verl_utils.compute_advantage_for_multi_trajectories)
    with joining(RolloutIndex.of(rows.keys), rows.lengths):
        done = compute(
            data,
            batch_keys=rows.keys,
            adv_estimator=estimator,
            gamma=0.9,
            lam=0.95,
            num_repeat=4,
            config=CONFIG,
        )
    return Rows(done, rows.keys, rows.lengths, rows.starts).by_token("advantages")


@pytest.mark.parametrize("estimator", [*ESTIMATORS, "counts_tokens"])
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10_000), max_rows=st.integers(2, 9))
def test_a_cut_changes_no_advantage(estimator, seed, max_rows):
    rollouts = make_rollouts(seed)
    with pytest.MonkeyPatch.context() as patch:
        uncut = advantages(cut(rollouts, 1, seed), estimator, patch)
        found = advantages(cut(rollouts, max_rows, seed), estimator, patch)
    assert found.keys() == uncut.keys()
    largest = max(map(abs, uncut.values()))
    assert largest > 0 or estimator == "grpo_passk"  # the best and the second best of each prompt may be equal
    tolerance = 1e-3 if "token_baseline" in estimator else TOLERANCE  # these divide by what may be close to 0
    assert max(abs(found[token] - uncut[token]) for token in uncut) <= tolerance * max(largest, 1.0)


def test_all_of_verls_estimators_and_ours_are_among_them():
    assert {"gae", "grpo", "rloo", "remax", "gdpo", "optimal_token_baseline", MT_GRPO} <= set(ESTIMATORS)


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_rollouts_that_are_cut_finely_change_nothing_for_others(seed):
    """Half of the rollouts are cut; the others' advantages are as they were."""
    rollouts = make_rollouts(seed)
    with pytest.MonkeyPatch.context() as patch:
        uncut = advantages(cut(rollouts, 1, seed), "rloo", patch)
        halves = [cut(rollouts[::2], 9, seed), cut(rollouts[1::2], 1, seed)]
        found = advantages(concatenated(halves), "rloo", patch)
    assert max(abs(found[token] - uncut[token]) for token in uncut) < TOLERANCE


def concatenated(parts: list[Rows]) -> Rows:
    width = max(part.data.batch["response_mask"].shape[1] for part in parts)
    columns = {}
    for name in parts[0].data.batch.keys():  # noqa: SIM118 - iterating a TensorDict gives rows
        padded = []
        for part in parts:
            column = part.data.batch[name]
            if column.dim() > 1:
                column = torch.cat(
                    [column, column.new_zeros(len(column), width - column.shape[1], *column.shape[2:])], 1
                )
            padded.append(column)
        columns[name] = torch.cat(padded)
    others = {
        name: np.concatenate([part.data.non_tensor_batch[name] for part in parts])
        for name in parts[0].data.non_tensor_batch
    }
    data = type(parts[0].data).from_dict(columns, others)
    places = ([value for part in parts for value in getattr(part, name)] for name in ("keys", "lengths", "starts"))
    return Rows(data, *places)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), max_rows=st.integers(2, 9))
def test_a_cut_changes_no_penalty_and_no_controller(seed, max_rows):
    rollouts = make_rollouts(seed)
    results = []
    for rows in (cut(rollouts, 1, seed), cut(rollouts, max_rows, seed)):
        controller = AdaptiveKLController(0.1, 0.5, 100)
        with joining(RolloutIndex.of(rows.keys), rows.lengths):
            done, metrics = on_rollouts(apply_kl_penalty)(rows.data, kl_ctrl=controller, kl_penalty="kl")
        rewards = Rows(done, rows.keys, rows.lengths, rows.starts).by_token("token_level_rewards")
        results.append((rewards, metrics, controller.value))
    (uncut, uncut_metrics, uncut_value), (found, metrics, value) = results
    assert found == pytest.approx(uncut, abs=1e-5)
    assert metrics == pytest.approx(uncut_metrics, rel=1e-4, abs=1e-7)
    assert value == pytest.approx(uncut_value, rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rejection", ["token_k1", "seq_mean_k3"])
def test_a_cut_changes_no_correction_for_the_engines_probabilities(level, rejection):
    rollouts = make_rollouts(3)
    options = OmegaConf.create(
        {
            "rollout_is": level,
            "rollout_is_threshold": 2.0,
            "rollout_rs": rejection,
            "rollout_rs_threshold": "0.5_2.0" if rejection == "token_k1" else "0.05",
            "rollout_is_batch_normalize": True,
        }
    )
    results = []
    for rows in (cut(rollouts, 1, 3), cut(rollouts, 5, 3)):
        kept = Rows(copy.deepcopy(rows.data), rows.keys, rows.lengths, rows.starts)
        with joining(RolloutIndex.of(rows.keys), rows.lengths):
            done, _ = on_rollouts(compute_rollout_correction_and_add_to_batch)(rows.data, options)
        for name in ("rollout_is_weights", "response_mask"):
            kept.data.batch[f"{name}_after"] = done.batch[name]
        results.append([kept.by_token(f"{name}_after") for name in ("rollout_is_weights", "response_mask")])
    for uncut, found in zip(*results, strict=True):
        assert found == pytest.approx(uncut, rel=1e-4, abs=1e-6)
    assert set(results[0][1].values()) == {0.0, 1.0}


def test_a_cut_changes_no_metric_of_rewards_and_lengths():
    rollouts = make_rollouts(5)
    results = []
    for rows in (cut(rollouts, 1, 5), cut(rollouts, 6, 5)):
        data = rows.data
        data.batch["advantages"] = data.batch["returns"] = data.batch["values"]
        data.batch["prompts"] = torch.ones(len(rows.keys), data.batch["response_mask"].shape[1], dtype=torch.long)
        data.batch["responses"] = data.batch["tokens"]
        data.batch["prompt_length"] = torch.ones(len(rows.keys))
        data.batch["response_length"] = torch.tensor(rows.lengths).float()
        data.batch["attention_mask"] = torch.ones(len(rows.keys), 2, dtype=torch.long)
        with joining(RolloutIndex.of(rows.keys), rows.lengths):
            results.append(on_rollouts(compute_data_metrics)(batch=data, use_critic=True))
    uncut, found = ({k: v for k, v in each.items() if "prompt_length" not in k} for each in results)
    assert found == pytest.approx(uncut, rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_cut_changes_no_aggregated_metric(mode):
    rollouts = make_rollouts(7)
    results = []
    for rows in (cut(rollouts, 1, 7), cut(rollouts, 6, 7)):
        with joining(RolloutIndex.of(rows.keys), rows.lengths):
            columns = rows.data.batch["values"], rows.data.batch["response_mask"]
            results.append(aggregate_on_rollouts(agg_loss)(*columns, loss_agg_mode=mode).item())
    assert results[1] == pytest.approx(results[0], rel=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), max_rows=st.integers(1, 9))
def test_what_is_joined_and_split_is_as_it_was(seed, max_rows):
    rows = cut(make_rollouts(seed, prompts=2), max_rows, seed)
    joined = JoinedRows(RolloutIndex.of(rows.keys), rows.lengths)
    column = rows.data.batch["values"]
    assert torch.equal(joined.split(joined.join(column), column.shape[1]), column)


def test_a_reward_behind_the_last_token_of_the_model_reaches_the_row_before(monkeypatch):
    """The final row has no token in the loss. verl's own GRPO gives the whole rollout advantage 0 then."""
    rows = cut(make_rollouts(1, prompts=2), 5, 1)
    index = RolloutIndex.of(rows.keys)
    uncut = advantages(rows, "grpo", monkeypatch)
    signal = {rollout for (rollout, _), value in uncut.items() if value}
    victim = next(r for r in index.rollouts if len(r) > 1 and rows.keys[r[0]].rsplit("_", 1)[0] in signal)
    rows.data.batch["response_mask"][victim[-1]] = 0
    found = advantages(rows, "grpo", monkeypatch)
    name = rows.keys[victim[0]].rsplit("_", 1)[0]
    assert {value for (rollout, _), value in found.items() if rollout == name} != {0.0}
