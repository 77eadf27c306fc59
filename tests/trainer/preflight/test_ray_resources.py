"""A real Ray with few CPUs: what it can never give is an error at once, what others hold one after a deadline."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("verl")

HELPERS = Path(__file__).parents[2] / "helpers"
SETTING = """
import signal, sys, time
sys.path.insert(0, {helpers!r})
import ray
from preflight_configs import changed_config
from verl_tool.trainer.preflight.ray_resources import *
from verl_tool.trainer.preflight.ray_resources import ResourcesError
from verl_tool.trainer.monitoring.abort import aborted_by_watchers
from verl_tool.servers.serve.local_ray import make_token, private_folder

make_token()

def start(cpus, gpus=1):
    ray.init(address="local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, log_to_driver=False,
             object_store_memory=100_000_000, _temp_dir=str(private_folder()), logging_level="ERROR")

UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units"

def changed(**settings):
    few = {{"trainer.n_gpus_per_node": 1, "resource_timeout": 3.0, UNITS: 2}}
    return changed_config("gsm8k/gpu.yaml", few | settings)

config = changed()

@ray.remote
class Other:
    def ready(self):
        return True

def take(**options):
    other = Other.options(**options).remote()
    ray.get(other.ready.remote(), timeout=60)
    return other

def told(what):
    began = time.monotonic()
    try:
        what()
    except Exception as error:
        print(f"{{type(error).__name__}} after {{round(time.monotonic() - began)}}: {{error}}")
    else:
        print("nothing")
"""


@pytest.fixture(scope="module")
def lines():
    """What a script prints in a process of its own, for its Ray is none of other tests': a line for each wait."""
    script = """
        start(8)
        told(lambda: wait_for_resources(changed(**{UNITS: 8})))
        told(lambda: wait_for_resources(changed(**{UNITS: 0, "trainer.n_gpus_per_node": 2, "trainer.use_v1": False})))
        told(lambda: wait_for_resources(config))
        other = take(num_cpus=2)
        told(lambda: wait_for_resources(config))
        more = take(num_cpus=5)
        def begin():
            with aborted_by_watchers():
                start_transfer_queue(config)
        told(begin)
        limit_placement_groups(3.0)
        from verl.single_controller.ray.base import RayResourcePool
        told(lambda: RayResourcePool([1], max_colocate_count=3).get_placement_groups(device_name="cuda"))
    """
    code = SETTING.format(helpers=str(HELPERS)) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_what_the_nodes_can_never_give_is_an_error_at_once(lines):
    few_cpus, few_gpus = lines[:2]
    assert few_cpus.startswith(
        "ResourcesError after 0: the training reserves 13 CPU slots of Ray: 1 (trainer) + 9 (Transf"
    )
    assert "Ray's 1 nodes have 8 in all" in few_cpus
    assert few_gpus.startswith(
        "ResourcesError after 0: trainer.nnodes=1 nodes with 2 GPUs and 6 CPU slots each are needed"
    )
    assert "0 of Ray's 1 nodes have them (1 GPUs, 8 CPUs)" in few_gpus


def test_what_others_hold_is_waited_for_until_the_deadline(lines):
    enough, taken = lines[2:4]
    assert enough == "nothing"
    assert taken.startswith("ResourcesError after ")
    assert "the training reserves 7 CPU slots" in taken
    assert "and 6 were free (the run's tool server takes one for each replica) after resource_timeout=3 s" in taken
    assert "free now: 6 of 8 CPUs, 1 of 1 GPUs" in taken


def test_an_unplaced_transfer_queue_ends_with_the_requested_resources(lines):
    """Where somebody took the slots after they were seen free: verl's own call would wait for ever."""
    assert lines[4].startswith("ClaimTimeoutError after ")
    told = "Ray did not give TransferQueue's controller and 2 storage units a CPU slot each within resource_timeout=3 s"
    assert told in lines[4]
    assert "7 CPU slots of Ray" in lines[4]
    assert "of 8 CPUs" in lines[4]


def test_a_placement_group_that_finds_no_place_ends_too(lines):
    assert lines[5].startswith("ResourcesError after ")
    assert "1 bundles {'CPU': 3.0" in lines[5]
    assert "on one node within resource_timeout=3 s; free now: " in lines[5]
