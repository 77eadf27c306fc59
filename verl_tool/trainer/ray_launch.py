"""The start of Ray and, in it, of the process that holds the trainer."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import ray
from omegaconf import DictConfig

from verl_tool.errors import VerlToolError
from verl_tool.trainer.config_completion import choose_attention

RAY_START_TRIES = 3


class RayStartError(VerlToolError):
    """Ray did not start, or the cluster that is to be joined does not answer."""


def run_in_ray(config: DictConfig, runner: RunnerActor) -> None:
    """verl's `run_ppo`; again, if Ray did not come up in the time that it gives its own processes."""
    from verl.trainer.main_ppo import run_ppo

    for tries_left in reversed(range(RAY_START_TRIES)):
        try:
            run_ppo(config, task_runner_class=runner)
        except Exception as error:
            # Ray raises a bare Exception if its processes are late, as they may be on a busy machine.
            late = type(error) is Exception
            if ray.is_initialized() or not (late or isinstance(error, (ConnectionError, TimeoutError))):
                raise
            if not late or not tries_left:
                raise RayStartError(_why_no_ray(error)) from error
            print(f"Ray did not start, trying again: {error}", file=sys.stderr, flush=True)
            ray.shutdown()
        else:
            return


def _why_no_ray(error: Exception) -> str:
    words = str(error).strip().splitlines()
    return (
        "Ray did not start, or the cluster of RAY_ADDRESS does not answer: "
        f"{words[0] if words else type(error).__name__}. Its logs are in /tmp/ray/session_latest/logs; a busy "
        "machine or a full /tmp or /dev/shm are the usual reasons. Of a cluster, see `ray status`"
    )


class RunnerActor:
    """An actor class, which verl starts right behind Ray: Ray has put its own handler of SIGTERM in place of ours."""

    def __init__(self, actor_class: Any, wait_for_tools: Callable[[], None], config: DictConfig) -> None:
        self._actor_class, self._wait_for_tools, self._config = actor_class, wait_for_tools, config

    def options(self, **options: Any) -> RunnerActor:
        """As of an actor class."""
        return RunnerActor(self._actor_class.options(**options), self._wait_for_tools, self._config)

    def remote(self) -> Any:
        """As of an actor class; it starts while the tool server does. Raises ResourcesError."""
        from verl_tool.trainer.preflight.ray_resources import wait_for_resources, wait_until_started

        signal.signal(signal.SIGTERM, interrupt)
        wait_for_resources(self._config)
        choose_attention(self._config, cluster_joined=True)  # of the nodes that train
        actor = self._actor_class.remote()
        self._wait_for_tools()
        wait_until_started(actor, self._config)
        return actor


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handler of a signal: as Ctrl-C."""
    raise KeyboardInterrupt
