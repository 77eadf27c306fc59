"""The launcher of an application on a Ray cluster: who it is, and whether it lives.

It holds a name as a Ray actor that is not detached, on its own node: Ray lets go of the name when the launcher ends,
however it ends, and when its node is lost. So of several commands with one name on a cluster one serves, and what a
dead one left behind can be told from what a live one runs.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_tool.errors import VerlToolError

NAMESPACE = "verl_tool"
"""Ray namespace of the launchers."""
HOLDER_ANSWER_SECONDS = 10.0
"""A live launcher tells who it is within this time."""
SERVING_SECONDS = 5.0
"""How long is waited for one that serves: it may be about to stop, as one does whose training was killed."""
STOPPING_SECONDS = 120.0
"""How long is waited for one that stops: with a node that was just lost, Serve's shutdown takes its time."""
EXITED_SECONDS = 60.0
"""How long is waited for one that does not answer: Ray takes half a minute to see that a node is lost."""
RETRY_SECONDS = 0.5


class NameInUseError(VerlToolError):
    """A live launcher serves under this name."""


class Launcher:
    """The actor's class. Its life is what it is for, and to tell whether its server stops."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._stops = False

    def describe(self) -> tuple[str, bool]:
        """Which process it stands for, and whether that one stops."""
        return self._process, self._stops

    def stops(self) -> None:
        """From now on whoever wants the name waits for it."""
        self._stops = True


def claim_name(app_name: str) -> None:
    """Be the launcher of `app_name` on this cluster until this process leaves it.

    One that stops, or does not answer, is waited for. Raises `NameInUseError`.
    """
    began = time.monotonic()
    while True:
        try:
            _start(app_name)
        except ValueError:
            holder, seconds = _holder(app_name)
        else:
            return
        if time.monotonic() > began + seconds:
            raise NameInUseError(
                f"{holder} on this cluster under the name {app_name!r}; "
                "give another with --app_name, or stop that server"
            )
        time.sleep(RETRY_SECONDS)


def _start(app_name: str) -> None:
    options: dict[str, Any] = {
        "name": _actor_name(app_name),
        "namespace": NAMESPACE,
        "num_cpus": 0,
        # Without it the name is free as soon as Ray loses the actor's process, be it to a lack of memory.
        "max_restarts": -1,
        "max_task_retries": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    }
    words = f"process {os.getpid()} on {socket.gethostname()}"
    # Without a reference Ray would end it.
    _held[app_name] = cast("ActorHandle[Any]", ray.remote(**options)(Launcher).remote(words))


_held: dict[str, ActorHandle[Any]] = {}


def announce_stop(app_name: str) -> None:
    """Whoever wants the name from now on waits until it is free."""
    if app_name in _held:
        _held[app_name].stops.remote()


def release_name(app_name: str) -> None:
    """Let go of the name, if this process holds it."""
    actor = _held.pop(app_name, None)
    if actor is not None:
        ray.kill(actor)


def _holder(app_name: str) -> tuple[str, float]:
    """Who holds the name and what it does; for how many seconds it is waited for."""
    try:
        actor = ray.get_actor(_actor_name(app_name), namespace=NAMESPACE)
        process, stops = cast("tuple[str, bool]", ray.get(actor.describe.remote(), timeout=HOLDER_ANSWER_SECONDS))
    except (ValueError, GetTimeoutError, RayError):
        return "a process that does not answer serves", EXITED_SECONDS
    return (f"{process} still stops", STOPPING_SECONDS) if stops else (f"{process} serves", SERVING_SECONDS)


def _actor_name(app_name: str) -> str:
    return f"launcher:{app_name}"
