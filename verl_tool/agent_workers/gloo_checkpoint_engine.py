"""Send weights from the trainer's process to sampling processes without an accelerator.

verl's checkpoint engines are for GPUs. This one is registered as ``gloo`` in each process that imports it
(``actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module``). Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncGenerator, Iterable
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from verl_tool.errors import VerlToolError
from verl_tool.platforms.process_group_store import listening

TIMEOUT = timedelta(seconds=300)
Topology = tuple[dict[str, list[Any]], dict[str, list[Any]]]


@CheckpointEngineRegistry.register("gloo")
class GlooCheckpointEngine(CheckpointEngine):
    """Broadcasts each tensor from the trainer's first process, and sends its name and shape through the store.

    A group lasts for one update. Raises RuntimeError if a process does not join or answer within `TIMEOUT`.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        """`bucket_size` is ignored: tensors are sent one by one."""
        self._is_master = is_master
        self._rank = -1
        self._listener: socket.socket | None = None
        self._store: Any = None
        self._group: Any = None

    def prepare(self) -> Any:
        """Return the address where the processes meet, in the trainer's first process; None in all others."""
        if not self._is_master:
            return None
        address = ray.util.get_node_ip_address().strip("[]")
        self._listener = listening(address, 0)
        if self._listener is None:
            raise VerlToolError(f"no process can listen on this node's address {address} for the new weights")
        return address, self._listener.getsockname()[1]

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]) -> Topology:
        """Return the arguments of `init_process_group` for each process. Only the trainer's first process joins."""
        size = rollout_world_size + 1

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": ranks,
                "world_size": [size] * len(ranks),
                "address": [metadata[0]] * len(ranks),
            }

        return arguments([0] + [-1] * (actor_wg_world_size - 1)), arguments(list(range(1, size)))

    def init_process_group(self, rank: int, world_size: int, address: tuple[str, int]) -> None:
        """Join the group at `address`."""
        self._rank = rank
        if rank < 0:
            return
        host, port = address
        # The store owns the socket from now on; without one, it would listen on all addresses.
        listener = {} if self._listener is None else {"master_listen_fd": self._listener.detach()}
        self._store = TCPStore(host, port, world_size, is_master=rank == 0, timeout=TIMEOUT, **listener)
        self._group = ProcessGroupGloo(PrefixStore("weights", self._store), rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        """Leave the group."""
        self._group = self._store = self._listener = None

    @torch.no_grad()
    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Send the weights. The trainer's other processes only help to gather each tensor."""
        number = 0
        async for name, weight in ensure_async_iterator(weights):
            if self._rank < 0:
                continue
            tensor = weight.detach().contiguous()
            head = [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
            self._store.set(f"tensor {number}", json.dumps(head))
            self._broadcast(tensor)
            number += 1
        if self._rank >= 0:
            self._store.set(f"tensor {number}", json.dumps(None))
            # The store lives in this process: wait until all others have read the last entry.
            self._group.barrier().wait()

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yield the weights with their names."""
        number = 0
        # JSON and not pickle, because anyone who reaches the store can write into it.
        while (head := json.loads(self._store.get(f"tensor {number}"))) is not None:
            name, shape, dtype = head
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self._broadcast(tensor)
            yield name, tensor
            number += 1
        self._group.barrier().wait()

    def _broadcast(self, tensor: torch.Tensor) -> None:
        self._group.broadcast(tensor, 0).wait()
