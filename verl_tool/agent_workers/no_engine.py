"""A rollout without an engine, for training from stored trajectories (``actor_rollout_ref.rollout.name=replay``).

Written for verl 0.9.0 and 0.9.1.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from verl_tool.platforms.patch import REMEDY, Internal, PatchError

NAME = "replay"
ROLLOUTS = Internal(
    "verl",
    SpecifierSet(">=0.9.0,<0.9.2"),
    "verl.workers.rollout.base",
    "_ROLLOUT_REGISTRY",
    why="training from stored trajectories adds to this table, for which verl has no function",
)


class NoEngineReplica(RolloutReplica):
    """A replica without a server, so that verl's calls have no effect."""

    async def launch_servers(self) -> None:
        """Start no server. The address is empty."""
        self._server_address = ""


class NoEngineRollout(BaseRollout):
    """A rollout that holds no weights."""

    async def resume(self, tags: list[str]) -> None:
        """Do nothing."""

    async def release(self) -> None:
        """Do nothing."""

    async def update_weights(self, weights: Iterable[Any], wire_format: str = "named_tensors", **kwargs: Any) -> None:
        """Ignore the weights."""


def register() -> None:
    """Register the name with verl, in the processes of the trainer and of its workers.

    verl has no function for this, so the entry is written into its table. Raises PatchError if the table is missing or
    has another form.
    """
    table = vars(base).get(ROLLOUTS.attribute)
    if not isinstance(table, dict) or not isinstance(table.get(("vllm", "async")), str):
        raise PatchError(
            f"verl {version('verl')} has no {ROLLOUTS.module}.{ROLLOUTS.attribute} with the path of a class by (name, "
            f"'async'), which training from stored trajectories adds to; {REMEDY}"
        )
    RolloutReplicaRegistry.register(NAME, lambda: NoEngineReplica)
    table[NAME, "async"] = f"{__name__}.{NoEngineRollout.__name__}"


register()
