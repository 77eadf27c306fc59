"""verl's asynchronous trainers with what tools add: which worker each gets, and what verl refuses."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

import ray  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from verl.experimental.separation.engine_workers import DetachActorWorker  # noqa: E402
from verl.trainer.ppo.utils import Role  # noqa: E402
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls  # noqa: E402

from verl_tool.agent_workers.detached_workers import AgentDetachActorWorker  # noqa: E402
from verl_tool.agent_workers.fsdp_workers import AgentActorRolloutRefWorker  # noqa: E402
from verl_tool.trainer.ppo.v1_trainer import AgentTrainerMixin, register_agent_trainer  # noqa: E402


@pytest.mark.parametrize(
    ("mode", "worker"),
    [
        ("sync", AgentActorRolloutRefWorker),
        ("colocate_async", AgentActorRolloutRefWorker),
        ("separate_async", AgentDetachActorWorker),
    ],
)
def test_each_mode_gets_its_worker(monkeypatch, mode, worker):
    """Of verl's set-up only the table of workers is made, with a stand-in for the one that it would name."""

    def name_the_stock_worker(trainer: PPOTrainer) -> None:
        trainer.role_worker_mapping = {Role.ActorRollout: ray.remote(DetachActorWorker)}

    monkeypatch.setattr(PPOTrainer, "_init_resource_pool_mgr", name_the_stock_worker)
    register_agent_trainer(mode)
    trainer = object.__new__(get_trainer_cls(mode))
    assert isinstance(trainer, AgentTrainerMixin)
    trainer.config = OmegaConf.create({"trainer": {"v1": {"trainer_mode": mode}}})
    trainer._init_resource_pool_mgr()
    (chosen,) = trainer.role_worker_mapping.values()
    assert chosen.__ray_metadata__.modified_class.__ray_actor_class__ is worker


def test_the_detached_worker_is_ours_and_remembers_weights():
    assert AgentDetachActorWorker.update_weights is AgentActorRolloutRefWorker.update_weights
    for name in ("save_model_to_cpu", "restore_model_from_cpu", "clear_cpu_model"):
        assert getattr(AgentDetachActorWorker, name) is getattr(DetachActorWorker, name)
