"""verl's newer trainer on rollouts of several rows: what it reads of them, in which order it trains, what it writes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("verl")

from cut_rollouts import Rows, cut, make_rollouts  # noqa: E402
from solved_trajectories import solved  # noqa: E402
from stored_rows import StoredRows  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.trainer.ppo import padding_utils  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls  # noqa: E402
from verl_loop import composed  # noqa: E402

from verl_tool.agent_loop.trajectory import LOOP_FAULT, REWARD_FAULT  # noqa: E402
from verl_tool.agent_workers.rollout_weights import ROLLOUT_SHARE, TOKEN_SHARE  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.trainer.monitoring.token_records import tokens_of  # noqa: E402
from verl_tool.trainer.ppo import replay, v1_trainer  # noqa: E402
from verl_tool.trainer.ppo.rollout_log import RolloutLog  # noqa: E402
from verl_tool.trainer.ppo.rows.rollout_index import RolloutIndex, rollout_of  # noqa: E402
from verl_tool.trainer.ppo.rows.rows_check import rows_multiple  # noqa: E402
from verl_tool.trainer.ppo.v1_trainer import register_agent_trainer  # noqa: E402

PROMPTS, SAMPLES = 6, 4
CONFIG = (
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS // 3}",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.agent.enable_agent=false",
    "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true",
    "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true",
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> StoredRows:
    rows = StoredRows()
    for module in (v1_trainer, replay, trainer_base, padding_utils):
        monkeypatch.setattr(module, "tq", rows)
    return rows


def make_trainer(*overrides: str) -> Any:
    register_agent_trainer("sync")
    trainer = object.__new__(get_trainer_cls("sync"))
    trainer.config = composed(*CONFIG, *overrides)
    trainer.global_steps, trainer.total_training_steps = 1, 9
    trainer.use_critic = False
    trainer.tokenizer = SimpleNamespace(eos_token_id=0)
    trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
    trainer.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": [0, 1]})
    return trainer


def stored(store: StoredRows, rows: Rows, faulted: str = "") -> KVBatchMeta:
    """The rows as the agent loop leaves them, and the trainer's log-probabilities."""
    index = RolloutIndex.of(rows.keys)
    fields: dict[str, dict[str, Any]] = {}
    for place, (key, length) in enumerate(zip(rows.keys, rows.lengths, strict=True)):
        tensors = {
            name: rows.data.batch[name][place, :length]
            for name in ("response_mask", "old_log_probs", "rollout_log_probs", "values")
        }
        loop = {LOOP_FAULT: key == faulted, "reward_extra_info": {REWARD_FAULT: "", "acc": 0.0}}
        if place in index.final:
            loop["trajectory"] = solved(key).to_json()
        fields[key] = tensors | {
            "rm_scores": rows.data.batch["token_level_scores"][place, :length],
            "responses": torch.zeros(length, dtype=torch.int64),
            "prompts": torch.zeros(1, dtype=torch.int64),
            "uid": key.split("_")[0],
            "extra_fields": loop,
        }
    batch = store.put(fields)
    batch.tags = [
        {"seq_len": n + 1, "response_len": n, "prompt_len": 1, "min_global_steps": 0, "max_global_steps": 0}
        for n in rows.lengths
    ]
    batch.extra_info = {}
    return batch


def advantages(store: StoredRows, rows: Rows, *overrides: str, faulted: str = "") -> dict[tuple[str, int], float]:
    trainer = make_trainer(*overrides)
    trainer._lines = {}
    trainer._compute_advantage(stored(store, rows, faulted), {})
    found = {}
    for key, start in zip(rows.keys, rows.starts, strict=True):
        row = store.rows[key]
        for place in torch.nonzero(row["response_mask"]).flatten().tolist():
            found[rollout_of(key), start + place] = float(row["advantages"][place])
    return found


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae", "reinforce_plus_plus"])
def test_the_trainer_gives_a_cut_rollout_the_advantages_of_the_whole(store, estimator):
    option = f"algorithm.adv_estimator={estimator}"
    uncut = advantages(store, cut(make_rollouts(3), 1, 3), option)
    found = advantages(store, cut(make_rollouts(3), 6, 3), option)
    assert found == pytest.approx(uncut, abs=1e-5)
    assert any(uncut.values())


def test_a_fault_in_one_row_excludes_its_rollout_and_no_other(store):
    rollouts = make_rollouts(4)
    rows = cut(rollouts, 6, 4)
    victim = next(places for places in RolloutIndex.of(rows.keys).rollouts if len(places) > 2)
    name = rollout_of(rows.keys[victim[0]])
    found = advantages(store, rows, faulted=rows.keys[victim[1]])
    others = [whole for whole in rollouts if f"{whole.prompt}_{whole.sample}" != name]
    alone = advantages(store, cut(others, 1, 4))
    assert found == pytest.approx(alone, abs=1e-5)
    assert all(not store.rows[rows.keys[place]][ROLLOUT_SHARE] for place in victim)


def test_weights_count_the_rollouts_and_their_tokens(store):
    rows = cut(make_rollouts(5), 6, 5)
    advantages(store, rows)
    shares = [float(store.rows[key][ROLLOUT_SHARE]) for key in rows.keys]
    assert sum(shares) == pytest.approx(PROMPTS * SAMPLES)
    by_rollout: dict[str, float] = {}
    for key in rows.keys:
        by_rollout[rollout_of(key)] = by_rollout.get(rollout_of(key), 0.0) + float(store.rows[key][TOKEN_SHARE])
    assert list(by_rollout.values()) == pytest.approx([1.0] * PROMPTS * SAMPLES)


def test_one_row_per_rollout_is_trained_as_ever(store, monkeypatch):
    """No weights, and verl's own order."""
    rows = cut(make_rollouts(6), 1, 6)
    advantages(store, rows)
    assert not any(ROLLOUT_SHARE in store.rows[key] for key in rows.keys)
    asked: list[Any] = []
    monkeypatch.setattr(trainer_base.PPOTrainer, "_balance_batch", lambda self, batch, *_, **__: asked.append(batch))
    make_trainer()._balance_batch(stored(store, rows), {})
    assert len(asked) == 1


def test_rows_are_laid_out_by_mini_batches_of_whole_prompts(store):
    rows = cut(make_rollouts(7), 5, 7)
    metrics: dict[str, Any] = {}
    batch = make_trainer()._balance_batch(stored(store, rows), metrics)
    assert batch.extra_info["num_mini_batch"] == 3
    size, rest = divmod(len(batch.keys), 2 * 3)
    assert rest == 0
    prompts: dict[str, set[int]] = {}
    for place, (key, tag) in enumerate(zip(batch.keys, batch.tags, strict=True)):
        if not tag.get("is_padding"):
            prompts.setdefault(key.split("_")[0], set()).add(place // size % 3)
    assert len(prompts) == PROMPTS
    assert all(len(mini_batches) == 1 for mini_batches in prompts.values())
    assert metrics["training/rows_per_rollout/mean"] == pytest.approx(len(rows.keys) / (PROMPTS * SAMPLES))
    assert metrics["training/dummy_rows"] == sum(bool(tag.get("is_padding")) for tag in batch.tags)
    # The dummies have the fields of rows, and nothing of them is trained.
    padding = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if tag.get("is_padding")]
    assert all(not store.rows[key]["response_mask"].any() for key in padding)


def test_log_probabilities_keep_the_number_of_mini_batches(store, monkeypatch):
    """TransferQueue's answer, which verl goes on with, has no extra information: verl would cut by rows."""
    trainer = make_trainer()
    batch = trainer._balance_batch(stored(store, cut(make_rollouts(7), 5, 7)), {})
    answer = KVBatchMeta(partition_id="train", keys=batch.keys, tags=batch.tags, fields=batch.fields)
    monkeypatch.setattr(trainer_base.PPOTrainer, "_compute_old_log_prob", lambda *_: answer)
    done = trainer._compute_old_log_prob(batch, {})
    trainer._lines = {}
    assert trainer._compute_advantage(done, {}).extra_info["num_mini_batch"] == 3


def test_a_rollout_is_one_record_with_the_sum_of_its_rewards(store, tmp_path):
    rollouts = make_rollouts(8)
    rows = cut(rollouts, 5, 8)
    batch = stored(store, rows)
    trainer = make_trainer()
    trainer._rollouts = RolloutLog(tmp_path, 1.0)
    trainer._progress = SimpleNamespace(tell=lambda *_: None, begin=lambda *_: None)
    trainer._lines = {}
    trainer.replay_buffer = SimpleNamespace(take_filtered=lambda: ())
    trainer._on_sampled(batch, 1, "train", PROMPTS)
    lines = (tmp_path / "step_1.jsonl").read_text().splitlines()
    assert len(lines) == len(rollouts)
    metrics = trainer._rollouts.take_metrics()
    assert metrics["agent/excluded/lost"] == 0.0
    right = {f"{whole.prompt}_{whole.sample}": whole.reward for whole in rollouts}
    finals = [rows.keys[row] for row in RolloutIndex.of(rows.keys).final]
    assert replay.rewards_of(RolloutIndex.of(batch.keys), "train") == [right[rollout_of(key)] for key in finals]
    assert trainer._lines.keys() == set(finals)


def test_tokens_are_written_in_the_order_of_the_record(store, tmp_path):
    batch = store.put(
        {
            key: {
                "advantages": torch.full((n,), float(n)),
                "response_mask": torch.ones(n, dtype=torch.int64),
                "old_log_probs": torch.zeros(n),
                "extra_fields": {"record_places": places},
            }
            for key, n, places in (("a_0_1", 3, [(0, 1), (3, 2)]), ("a_0_0", 2, [(1, 2)]))
        }
    )
    trainer = make_trainer()
    trainer._lines, trainer._rollouts = {"a_0_1": 0}, RolloutLog(tmp_path, 1.0, tokens_every=1)
    trainer._store_tokens(batch)
    assert tokens_of(tmp_path / "step_1.jsonl", 0)["advantages"].tolist() == [3.0, 2.0, 2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.use_v1=false", "trainer.use_v1=true"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "loss_mode=gspo"),
        ("actor_rollout_ref.actor.shuffle=true", "shuffle"),
    ],
)
def test_what_a_cut_would_change_is_refused(store, override, words):
    rows = cut(make_rollouts(7), 5, 7)
    with pytest.raises(ConfigError, match=words):
        make_trainer(override)._balance_batch(stored(store, rows), {})


@pytest.mark.parametrize(
    ("overrides", "mini_batches", "expected"),
    [
        ((), 3, 1),
        (("actor_rollout_ref.actor.use_dynamic_bsz=false",), 3, 64),
        (("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",), 4, 64),
        (("actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=false",), 3, 256),
    ],
)
def test_fixed_micro_batches_divide_what_they_are_cut_from(overrides, mini_batches, expected):
    sizes = (
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=256",
    )
    assert rows_multiple(composed(*CONFIG, *sizes, *overrides), mini_batches) == expected
