"""The socket by which verl hands weights to vLLM, in a folder of this run's. Written for verl 0.9.0 and 0.9.1.

verl names the socket by Ray's job id, which is the same for the first job of every cluster, in ``/tmp``, where any user
may take the name first; and what comes by it is unpickled.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from verl_tool.errors import VerlToolError
from verl_tool.platforms.patch import Patch, verl_patch

FOLDER = "VERL_TOOL_WEIGHT_SYNC"
"""The environment variable that tells each process of a run the folder. Without it the socket is where verl puts it."""
_SHARED = "ipc:///tmp/"


def private(zmq_handle: str) -> str:
    """Where the socket is that verl calls `zmq_handle`. Raises VerlToolError if the folder is not this user's alone."""
    folder = os.environ.get(FOLDER)
    if folder is None or not zmq_handle.startswith(_SHARED):
        return zmq_handle
    # The node that the run was started on has it; others make it when they come to need it.
    Path(folder).mkdir(mode=0o700, exist_ok=True)
    found = Path(folder).lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise VerlToolError(f"{folder}, which is for the sockets of this run, is not this user's alone; start it again")
    return f"ipc://{folder}/{zmq_handle.removeprefix(_SHARED)}"


def _in_private(transfer: type[Any]) -> type[Any]:
    class PrivateTransfer(transfer):
        """One end of the transfer, which meets the other in the run's folder."""

        def __init__(self, zmq_handle: str, *args: Any, **options: Any) -> None:
            super().__init__(private(zmq_handle), *args, **options)

    return PrivateTransfer


def _end(module: str, attribute: str) -> Patch:
    why = "two trainings on one machine would hand each other their weights"
    return verl_patch(f"workers.rollout.vllm_rollout.{module}", attribute, why, _in_private)


# Each where its user looks it up: one imports it at its head, the other when it receives.
ENDS = (
    _end("vllm_rollout", "BucketedWeightSender"),
    _end("bucketed_weight_transfer", "BucketedWeightReceiver"),
)
