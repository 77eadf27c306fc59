"""A real Ray with few CPUs: what it can never give is an error at once, what others hold one after a deadline."""

from __future__ import annotations

import re
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
    few = {{"trainer.n_gpus_per_node": 1, "resource_timeout": 1.0, UNITS: 2}}
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
    """What a script prints in a process of its own, for its Ray is none of other tests': a line for each wait.

    Configs are composed before, for that takes a moment, and some of what is told must come at once.
    """
    script = """
        start(8)
        many_units = changed(**{UNITS: 8})
        two_gpus = changed(**{UNITS: 0, "trainer.n_gpus_per_node": 2, "trainer.use_v1": False})
        told(lambda: wait_for_resources(many_units))
        told(lambda: wait_for_resources(two_gpus))
        told(lambda: wait_for_resources(config))
        other = take(num_cpus=2)
        told(lambda: wait_for_resources(config))
        more = take(num_cpus=5)
        def begin():
            with aborted_by_watchers():
                start_transfer_queue(config)
        told(begin)
        limit_placement_groups(1.0)
        from verl.single_controller.ray.base import RayResourcePool
        told(lambda: RayResourcePool([1], max_colocate_count=3).get_placement_groups(device_name="cuda"))
        told(lambda: wait_until_started(Other.options(num_cpus=4).remote(), config))
        told(lambda: wait_until_started(other, config))
        del other, more
        ray.shutdown()
        start(20, gpus=3)
        pools = {"reward.reward_model.enable_resource_pool": True, "reward.reward_model.n_gpus_per_node": 2,
                 "reward.reward_model.nnodes": 1, UNITS: 0}
        one_pool = changed(**pools)
        two_pools = changed(**pools | {"reward.reward_model.nnodes": 2})
        separate = changed(**{"trainer.v1.trainer_mode": "separate_async", "actor_rollout_ref.rollout.nnodes": 1,
                              "actor_rollout_ref.rollout.n_gpus_per_node": 3, UNITS: 0})
        told(lambda: wait_for_resources(one_pool))
        other = take(num_gpus=1)
        told(lambda: wait_for_resources(one_pool))
        told(lambda: wait_for_resources(two_pools))
        told(lambda: wait_for_resources(separate))
    """
    code = SETTING.format(helpers=str(HELPERS)) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()


pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.timeout(600)]


def test_what_the_nodes_can_never_give_is_an_error_at_once(lines):
    few_cpus, few_gpus = lines[:2]
    assert few_cpus.startswith(
        "ResourcesError after 0: the training reserves 13 CPU slots of Ray: 1 (trainer) + 9 (Transf"
    )
    assert "Ray's 1 nodes have 8 in all" in few_cpus
    assert few_gpus.startswith("ResourcesError after 0: trainer needs 1 times 2 GPUs and 6 CPU slots on one node")
    assert "and Ray's 1 nodes have that 0 times (1 GPUs, 8 CPUs); change trainer.nnodes" in few_gpus


def test_what_others_hold_is_waited_for_until_the_deadline(lines):
    enough, taken = lines[2:4]
    assert enough == "nothing"
    assert taken.startswith("ResourcesError after ")
    assert "the training reserves 7 CPU slots" in taken
    assert "and 6 were free (the run's tool server takes one for each replica) after resource_timeout=1 s" in taken
    assert "free now: 6 of 8 CPUs, 1 of 1 GPUs" in taken


def test_an_unplaced_transfer_queue_ends_with_the_requested_resources(lines):
    """Where somebody took the slots after they were seen free: verl's own call would wait for ever."""
    assert lines[4].startswith("ClaimTimeoutError after ")
    told = "Ray did not give TransferQueue's controller and 2 storage units a CPU slot each within resource_timeout=1 s"
    assert told in lines[4]
    assert "7 CPU slots of Ray" in lines[4]
    assert "of 8 CPUs" in lines[4]


def test_a_placement_group_that_finds_no_place_ends_too(lines):
    assert lines[5].startswith("ResourcesError after ")
    assert "1 bundles {'CPU': 3.0" in lines[5]
    assert "on one node within resource_timeout=1 s; free now: " in lines[5]


def test_a_trainer_that_finds_no_slot_ends_with_what_is_free(lines):
    assert lines[6].startswith(
        "ResourcesError after 1: Ray did not start the trainer's process, which takes 1 CPU slot"
    )
    assert "free now: " in lines[6]
    assert lines[7] == "nothing"


def test_gpus_of_a_reward_model_and_of_sampling_nodes_are_counted(lines):
    """Those of an engine that only samples are asked for by the engine: here three of one GPU each."""
    enough, taken, two_groups, separate = lines[8:]
    assert enough == "nothing"
    assert "the training needs 3 GPUs: 1 (trainer) + 2 (reward.reward_model), and 2 were free after" in taken
    assert "reward.reward_model needs 2 times 2 GPUs and 6 CPU slots on one node" in two_groups
    assert two_groups.startswith("ResourcesError after 0: ")
    assert separate.startswith("ResourcesError after 0: the training needs 4 GPUs: 1 (trainer) + 3 (actor_rollout_ref.")


@pytest.mark.e2e
def test_a_head_without_cpu_slots_is_left_alone():
    """As KubeRay starts it: TransferQueue's storage units go to nodes that have slots. Nodes with GPUs are asked for
    packages."""
    script = """
        from ray.cluster_utils import Cluster
        small = {"object_store_memory": 100_000_000}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **small})
        cluster.add_node(num_cpus=7, num_gpus=1, **small)
        ray.init(cluster.address, log_to_driver=False)
        unlimited = changed(resource_timeout=120.0)
        told(lambda: wait_for_resources(unlimited))
        with aborted_by_watchers():
            start_transfer_queue(unlimited)
        told(lambda: wait_for_resources(changed()))
        other = changed(**{"transfer_queue.backend.SimpleStorage.required_node_resource": "storage"})
        told(lambda: wait_for_resources(other))
        sys.modules["only_here"] = sys
        print(import_problem_of_nodes("json", unlimited), import_problem_of_nodes("only_here", unlimited))
        ray.shutdown()
        cluster.shutdown()
    """
    code = SETTING.format(helpers=str(HELPERS)) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
    enough, started, lacking, imported = done.stdout.strip().splitlines()[-4:]
    assert enough == "nothing"
    assert "the training reserves 7 CPU slots of Ray" in started
    assert "and 4 were free" in started
    assert re.fullmatch(r"None on node \S+ only_here cannot be imported \(No module named 'only_here'\)", imported)
    assert "required_node_resource=storage, and none of Ray's 2 nodes has it" in lacking
