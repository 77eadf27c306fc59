"""The files for KubeRay and SkyPilot: their commands run with stand-ins for what a cluster has, their numbers agree."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "examples" / "cluster"
FAKE_PYTHON = f"""#!/bin/sh
case "$*" in *wait_for_nodes.py*) echo "$@" >>"$RECORD" ;; *) exec {sys.executable} "$@" ;; esac
"""
FAKE_RAY = """#!/bin/sh
echo "$@" >>"$RECORD"
echo "Ray runtime started."
exec sleep 600
"""


@pytest.fixture
def run(tmp_path: Path):
    """Run a shell command with a stand-in for Ray that records how it is called; a recipe prints its options only."""
    for name, text in (("ray", FAKE_RAY), ("python", FAKE_PYTHON)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    record = tmp_path / "record"
    record.touch()

    def run_command(command: str, code: int = 0, **variables: str) -> tuple[list[str], list[str]]:
        skip = {"VERL_TOOL_SKIP_INSTALL": "1", "VERL_TOOL_VENV": str(tmp_path / "none"), "DRY_RUN": "command"}
        environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "RECORD": str(record)}
        done = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=environment | skip | variables,
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        return done.stdout.splitlines(), record.read_text().splitlines()

    return run_command


@pytest.fixture(scope="module")
def job() -> dict:
    return yaml.safe_load((CLUSTER / "ray_job.yaml").read_text())


def pods(job: dict) -> list[tuple[int, dict]]:
    """Number and container of the pods of each group, the head's first."""
    cluster = job["spec"]["rayClusterSpec"]
    groups = [(1, cluster["headGroupSpec"]), *((group["replicas"], group) for group in cluster["workerGroupSpecs"])]
    return [(count, group["template"]["spec"]["containers"][0]) for count, group in groups]


def variables(container: dict) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}


def test_the_ray_job_trains_on_what_its_cluster_has(job, run):
    set_here = variables(pods(job)[0][1])
    assert sum(count for count, _ in pods(job)) == int(set_here["NNODES"])
    for _, container in pods(job):
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(set_here["N_GPUS"])
    entrypoint = job["spec"]["entrypoint"].replace("/opt/verl-tool", str(ROOT))
    options, [waiting] = run(entrypoint, RAY_ADDRESS="auto", **set_here)
    assert {"trainer.nnodes=2", "trainer.n_gpus_per_node=8", "gpu"} <= set(options)
    assert waiting.endswith("wait_for_nodes.py --nodes 2 --gpus 8 --timeout 600")


def test_the_ray_job_fits_the_image_and_the_other_file(job):
    service = yaml.safe_load((ROOT / "examples" / "serve" / "ray_service.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == service["spec"]["rayClusterConfig"]["rayVersion"]
    pins = (ROOT / "scripts" / "constraints" / "gpu.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in pins
    assert cluster["authOptions"] == {"mode": "token"}
    folder = "WORKDIR /opt/verl-tool\n"
    assert folder in (ROOT / "Dockerfile").read_text()
    for _, container in pods(job):
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert {"/dev/shm", "/opt/verl-tool/data", "/opt/verl-tool/outputs"} <= mounts


@pytest.mark.parametrize("rank", [0, 1])
def test_the_sky_task_starts_each_node_as_its_rank_says(rank, run):
    task = yaml.safe_load((CLUSTER / "sky.yaml").read_text())
    address = "127.0.0.1"
    # Nobody listens at the head, whose Ray the worker waits for.
    options, record = run(
        task["run"], code=rank, SKYPILOT_NODE_RANK=str(rank), SKYPILOT_NUM_NODES=str(task["num_nodes"]),
        SKYPILOT_NUM_GPUS_PER_NODE="8", SKYPILOT_NODE_IPS=f"{address}\n192.0.2.2", RAY_PORT="9",
        **({"JOIN_SECONDS": "1"} if rank else {}), **task["envs"],
    )  # fmt: skip
    if rank:
        assert record == options == []
        return
    start, waiting = record
    assert start.startswith(
        f"start --head --port 9 --include-dashboard false --block --num-cpus {max(os.cpu_count(), 38)} --num-gpus 8 "
    )
    assert start.endswith(f"--node-ip-address {address}")
    assert waiting.endswith(f"--nodes 2 --gpus 8 --timeout 600 --names {address},192.0.2.2")
    assert {"trainer.nnodes=2", "trainer.n_gpus_per_node=8", "run_dir=/storage/acecoder"} <= set(options)
    assert set(task["secrets"]) == {"RAY_AUTH_TOKEN"}


def test_a_recipe_takes_no_variable_of_these_scripts_for_a_misspelt_one_of_its_own(run):
    """Those that the scripts document and set, and Slurm's, as they reach the command on the first node."""
    pytest.importorskip("verl")
    from verl_loop import composed

    from verl_tool.trainer.preflight.impossible_settings import LAUNCH_VARIABLES, find_misspelt_variables

    texts = [(CLUSTER / name).read_text() for name in ("run_node.sh", "slurm.sh", "sky.yaml", "ray_job.yaml")]
    names = {name for text in texts for name in re.findall(r"\b[A-Z][A-Z0-9_]{2,}\b", text)}
    names |= {f"SLURM_{name}" for name in ("NNODES", "JOB_ID", "NODEID", "NTASKS", "GPUS_ON_NODE", "STEPID", "NPROCS")}
    assert {"NODES", "NODE_ADDRESS", "JOIN_SECONDS"} <= names
    given = {"NODE_RANK": "0", "HEAD": "127.0.0.1", "NNODES": "1", "N_GPUS": "0", "STOP_FILE": "/nowhere"}
    given |= {"RAY_PORT": "9", "JOIN_SECONDS": "5"}
    printed, _ = run(
        "bash examples/cluster/run_node.sh env", **dict.fromkeys(names - {"RECORD", "PATH", "HOME"}, "1") | given
    )
    environment = {line.partition("=")[0]: "1" for line in printed}
    launch = (ROOT / "examples" / "train" / "launch.sh").read_text()
    [table] = re.findall(r'^variables="\n(.*?)^"', launch, re.DOTALL | re.MULTILINE)
    environment[LAUNCH_VARIABLES] = " ".join(line.split()[0] for line in table.splitlines() if line.strip())
    assert "NNODES" in environment[LAUNCH_VARIABLES]
    assert list(find_misspelt_variables(environment, composed())) == []


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("script", ["run_node.sh", "slurm.sh"])
def test_the_scripts_pass_shellcheck(script):
    done = subprocess.run(
        ["shellcheck", "--severity=warning", str(CLUSTER / script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(("missing", "words"), [("HEAD", "HEAD is not set"), ("N_GPUS", "N_GPUS is not set")])
def test_a_node_names_missing_variables(missing, words):
    given = {"NODE_RANK": "0", "HEAD": "127.0.0.1", "NNODES": "1", "N_GPUS": "0", "PATH": os.environ["PATH"]}
    given.pop(missing)
    done = subprocess.run(
        ["bash", str(CLUSTER / "run_node.sh"), "true"],
        env=given,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert words in done.stderr
