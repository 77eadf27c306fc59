"""A training that a thread beside it ends."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import ray

from verl_tool.trainer.main_ppo import cause_of
from verl_tool.trainer.monitoring.abort import EXIT_CODE, TrainingAbortedError, abort_training, aborted_by_watchers

pytestmark = pytest.mark.slow


def ending_soon() -> None:
    threading.Timer(0.2, abort_training, [TrainingAbortedError("the engine died")]).start()


@pytest.mark.parametrize("wait", [lambda: time.sleep(20), lambda: asyncio.run(asyncio.sleep(20))])
def test_the_main_thread_gets_the_cause(wait, capfd):
    began = time.monotonic()
    ending_soon()
    with pytest.raises(TrainingAbortedError, match="the engine died"), aborted_by_watchers():
        wait()
    assert time.monotonic() - began < 10
    assert "the engine died" in capfd.readouterr().err


def test_an_interruption_by_hand_stays_one():
    with pytest.raises(KeyboardInterrupt), aborted_by_watchers():
        raise KeyboardInterrupt


def test_a_main_thread_that_does_not_leave_is_ended_by_force():
    code = """
        import threading, time
        from verl_tool.trainer.monitoring import abort
        abort.GRACE = 0.5
        def waits():
            while True:
                try:
                    time.sleep(20)
                except KeyboardInterrupt:
                    pass
        threading.Timer(0.2, abort.abort_training, [abort.TrainingAbortedError("over")]).start()
        with abort.aborted_by_watchers():
            waits()
    """
    head = f"import sys; sys.path[:0] = {sys.path!r}\n"
    ended = subprocess.run([sys.executable, "-c", head + textwrap.dedent(code)], capture_output=True, timeout=30)
    assert ended.returncode == EXIT_CODE
    assert ended.stderr.decode().splitlines()[-1] == "over"


def test_a_worker_s_wait_for_others_is_ended_and_its_command_told_why():
    class Waiting:
        """A training that waits for a worker which never answers. Here, as workers cannot import this file."""

        def run(self) -> None:
            import pyarrow  # noqa: F401  (by Ray, which cannot go on with one that is interrupted)

            with aborted_by_watchers():
                waiting = ray.remote(num_cpus=0)(lambda: time.sleep(60)).remote()
                threading.Timer(0.2, abort_training, [TrainingAbortedError("the engine died")]).start()
                ray.get(waiting)

    with ray.init(num_cpus=1, include_dashboard=False, namespace="ending"):
        began = time.monotonic()
        with pytest.raises(ray.exceptions.RayTaskError) as raised:
            ray.get(ray.remote(num_cpus=0)(Waiting).remote().run.remote())
        assert time.monotonic() - began < 45
    assert cause_of(raised.value) == "the engine died"
