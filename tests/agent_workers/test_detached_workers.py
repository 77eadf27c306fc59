"""Weights that are remembered over an update, of a model that lies on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
torch = pytest.importorskip("torch")

from torch.distributed import FileStore, destroy_process_group, init_process_group  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from verl.experimental.separation.engine_workers import DetachActorWorker  # noqa: E402

from verl_tool.agent_workers.detached_workers import AgentDetachActorWorker  # noqa: E402


@pytest.fixture
def module(tmp_path):
    init_process_group("gloo", store=FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield fully_shard(torch.nn.Linear(3, 2), mesh=init_device_mesh("cpu", (1,)))
    destroy_process_group()


@pytest.fixture
def worker(module):
    worker = object.__new__(AgentDetachActorWorker)
    worker.config = SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"))
    worker.actor = SimpleNamespace(engine=SimpleNamespace(module=module))
    worker._strategy_handlers = None
    return worker


def test_a_copy_from_a_gpu_is_not_copied_again(worker, module, monkeypatch):
    copies = {name: (parameter.to_local().clone(), None) for name, parameter in module.named_parameters()}

    def save(worker: DetachActorWorker, n: int) -> None:
        worker.cpu_saved_models = {n: (dict(copies), None)}

    monkeypatch.setattr(DetachActorWorker, "save_model_to_cpu", save)
    worker.save_model_to_cpu(0)
    assert all(worker.cpu_saved_models[0][0][name][0] is shard for name, (shard, _) in copies.items())


def test_what_is_remembered_outlives_an_update(worker, module):
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)

    def update() -> torch.Tensor:
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return module.weight.full_tensor().clone()

    first = module.weight.full_tensor().clone()
    worker.save_model_to_cpu(0)
    second = update()
    worker.save_model_to_cpu(1)
    worker.restore_model_from_cpu(0)
    assert torch.equal(module.weight.full_tensor(), first)
    update()
    for number, weights in ((0, first), (1, second)):
        worker.restore_model_from_cpu(number)
        assert torch.equal(module.weight.full_tensor(), weights)
    assert not torch.equal(first, second)
