"""The rollout engine of a training that takes its trajectories from disk: none at all.

For ``actor_rollout_ref.rollout.name=replay``. Written for verl 0.9.0 and 0.9.1.
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
    """Has no server; without any, verl's calls of it reach nobody."""

    async def launch_servers(self) -> None:
        """Start nothing. The address is empty."""
        self._server_address = ""


class NoEngineRollout(BaseRollout):
    """Takes no weights."""

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing is held."""

    async def update_weights(self, weights: Iterable[Any], wire_format: str = "named_tensors", **kwargs: Any) -> None:
        """The weights go nowhere."""


def register() -> None:
    """Make the name known to verl, in the trainer's process and in its workers'.

    verl has no function that adds a rollout, so its table of them is written. Raises PatchError if that is gone or has
    another form.
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
