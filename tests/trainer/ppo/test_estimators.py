"""Every estimator that verl registers, on both trainers: rows that are left out change nothing for the others."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402
from stored_rows import StoredRows  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, FixedKLController  # noqa: E402
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage  # noqa: E402
from verl.trainer.ppo.v1.trainer_base import PPOTrainer  # noqa: E402
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories  # noqa: E402
from verl_loop import composed  # noqa: E402

from verl import DataProto  # noqa: E402
from verl_tool.agent_loop.trajectory import LOOP_FAULT, REWARD_FAULT  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.trainer.ppo import v1_trainer  # noqa: E402
from verl_tool.trainer.ppo.advantage import compares_within_groups, on_model_tokens, without_invalid  # noqa: E402
from verl_tool.trainer.ppo.estimators import ONLY_V0, check_algorithm  # noqa: E402
from verl_tool.trainer.ppo.turns.turn_columns import by_turns, takes_turns, with_turns  # noqa: E402
from verl_tool.trainer.ppo.valid_rows import penalise_rows_in_loss  # noqa: E402

pytestmark = pytest.mark.slow

LENGTH, GROUP, KL_WEIGHT = 6, 3, 0.1
ESTIMATORS = sorted(ADV_ESTIMATOR_REGISTRY)
REPLACED = without_invalid(compute_advantage)
GRPO, GAE = "grpo", "gae"
SUBAGENTS = "actor_rollout_ref.agent.subagents=true"


@dataclass(frozen=True)
class Row:
    """One trajectory."""

    group: int
    reward: float
    mask: tuple[int, ...]
    """1 on tokens of the model's; its length is the response's."""
    out: str = ""
    """"loop" or "grader", if a failure of that infrastructure invalidated it."""
    seed: int = 0

    @property
    def turn_ids(self) -> list[int]:
        """A turn is a run of the model's tokens."""
        begins = [own > before for own, before in zip(self.mask, (0, *self.mask), strict=False)]
        return [own * sum(begins[: i + 1]) for i, own in enumerate(self.mask)]

    @property
    def turn_rewards(self) -> str:
        """One for each turn, in JSON; none where grading failed."""
        turns = 0 if self.out else max(self.turn_ids, default=0)
        return json.dumps([(self.seed * 7 + 3 * turn) % 5 / 4 for turn in range(turns)])


def algorithm(estimator: str, **more: Any) -> DictConfig:
    """verl's part of the config."""
    keys = {"gdpo_reward_keys": ["acc", "style"]} if estimator == "gdpo" else {}
    return OmegaConf.create(
        {
            "adv_estimator": estimator,
            "gamma": 1.0,
            "lam": 0.95,
            "norm_adv_by_std_in_grpo": True,
            "use_pf_ppo": False,
            "use_kl_in_reward": False,
            "kl_penalty": "kl",
            "rollout_correction": None,
            "mt_grpo": {"discount": 0.9, "turn_weight": 0.5},
            **keys,
            **more,
        }
    )


def numbers(row: Row, name: str) -> torch.Tensor:
    """A column that goes with the row, wherever it stands. [length]"""
    return torch.rand(LENGTH, generator=torch.Generator().manual_seed(hash((row.seed, name)) % 2**31))


def batch_of(rows: list[Row], estimator: str) -> DataProto:
    """As the older trainer has it: padded, the reward on the last token of the response."""
    n = len(rows)
    mask, rewards = torch.zeros(n, LENGTH, dtype=torch.int64), torch.zeros(n, LENGTH)
    attention, turns = torch.zeros(n, LENGTH, dtype=torch.int64), torch.zeros(n, LENGTH, dtype=torch.int64)
    for i, row in enumerate(rows):
        length = len(row.mask)
        attention[i, :length] = 1
        rewards[i, length - 1] = row.reward
        mask[i, :length] = torch.tensor(row.mask) * (not row.out)
        turns[i, :length] = torch.tensor(row.turn_ids)
    tensors = {
        "token_level_rewards": rewards,
        "token_level_scores": rewards.clone(),
        "response_mask": mask,
        "turn_ids": turns,
        "values": torch.stack([numbers(row, "values") for row in rows]),
        "old_log_probs": -torch.stack([numbers(row, "log_probs") for row in rows]),
        "sum_pi_squared": torch.stack([numbers(row, "squares") for row in rows]),
        "prompts": torch.ones(n, 1, dtype=torch.int64),
        "attention_mask": torch.cat([torch.ones(n, 1, dtype=torch.int64), attention], dim=1),
    }
    if "reward_baselines" in inspect.signature(ADV_ESTIMATOR_REGISTRY[estimator]).parameters:
        tensors["reward_baselines"] = torch.tensor([0.25 * (1 + row.group) for row in rows])
    columns = {
        "uid": [f"g{row.group}" for row in rows],
        LOOP_FAULT: [row.out == "loop" for row in rows],
        REWARD_FAULT: ["grader: gone" if row.out == "grader" else "" for row in rows],
        "acc": [float("nan") if row.out else row.reward for row in rows],
        "style": [float("nan") if row.out else float(row.seed % 2) for row in rows],
        "turn_rewards": [row.turn_rewards for row in rows],
    }
    return DataProto(
        batch=TensorDict(tensors, batch_size=n),
        non_tensor_batch={name: np.array(values, dtype=object) for name, values in columns.items()},
    )


def by_v0(rows: list[Row], estimator: str, compute: Any = REPLACED) -> torch.Tensor:
    """Advantages by the older trainer's function. [rows, LENGTH]"""
    data = batch_of(rows, estimator)
    done = compute(data, adv_estimator=estimator, gamma=1.0, lam=0.95, num_repeat=GROUP, config=algorithm(estimator))
    return done.batch["advantages"]


class Newer(v1_trainer.AgentTrainerMixin):
    """The newer trainer's advantages, without anything else of it."""

    on_sample_end = on_step_end = None

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.kl_ctrl_in_reward = FixedKLController(KL_WEIGHT)
        self._lines = {}


Newer.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def by_v1(rows: list[Row], estimator: str, monkeypatch: pytest.MonkeyPatch, **more: Any) -> StoredRows:
    """The rows behind the newer trainer's computation of advantages, by keys ``g{group}_{row}_0``."""
    store, n = StoredRows(), len(rows)
    with monkeypatch.context() as patch:
        for module in ("trainer_base", "utils"):
            patch.setattr(f"verl.trainer.ppo.v1.{module}.tq", store, raising=False)
        patch.setattr("verl_tool.trainer.ppo.v1_trainer.tq", store)
        patch.setattr("verl_tool.trainer.ppo.replay.tq", store)
        patch.setattr("verl_tool.trainer.ppo.turns.turn_columns.tq", store)
        base = "verl.trainer.ppo.v1.trainer_base.compute_advantage_for_multi_trajectories"
        patch.setattr(base, with_turns(compute_advantage_for_multi_trajectories))
        patch.setattr("verl.trainer.ppo.v1.utils.compute_advantage", REPLACED)
        patch.setattr("verl.trainer.ppo.v1.trainer_base.apply_kl_penalty", penalise_rows_in_loss(apply_kl_penalty))
        batch = store.put({f"g{row.group}_{i}_0": stored(row) for i, row in enumerate(rows)})
        config = {"algorithm": algorithm(estimator, **more), "actor_rollout_ref": {"rollout": {"n": GROUP}}}
        after = Newer(OmegaConf.create(config))._compute_advantage(batch, {})
    assert after.keys == batch.keys
    assert len(after.tags) == n
    for name in (*batch.fields, "advantages", "returns"):
        assert name in after.fields
        assert all(name in store.rows[key] for key in batch.keys)
    return store


def stored(row: Row) -> dict[str, Any]:
    length = len(row.mask)
    mask = torch.tensor(row.mask) * (row.out != "loop")
    rewards = torch.zeros(length)
    rewards[-1] = row.reward
    fault = "grader: gone" if row.out == "grader" else ""
    told = {"reward_extra_info": {REWARD_FAULT: fault, "turn_rewards": row.turn_rewards}}
    return {
        "uid": f"g{row.group}",
        "responses": torch.ones(length, dtype=torch.int64),
        "response_mask": mask,
        "loss_mask": mask.clone(),
        "turn_ids": torch.tensor(row.turn_ids),
        "rm_scores": rewards,
        "values": numbers(row, "values")[:length],
        "old_log_probs": -numbers(row, "log_probs")[:length],
        "rollout_log_probs": -numbers(row, "rollout")[:length],
        "ref_log_prob": -numbers(row, "reference")[:length],
        "extra_fields": {LOOP_FAULT: row.out == "loop", **told},
    }


def advantages_in(store: StoredRows, i: int) -> torch.Tensor:
    (row,) = (row for key, row in store.rows.items() if key.split("_")[1] == str(i))
    return row["advantages"]


def on_v1(estimator: str) -> bool:
    """Whether the newer trainer has all that this estimator takes."""
    return not ONLY_V0 & set(inspect.signature(ADV_ESTIMATOR_REGISTRY[estimator]).parameters)


def config_of(estimator: str, *overrides: str) -> DictConfig:
    more = ["+algorithm.gdpo_reward_keys=[acc]"] if estimator == "gdpo" else []
    more += ["actor_rollout_ref.actor.calculate_sum_pi_squared=true", f"actor_rollout_ref.rollout.n={GROUP}"]
    return composed(f"algorithm.adv_estimator={estimator}", *more, *overrides)


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """One to three groups; each row ends on the model's token or on an observation, and may be invalid."""
    made = []
    for group in range(draw(st.integers(1, 3))):
        for _ in range(GROUP):
            mask = draw(st.lists(st.integers(0, 1), min_size=2, max_size=LENGTH))
            mask[0] = mask[1] = 1
            out = draw(st.sampled_from(["", "", "loop", "grader"]))
            reward = draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0]))
            made.append(Row(group, reward, tuple(mask), out, seed=len(made) + 1))
    return made


def left(rows: list[Row], estimator: str) -> list[int]:
    """Rows that should be learnt from."""
    kept = [i for i, row in enumerate(rows) if not row.out]
    if not compares_within_groups(estimator):
        return kept
    return [i for i in kept if sum(rows[j].group == rows[i].group for j in kept) > 1]


def reference(rows: list[Row], estimator: str) -> torch.Tensor:
    """verl's own result for these rows alone, each with its reward on the model's last token."""
    moved = [Row(r.group, r.reward, r.mask[: len(r.mask) - r.mask[::-1].index(1)], "", r.seed) for r in rows]
    return by_v0(moved, estimator, told_of_turns if takes_turns(estimator) else compute_advantage)


def told_of_turns(data: DataProto, adv_estimator: str, config: DictConfig, **_others: Any) -> DataProto:
    return by_turns(data, adv_estimator, config)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=10)
@given(rows=rows())
def test_rows_left_out_change_nothing_for_the_others(estimator, rows):
    found = by_v0(rows, estimator)
    kept = left(rows, estimator)
    if kept:
        assert torch.allclose(found[kept], reference([rows[i] for i in kept], estimator), atol=1e-5)
    out = [i for i in range(len(rows)) if i not in kept]
    assert not found[out].any()
    assert found.isfinite().all()


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if on_v1(name)])
@settings(max_examples=8)
@given(rows=rows())
def test_both_trainers_agree(estimator, rows):
    with pytest.MonkeyPatch.context() as patch:
        store = by_v1(rows, estimator, patch)
    expected, kept = by_v0(rows, estimator), left(rows, estimator)
    for i, row in enumerate(rows):
        found = advantages_in(store, i)
        assert torch.allclose(found, expected[i, : len(row.mask)], atol=1e-5)
        (stored_row,) = (r for key, r in store.rows.items() if key.split("_")[1] == str(i))
        assert bool(stored_row["loss_mask"].any()) == bool(stored_row["response_mask"].any()) == (i in kept)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_reward_is_seen_whatever_the_last_token(estimator):
    """Two answers, one right and one wrong, both cut behind an observation."""
    cut = [Row(0, reward, (1, 1, 0, 1, 0, 0), seed=1) for reward in (1.0, 0.5, 0.0)]
    whole = [Row(0, reward, (1, 1, 0, 1), seed=1) for reward in (1.0, 0.5, 0.0)]
    assert torch.allclose(by_v0(cut, estimator), by_v0(whole, estimator), atol=1e-5)
    assert (by_v0(cut, estimator)[0] - by_v0(cut, estimator)[2]).abs().max() > 0.1


@settings(max_examples=50)
@given(data=st.data())
def test_no_reward_is_lost_on_the_way_to_a_model_token(data):
    mask = torch.tensor([data.draw(st.lists(st.integers(0, 1), min_size=5, max_size=5)) for _ in range(2)])
    rewards = torch.tensor([[float(data.draw(st.integers(-2, 2))) for _ in range(5)] for _ in range(2)])
    moved = on_model_tokens(rewards, mask)
    assert torch.equal(moved.sum(1), rewards.sum(1))
    for i in range(2):
        if mask[i].any():
            assert not moved[i][mask[i] == 0].any()
        else:
            assert torch.equal(moved[i], rewards[i])


@pytest.mark.parametrize("estimator", [name for name in ESTIMATORS if compares_within_groups(name)])
def test_who_is_left_alone_learns_nothing(estimator):
    alone = [Row(0, 1.0, (1, 1), seed=1), Row(0, 0.0, (1, 1), "loop", 2), Row(0, 0.0, (1, 1), "grader", 3)]
    others = [Row(1, reward, (1, 1, 1), seed=4 + i) for i, reward in enumerate((1.0, 0.0, 0.0))]
    found = by_v0(alone + others, estimator)
    assert not found[:3].any()
    assert torch.allclose(found[3:], by_v0(others, estimator), atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("out", ["loop", "grader"])
def test_nothing_left_at_all(estimator, out, monkeypatch):
    lost = [Row(i // GROUP, 1.0, (1, 1), out, i) for i in range(2 * GROUP)]
    assert not by_v0(lost, estimator).any()
    if on_v1(estimator):
        store = by_v1(lost, estimator, monkeypatch)
        assert not any(row["advantages"].any() or row["loss_mask"].any() for row in store.rows.values())


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_one_token_and_empty_masks_are_no_errors(estimator):
    """A trajectory whose only tokens of the model's are masked; a batch with one token in the loss, and with none."""
    for masks in (((0, 0), (0,), (1, 0)), ((0,), (0,), (0,)), ((1,), (0, 0), (1,))):
        found = by_v0([Row(0, float(i), mask, seed=i) for i, mask in enumerate(masks)], estimator)
        assert found.isfinite().all()


def test_resampled_rows_stay_among_those_that_count():
    """PF-PPO draws rows anew by their rewards: whole rows change places, none with one that is left out."""
    torch.manual_seed(0)
    made = [Row(i, float(i % 2), (1, 1, 1), "loop" if i in (2, 5) else "", i) for i in range(8)]
    data = batch_of(made, GAE)
    config = algorithm(GAE, use_pf_ppo=True, pf_ppo={"reweight_method": "pow", "weight_pow": 2.0})
    done = REPLACED(data, adv_estimator=GAE, gamma=1.0, lam=1.0, config=config)
    for i in range(8):
        if i in (2, 5):
            assert not done.batch["returns"][i].any()
            assert not done.batch["response_mask"][i].any()
            continue
        assert done.batch["token_level_scores"][i].sum() == 1.0
        assert done.batch["returns"][i][0].item() == pytest.approx(1.0, abs=1e-5)
        assert (
            done.batch["values"][i].tolist()
            == numbers(made[int(done.non_tensor_batch["uid"][i][1:])], "values").tolist()
        )


def test_a_faulted_greedy_baseline_leaves_its_samples_out():
    made = [Row(i // GROUP, 1.0, (1, 1, 1), seed=i) for i in range(2 * GROUP)]
    data = batch_of(made, "remax")
    data.batch["reward_baselines"] = torch.tensor([0.5] * GROUP + [torch.nan] * GROUP)
    done = REPLACED(data, adv_estimator="remax", num_repeat=GROUP, config=algorithm("remax"))
    assert done.batch["advantages"][:GROUP, 0].tolist() == [0.5] * GROUP
    assert not done.batch["advantages"][GROUP:].any()
    assert not done.batch["response_mask"][GROUP:].any()


@pytest.mark.parametrize("invalid", [0, 1])
@pytest.mark.parametrize("kl", [False, True])
def test_the_newer_trainer_writes_each_field_for_all_rows(invalid, kl, monkeypatch):
    """The batch that goes to the workers names its fields, and each row has them."""
    made = [Row(0, float(i), (1, 1), "loop" if i < invalid else "", i) for i in range(GROUP)]
    correction = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": None, "bypass_mode": False}
    store = by_v1(made, GRPO, monkeypatch, rollout_correction=correction, use_kl_in_reward=kl)
    for i, row in enumerate(store.rows.values()):
        assert {"advantages", "returns", "rollout_is_weights", "response_mask"} <= set(row)
        assert ("token_level_rewards" in row) is kl
        if kl and i >= invalid:
            penalty = KL_WEIGHT * (row["old_log_probs"] - row["ref_log_prob"])
            assert torch.allclose(row["token_level_rewards"], row["rm_scores"] - penalty)


def test_a_row_that_fills_up_the_batch_does_not_count(monkeypatch):
    """GPG scales by the number of rows."""
    made = [Row(0, float(i == 0), (1, 1), seed=i) for i in range(GROUP)]
    expected = by_v0(made, "gpg")
    kv = StoredRows._meta

    def tagged(self: StoredRows, keys: list[str]) -> Any:
        meta = kv(self, keys)
        meta.tags = [{"is_padding": key.startswith("gpad")} for key in keys]
        return meta

    monkeypatch.setattr(StoredRows, "_meta", tagged)
    filler = [Row("pad", 0.0, (0,), seed=9), Row("pad", 0.0, (0,), seed=9)]  # type: ignore[arg-type]
    store = by_v1(made + filler, "gpg", monkeypatch)
    for i in range(GROUP):
        assert torch.allclose(advantages_in(store, i), expected[i, :2])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["algorithm.adv_estimator=grpo", "algorithm.mt_grpo.discount=0.9"], r"mt_grpo\.discount=0\.9 has no effect"),
        (["algorithm.adv_estimator=magic"], "adv_estimator=magic is unknown"),
        (["algorithm.adv_estimator=remax", "trainer.use_v1=true"], "reward_baselines"),
        (["algorithm.adv_estimator=gdpo", "trainer.use_v1=true"], "use_v1=true"),
        (["algorithm.adv_estimator=gdpo", "trainer.use_v1=false"], "gdpo_reward_keys"),
        (["algorithm.adv_estimator=optimal_token_baseline", "trainer.use_v1=true"], "sum_pi_squared"),
        (["algorithm.adv_estimator=optimal_token_baseline", "trainer.use_v1=false"], "calculate_sum_pi_squared=true"),
        (["algorithm.adv_estimator=grpo_passk", "actor_rollout_ref.rollout.n=1"], "rollout.n=1"),
        (["algorithm.adv_estimator=grpo", "algorithm.use_pf_ppo=true"], "use_pf_ppo=true has no effect"),
        (["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true", "trainer.use_v1=true"], "use_v1=false"),
        (["actor_rollout_ref.actor.loss_agg_mode=token-sum"], "token-sum"),
        (["critic.loss_agg_mode=token-sum"], r"critic\.loss_agg_mode"),
        (["actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm"], "loss_scale_factor"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"], "geo_mean"),
        ([SUBAGENTS, "algorithm.adv_estimator=grpo", "trainer.use_v1=false"], "they need trainer.use_v1=true"),
        ([SUBAGENTS, "algorithm.adv_estimator=gae", "trainer.use_v1=true"], "depends on the order of tokens"),
        ([SUBAGENTS, "algorithm.adv_estimator=grpo", "algorithm.gamma=0.9", "trainer.use_v1=true"], "gamma=0.9"),
    ],
)
def test_what_cannot_hold_is_refused(overrides, named):
    with pytest.raises(ConfigError, match=named):
        check_algorithm(composed(*overrides))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_each_estimator_is_taken_by_a_trainer(estimator):
    check_algorithm(config_of(estimator, "trainer.use_v1=false"))


def test_the_newer_trainers_own_method_is_still_called():
    assert "super()._compute_advantage" in inspect.getsource(v1_trainer.AgentTrainerMixin._advantages_of_valid_rows)
    assert callable(PPOTrainer._compute_advantage)
