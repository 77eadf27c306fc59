"""verl's asynchronous trainers with what tools add: which worker each gets, and when one gives up."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

import ray  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from stored_rows import StoredRows  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.experimental.separation.engine_workers import DetachActorWorker  # noqa: E402
from verl.trainer.ppo.utils import Role  # noqa: E402
from verl.trainer.ppo.v1 import replay_buffer as verl_replay  # noqa: E402
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls  # noqa: E402
from verl_loop import composed  # noqa: E402

from verl_tool.agent_loop.generators.removed_engine import ChangingEnginesClient  # noqa: E402
from verl_tool.agent_loop.trajectory import REWARD_FAULT  # noqa: E402
from verl_tool.agent_workers import rollout_worker  # noqa: E402
from verl_tool.agent_workers.detached_workers import AgentDetachActorWorker  # noqa: E402
from verl_tool.agent_workers.fsdp_workers import AgentActorRolloutRefWorker  # noqa: E402
from verl_tool.agent_workers.rollout_worker import RAISED, make_rollout_worker  # noqa: E402
from verl_tool.errors import ConfigError  # noqa: E402
from verl_tool.platforms.patch import plain_class  # noqa: E402
from verl_tool.trainer.monitoring.metric_limits import FRESH_DIFF  # noqa: E402
from verl_tool.trainer.monitoring.token_records import mean_advantages, tokens_of  # noqa: E402
from verl_tool.trainer.ppo import replay, v1_trainer  # noqa: E402
from verl_tool.trainer.ppo.graded_trajectories import TooManyFaultsError  # noqa: E402
from verl_tool.trainer.ppo.rollout_log import TOKENS_TIMER, RolloutLog  # noqa: E402
from verl_tool.trainer.ppo.v1_trainer import (  # noqa: E402
    AgentTrainerMixin,
    NoSignalError,
    _WatchedBuffer,
    register_agent_trainer,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("mode", "roles", "worker"),
    [
        ("sync", {Role.ActorRollout}, AgentActorRolloutRefWorker),
        ("colocate_async", {Role.ActorRolloutRef}, AgentActorRolloutRefWorker),
        ("separate_async", {Role.ActorRollout}, AgentDetachActorWorker),
        # As verl 0.9.1 names them where the actor's process samples nothing.
        ("separate_async", {Role.Actor, Role.RefPolicy}, AgentDetachActorWorker),
    ],
)
def test_each_mode_gets_its_worker(monkeypatch, mode, roles, worker):
    """Of verl's set-up only the table of workers is made, with a stand-in for those that it would name."""

    def name_the_stock_worker(trainer: PPOTrainer) -> None:
        trainer.role_worker_mapping = {role: ray.remote(DetachActorWorker) for role in roles}

    monkeypatch.setattr(PPOTrainer, "_init_resource_pool_mgr", name_the_stock_worker)
    register_agent_trainer(mode)
    trainer = object.__new__(get_trainer_cls(mode))
    assert isinstance(trainer, AgentTrainerMixin)
    trainer.config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": mode}}})
    trainer._init_resource_pool_mgr()
    assert trainer.role_worker_mapping.keys() == roles
    for chosen in trainer.role_worker_mapping.values():
        assert plain_class(chosen) is worker


@pytest.mark.parametrize(("rows", "val_only", "refused"), [(3, False, True), (3, True, False), (4, False, False)])
def test_rows_that_make_no_step_end_before_verl_divides_by_their_steps(monkeypatch, rows, val_only, refused):
    def load(trainer: PPOTrainer) -> None:
        trainer.train_dataset = range(rows)
        trainer.steps_per_epoch = rows // 4

    monkeypatch.setattr(PPOTrainer, "_init_dataloader", load)
    register_agent_trainer("sync")
    trainer = object.__new__(get_trainer_cls("sync"))
    trainer.config = composed("data.train_batch_size=4", f"trainer.val_only={val_only}")
    error = pytest.raises(ConfigError, match="=4, and 3 rows are left") if refused else contextlib.nullcontext()
    with error:
        trainer._init_dataloader()


def test_the_detached_worker_is_ours_and_remembers_weights():
    assert AgentDetachActorWorker.update_weights is AgentActorRolloutRefWorker.update_weights
    for name in ("restore_model_from_cpu", "clear_cpu_model"):
        assert getattr(AgentDetachActorWorker, name) is getattr(DetachActorWorker, name)


@pytest.mark.skipif(version("verl") != "0.9.0", reason="its engines reject requests that come too late")
def test_requests_to_separate_engines_leave_one_that_is_removed():
    register_agent_trainer("separate_async")
    trainer = object.__new__(get_trainer_cls("separate_async"))
    trainer.standalone_server_manager = SimpleNamespace(get_client=lambda client_cls: client_cls)
    assert trainer.get_llm_client() is ChangingEnginesClient


BATCH = 4


class Prompts:
    """In place of the module `transfer_queue`: prompts whose rollouts have ended as soon as they are there."""

    def __init__(self, failing: Iterator[bool]) -> None:
        self.tags: dict[str, dict[str, Any]] = {}
        self._failing = failing

    def add(self, n: int) -> None:
        for name in map(str, range(n)):
            uid = f"{len(self.tags)}-{name}-{next(_numbers)}"
            failed = next(self._failing)
            end = {"status": "failure", RAISED: "KeyError: 'answer'"} if failed else {"status": "finished"}
            self.tags[uid] = {"is_prompt": True, "global_steps": 1, **end}
            if not failed:
                self.tags[f"{uid}_0_0"] = {"global_steps": 1}

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, Any]]:
        return {"train": dict(self.tags)}

    def kv_clear(self, partition_id: str, keys: list[str]) -> None:
        for key in keys:
            del self.tags[key]


_numbers = itertools.count()


def sampled(prompts: Prompts, warm_up: int, most: float, monkeypatch: pytest.MonkeyPatch) -> KVBatchMeta:
    """A step's batch; `warm_up` batches of prompts are there already."""
    monkeypatch.setattr(verl_replay, "tq", prompts)
    monkeypatch.setattr(replay, "tq", prompts)
    monkeypatch.setattr(PPOTrainer, "on_step_begin", lambda self: None)
    monkeypatch.setattr(PPOTrainer, "_add_prompts_to_generate", lambda self, n: prompts.add(n) or n)
    register_agent_trainer("colocate_async")
    trainer = object.__new__(get_trainer_cls("colocate_async"))
    trainer.config = OmegaConf.create(
        {
            "data": {"train_batch_size": BATCH},
            "actor_rollout_ref": {"rollout": {"n": 1}},
            "algorithm": {"filter_groups": {"enable": False}},
        }
    )
    trainer._progress, trainer.global_steps, trainer.total_training_steps = Quiet(), 1, 1
    trainer._ids, trainer._rollouts = None, RolloutLog(None, most)
    buffer = replay.make_valid_group_buffer(verl_replay.ReplayBufferAsync)(
        trainer_mode="colocate_async",
        trainer_config={},
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs={},
        refill_fn=trainer._add_prompts_to_generate,
    )
    trainer.replay_buffer = _WatchedBuffer(buffer, lambda *told: None)
    trainer.on_step_begin()
    prompts.add(warm_up * BATCH)
    return trainer.replay_buffer.sample(1, "train", BATCH)[0]


class Quiet:
    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


@pytest.mark.parametrize("warm_up", [1, 5])
@pytest.mark.parametrize("most", [0.0, 0.5, 1.0])
def test_a_run_in_which_every_prompt_raises_ends_with_what_was_raised(monkeypatch, warm_up, most):
    with pytest.raises(TooManyFaultsError, match=r"rollout that raised.*KeyError: 'answer'"):
        sampled(Prompts(itertools.repeat(True)), warm_up, most, monkeypatch)


@pytest.mark.parametrize("warm_up", [1, 5])
def test_a_run_in_which_some_prompts_raise_goes_on_with_others(monkeypatch, warm_up):
    batch = sampled(Prompts(itertools.cycle([True, False, False])), warm_up, 0.5, monkeypatch)
    assert len(batch.keys) == BATCH


def test_warm_up_passes_no_limit_of_a_step(monkeypatch):
    """verl 0.9.1 asks for prompts before the first step by the method that replaces filtered groups."""
    monkeypatch.setattr(PPOTrainer, "__init__", lambda self, config: setattr(self, "config", config))
    monkeypatch.setattr(PPOTrainer, "on_step_begin", lambda self: None)
    monkeypatch.setattr(PPOTrainer, "_add_prompts_to_generate", lambda self, n: n)
    monkeypatch.setattr(v1_trainer, "rollout_log", lambda config: RolloutLog(None, 1.0))
    monkeypatch.setattr(v1_trainer, "Progress", lambda seconds: Quiet())
    limits = [f"algorithm.filter_groups.{name}" for name in ("enable=true", "max_num_gen_batches=1")]
    register_agent_trainer("sync")
    others = (f"data.train_batch_size={BATCH}", "actor_rollout_ref.agent.enable_agent=false")
    trainer = get_trainer_cls("sync")(composed(*limits, *others))
    trainer.global_steps, trainer.total_training_steps = 1, 1
    trainer.replay_buffer = SimpleNamespace(take_raised=lambda: ([], 0))
    assert trainer._add_prompts_to_generate(3 * BATCH) == 3 * BATCH
    trainer.on_step_begin()
    with pytest.raises(NoSignalError, match="max_num_gen_batches=1"):
        trainer._add_prompts_to_generate(1)


@pytest.mark.skipif(
    hasattr(PPOTrainer, "_add_async_warmup_batches"), reason="this verl counts the prompts of a checkpoint itself"
)
@pytest.mark.parametrize(("restored", "added"), [(0, BATCH * 2), (3, BATCH * 2 - 3), (BATCH * 2, 0), (BATCH * 9, 0)])
def test_a_resumed_run_samples_no_further_ahead(monkeypatch, restored, added):
    """A checkpoint brings the prompts that were under way; the rows that it trained on are no prompts."""
    there = {f"p{i}": {"is_prompt": True} for i in range(restored)} | {"trained_0_0": {"status": "success"}}
    monkeypatch.setattr(v1_trainer, "tq", SimpleNamespace(kv_list=lambda partition: {partition: there}))
    asked: list[int] = []
    monkeypatch.setattr(PPOTrainer, "_add_prompts_to_generate", lambda self, n: asked.append(n) or n)
    monkeypatch.setattr(PPOTrainer, "_add_batch_to_generate", lambda self: asked.append(BATCH))
    register_agent_trainer("colocate_async")
    trainer = object.__new__(get_trainer_cls("colocate_async"))
    warm_up = ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=2")
    trainer.config = composed(*warm_up, f"data.train_batch_size={BATCH}")
    trainer.on_train_begin()
    assert sum(asked) == added


@pytest.mark.parametrize(("mode", "told"), [("sync", False), ("colocate_async", True)])
def test_engine_and_trainer_are_compared_where_both_had_the_same_weights(monkeypatch, mode, told):
    store = StoredRows()
    monkeypatch.setattr(v1_trainer, "tq", store)
    monkeypatch.setattr(PPOTrainer, "_compute_old_log_prob", lambda self, batch, metrics: batch)
    rows = {"fresh_0_0": (0.5, 0.25), "stale_0_0": (0.5, 0.1), "spans_0_0": (0.5, 0.1)}
    batch = store.put(
        {
            key: {
                "old_log_probs": torch.full((2,), ours).log(),
                "rollout_log_probs": torch.full((2,), engine).log(),
                "response_mask": torch.ones(2, dtype=torch.int64),
            }
            for key, (ours, engine) in rows.items()
        }
    )
    versions = ((4, 4), (3, 3), (3, 4))
    batch.tags = [{"min_global_steps": oldest, "max_global_steps": newest} for oldest, newest in versions]
    register_agent_trainer(mode)
    trainer = object.__new__(get_trainer_cls(mode))
    trainer.config, trainer.global_steps = composed(f"trainer.v1.trainer_mode={mode}"), 5
    metrics: dict[str, Any] = {}
    assert trainer._compute_old_log_prob(batch, metrics) is batch
    expected = {f"{FRESH_DIFF}_mean": pytest.approx(0.25), f"{FRESH_DIFF}_max": pytest.approx(0.25)}
    assert metrics == (expected if told else {})


def test_what_is_known_of_tokens_stands_beside_their_records(tmp_path, monkeypatch):
    """By the line of the record; rows that fill up the batch have none."""
    store = StoredRows()
    monkeypatch.setattr(v1_trainer, "tq", store)
    lengths = {"a_0_0": 3, "a_1_0": 2, "filling": 1}
    batch = store.put(
        {
            key: {
                "advantages": torch.full((n,), float(n)),
                "response_mask": torch.ones(n, dtype=torch.int64),
                "old_log_probs": -torch.arange(float(n)),
            }
            for key, n in lengths.items()
        }
    )
    trainer = SimpleNamespace(
        config=OmegaConf.create({"algorithm": {"rollout_correction": {"bypass_mode": False}}}),
        global_steps=4,
        _lines={"a_1_0": 0, "a_0_0": 1},
        _rollouts=RolloutLog(tmp_path, 1.0, tokens_every=1),
    )
    assert set(AgentTrainerMixin._store_tokens(trainer, batch)) == {TOKENS_TIMER}
    told = tokens_of(tmp_path / "step_4.jsonl", 1)
    assert {name: column.tolist() for name, column in told.items()} == {
        "advantages": [3.0, 3.0, 3.0],
        "log_probs": [0.0, -1.0, -2.0],
        "mask": [1, 1, 1],
    }
    assert mean_advantages(tmp_path / "step_4.jsonl", 2).tolist() == [2.0, 3.0]
    assert AgentTrainerMixin._store_tokens(trainer, batch) == {}


def test_what_else_a_trainer_asks_of_the_buffer_is_answered_by_verl_s():
    inner = SimpleNamespace(get_sampleable_count=lambda global_steps, partition_id: 7, poll_interval=0.5)
    buffer = _WatchedBuffer(inner, lambda *told: None)
    assert buffer.get_sampleable_count(1, "train") == 7
    assert buffer.poll_interval == 0.5
    assert not hasattr(buffer, "wait_for_sampleable")


def test_a_validation_s_fault_is_no_wrong_answer():
    """verl 0.9.1 tells how many answers each prompt should have, and would take those that are missing for wrong."""
    register_agent_trainer("sync")
    trainer = object.__new__(get_trainer_cls("sync"))
    trainer._rollouts = SimpleNamespace(take_validation_metrics=dict)
    columns = {"acc": [1.0, 0.0, math.nan], "reward": [1.0, 0.0, 0.0], REWARD_FAULT: ["", "", "grader: gone"]}
    told = (["maths"] * 3, ["a", "a", "b"], columns, [])
    stock = inspect.signature(PPOTrainer._val_metrics_update).parameters
    more = {"expected_acc_counts": {("maths", "a"): 2, ("maths", "b"): 1}} if "expected_acc_counts" in stock else {}
    metrics = trainer._val_metrics_update(*told, **more)
    assert metrics["val-core/maths/acc/mean@2"] == 0.5
    assert not [name for name in metrics if name.endswith("@1")]


class _Stock:
    """In place of verl's worker: it notes what it was told, and its rollouts fail."""

    def __init__(self) -> None:
        self.begun = 0

    async def _run_agent_loop(self, sampling_params: Any, trajectory: Any, **row: Any) -> None:
        self.begun += 1
        raise KeyError(row["column"])


class _Store:
    def __init__(self) -> None:
        self.puts: list[dict[str, Any]] = []

    async def async_kv_put(self, **put: Any) -> None:
        self.puts.append(put)


async def test_a_rollout_worker_tells_what_was_raised(monkeypatch):
    store = _Store()
    monkeypatch.setattr(rollout_worker, "tq", store)
    worker = plain_class(make_rollout_worker(ray.remote(_Stock)))()
    for validate in (True, False):
        with pytest.raises(KeyError):
            await worker._run_agent_loop({}, trajectory={"validate": validate}, uid="u", column="answer")
    assert worker.begun == 2
    tag = {RAISED: "KeyError: 'answer'"}
    assert store.puts == [{"key": "u", "partition_id": name, "tag": tag} for name in ("val", "train")]
