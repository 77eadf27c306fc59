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
from preflight_configs import gpu_config
from verl_tool.trainer.preflight.ray_resources import *
from verl_tool.trainer.preflight.ray_resources import ResourcesError
from verl_tool.trainer.monitoring.abort import aborted_by_watchers
from verl_tool.servers.serve.local_ray import make_token, private_folder

make_token()

def start(cpus, gpus=1):
    ray.init(address="local", num_cpus=cpus, num_gpus=gpus, include_dashboard=False, log_to_driver=False,
             object_store_memory=100_000_000, _temp_dir=str(private_folder()), logging_level="ERROR")

config = gpu_config("gsm8k/gpu.yaml", trainer__n_gpus_per_node=1, resource_timeout=3.0,
                    transfer_queue__backend__SimpleStorage__num_data_storage_units=2)

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


def run_with_ray(script: str) -> list[str]:
    """The lines that a script prints in a process of its own: a Ray of one test is none of the next."""
    code = SETTING.format(helpers=str(HELPERS)) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_no_node_has_is_an_error_at_once_and_what_others_hold_after_the_deadline():
    lines = run_with_ray(
        """
        start(6)
        told(lambda: wait_for_resources(config))
        ray.shutdown()
        start(8, gpus=0)
        told(lambda: wait_for_resources(config))
        ray.shutdown()
        start(8)
        told(lambda: wait_for_resources(config))
        other = take(num_cpus=2)
        told(lambda: wait_for_resources(config))
        del other
        told(lambda: wait_for_resources(config))
        queue = take(num_cpus=0, name="TransferQueueController", namespace="transfer_queue")
        told(lambda: wait_for_resources(config))
        """
    )
    few, no_gpu, enough, taken, given_back, queue = lines
    assert few.startswith("ResourcesError after 0: the training reserves 7 CPU slots of Ray: 1 (trainer) + 3 (Transfer")
    assert "Ray's 1 nodes have 6 in all" in few
    assert "0 of Ray's 1 nodes have them (0 GPUs, 8 CPUs)" in no_gpu
    assert enough == given_back == "nothing"
    assert taken.startswith("ResourcesError after ")
    assert "and 6 were free (the run's tool server takes one for each replica) after resource_timeout=3 s" in taken
    assert "free now: 6 of 8 CPUs, 1 of 1 GPUs" in taken
    assert "another training keeps its batches in this cluster's only TransferQueue" in queue


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_transfer_queue_that_finds_no_place_ends_with_what_it_asked_for():
    """Where somebody took the slots after they were seen free: verl's own call would wait for ever."""
    (line,) = run_with_ray(
        """
        start(2)
        def begin():
            with aborted_by_watchers():
                start_transfer_queue(config)
        told(begin)
        """
    )
    assert line.startswith("ClaimTimeoutError after ")
    assert "Ray did not give TransferQueue's controller and 2 storage units a CPU slot each within resource_timeout=3 s" in line
    assert "7 CPU slots of Ray" in line
    assert "free now: 0 of 2 CPUs" in line


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_placement_group_that_finds_no_place_ends_too():
    (line,) = run_with_ray(
        """
        start(2)
        limit_placement_groups(3.0)
        from verl.single_controller.ray.base import RayResourcePool
        told(lambda: RayResourcePool([1], max_colocate_count=3).get_placement_groups(device_name="cuda"))
        """
    )
    assert line.startswith("ResourcesError after ")
    assert "1 bundles {'CPU': 3.0" in line
    assert "on one node within resource_timeout=3 s; free now: 2 of 2 CPUs, 1 of 1 GPUs" in line


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_transfer_queue_that_fits_is_found_by_verl_s_own_call():
    lines = run_with_ray(
        """
        start(8)
        with aborted_by_watchers():
            start_transfer_queue(config)
        import transfer_queue
        transfer_queue.init(config.transfer_queue)
        print(describe_free())
        transfer_queue.close()
        """
    )
    assert lines[-1] == "5 of 8 CPUs, 1 of 1 GPUs"
