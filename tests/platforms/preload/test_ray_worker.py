"""Ray's own workers, forked from a template."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import ray

from verl_tool.platforms.preload.template import forked_ray_workers, template
from verl_tool.servers.serve.local_ray import make_token, on_loopback, private_folder

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(300)]
PRELOADED = "colorsys"


def told() -> type:
    """An actor that tells what it finds; of no module, for the workers find none of ours."""

    class Told:
        def state(self) -> dict[str, object]:
            return {
                "pid": os.getpid(),
                "parent": os.getppid(),
                "preloaded": PRELOADED in sys.modules,
                "given": os.environ.get("GIVEN"),
                "own": os.environ.get("OWN"),
            }

        def die(self) -> None:
            os._exit(1)

    return Told


@pytest.fixture
def alone(monkeypatch):
    """A Ray of our own whose workers are forked."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with template({}, ("ray._private.workers.default_worker", PRELOADED)):
        make_token()
        with on_loopback(), forked_ray_workers():
            ray.init(
                address="local",
                _temp_dir=str(private_folder()),
                num_cpus=4,
                include_dashboard=False,
                runtime_env={"env_vars": {"GIVEN": "1"}},
            )
        try:
            yield
        finally:
            ray.shutdown()


def test_actors_are_forked_live_and_die_as_ever(alone):
    actor = ray.remote(told())
    first = ray.get(actor.remote().state.remote(), timeout=120)
    other = actor.options(runtime_env={"env_vars": {"OWN": "2"}}).remote()
    found = ray.get(other.state.remote(), timeout=120)
    assert (first["preloaded"], first["given"], first["own"]) == (True, "1", None)
    assert (found["preloaded"], found["given"], found["own"]) == (True, "1", "2")
    assert first["parent"] == found["parent"] != os.getpid()

    ray.kill(other)
    deadline = time.monotonic() + 60
    while Path(f"/proc/{found['pid']}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(actor.remote().die.remote(), timeout=120)
    # The template has outlived both.
    assert ray.get(actor.remote().state.remote(), timeout=120)["parent"] == first["parent"]
