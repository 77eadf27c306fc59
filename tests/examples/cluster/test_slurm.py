"""The Slurm script in real jobs of a real Slurm of two nodes, which are network namespaces of this machine.

A GPU of a node is a device file that is none. Needs root, and Debian's `slurm-wlm` and `munge`.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from two_nodes import DEVICE, NEEDS_NAMESPACES, Node, two_nodes

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "nsenter", "unshare")
ABSENT = [program for program in PROGRAMS if shutil.which(program) is None]
pytestmark = [
    NEEDS_NAMESPACES,
    pytest.mark.skipif(bool(ABSENT), reason=f"not installed: {', '.join(ABSENT)} (apt-get install slurm-wlm munge)"),
    pytest.mark.e2e,
    pytest.mark.timeout(1200),
]
ROOT = Path(__file__).parents[3]
SCRIPT = "examples/cluster/slurm.sh"
ASK = (
    "import os, ray; ray.init(); print('nodes', len(ray.nodes()), ray.cluster_resources()['GPU'], os.environ['N_GPUS'])"
)
CONFIG = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=node[1-2] CPUs=16 RealMemory=4000 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=node[1-2] Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """A controller and two nodes."""

    folder: Path
    nodes: tuple[Node, Node]

    def command(self, number: int, *words: str) -> list[str]:
        """`words` on node `number`, which has a host name and a table of hosts of its own."""
        name, script = f"node{number}", 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        namespace = f"--net=/run/netns/{self.nodes[number - 1].name}"
        inside = ["unshare", "--mount", "--uts", "sh", "-c", script, str(self.folder / "hosts"), name]
        return ["nsenter", namespace, *inside, *words]

    def call(self, *words: str, **variables: str) -> str:
        """The output of a command on the first node, in the project's folder."""
        here = {"VERL_TOOL_VENV": sys.prefix, "VERL_TOOL_SKIP_INSTALL": "1", "VERL_TOOL_SKIP_SYSTEM": "1"}
        here |= {"SLURM_CONF": str(self.folder / "slurm.conf"), "PROFILE": "cpu", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            self.command(1, *words), cwd=ROOT, env=os.environ | here | {"GLOO_SOCKET_IFNAME": DEVICE} | variables,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def submit(self, *command: str, **variables: str) -> str:
        """The number of a new job that runs `command` by the script."""
        options = ("--parsable", "--gpus-per-node=1", "--cpus-per-task=8", "--mem=0", f"--output={self.log}")
        return self.call("sbatch", *options, SCRIPT, *command, **variables).strip()

    @property
    def log(self) -> Path:
        return self.folder / "job.log"

    def state(self, job: str) -> str:
        words = self.call("scontrol", "show", "job", job).split()
        return next(word.removeprefix("JobState=") for word in words if word.startswith("JobState="))

    def wait(self, job: str, *states: str) -> str:
        return wait_for(lambda: (state := self.state(job)) in states and state, self.log)

    def nothing_is_left(self) -> None:
        """No process of Ray on a node, no folder with a token."""
        wait_for(
            lambda: not [t for n in self.nodes for t in n.titles() if "raylet" in t or "gcs_server" in t], self.log
        )
        assert not list(ROOT.glob(".slurm-*"))


def wait_for(condition: Callable[[], object], log: Path, seconds: float = 500) -> object:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, log.read_text() if log.exists() else "no log"
        time.sleep(1)
    return found


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool.node1", "spool.node2"):
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder))
    (folder / "gres.conf").write_text("NodeName=node[1-2] Name=gpu File=/dev/null\n")
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    with ExitStack() as stack:
        cluster = Slurm(folder, stack.enter_context(two_nodes()))
        hosts = "".join(f"{node.address} node{number}\n" for number, node in enumerate(cluster.nodes, 1))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        config = ("-D", "-f", str(folder / "slurm.conf"))
        files = [f"--{kind}-file={folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        for command in (
            ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *files],
            cluster.command(1, "slurmctld", *config),
            *(cluster.command(number, "slurmd", "-N", f"node{number}", *config) for number in (1, 2)),
        ):
            log = stack.enter_context((folder / "daemons.log").open("ab"))
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"SLURM_CONF": config[-1]})
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
            time.sleep(1)
        ready = lambda: "idle" in cluster.call("sinfo", "--noheader", "--format=%T")  # noqa: E731
        wait_for(ready, folder / "daemons.log", 60)
        yield cluster


@pytest.fixture(autouse=True)
def new_log(slurm: Slurm) -> None:
    slurm.log.unlink(missing_ok=True)


def test_the_command_runs_when_all_nodes_have_joined(slurm):
    job = slurm.submit(sys.executable, "-c", ASK)
    assert slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", slurm.log.read_text()
    assert "nodes 2 2.0 1" in slurm.log.read_text()
    slurm.nothing_is_left()


def test_a_node_that_does_not_join_is_named(slurm, tmp_path):
    """CONTAINER stands before the command on each node; here one that never starts on the second."""
    container = tmp_path / "container"
    container.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" = node1 ] || exec sleep 1000\nexec "$@"\n')
    container.chmod(stat.S_IRWXU)
    job = slurm.submit(sys.executable, "-c", ASK, CONTAINER=str(container), JOIN_SECONDS="90")
    assert slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED") == "FAILED"
    assert (
        "after 90 s the Ray cluster is not complete: 1 of 2 nodes have joined, node2 has not" in slurm.log.read_text()
    )
    slurm.nothing_is_left()


def test_at_its_time_limit_a_job_is_stopped_and_goes_on_later(slurm, tmp_path):
    """Slurm sends the batch script SIGUSR1 some time before the limit; here the test does."""
    done = tmp_path / "checkpoint"
    train = f'if [ -e {done} ]; then echo resumed; else touch {done}; trap "exit 1" TERM; while :; do sleep 1; done; fi'
    job = slurm.submit("bash", "-c", train)
    wait_for(done.exists, slurm.log)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    slurm.wait(job, "PENDING")
    slurm.call("scontrol", "update", f"JobId={job}", "StartTime=now")
    assert slurm.wait(job, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", slurm.log.read_text()
    assert "resumed" in slurm.log.read_text()
    slurm.nothing_is_left()


def test_a_cancelled_job_leaves_nothing(slurm, tmp_path):
    started = tmp_path / "started"
    job = slurm.submit("bash", "-c", f"touch {started}; sleep 1000")
    wait_for(started.exists, slurm.log)
    slurm.call("scancel", job)
    slurm.wait(job, "CANCELLED")
    slurm.nothing_is_left()
