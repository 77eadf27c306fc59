"""A training over two Ray nodes, and the loss of one of them.

The nodes are two network namespaces of this machine with a cable between them: each has a loopback and an address of
its own, so that what listens on one node's 127.0.0.1 is out of the other's reach, as between two machines. The
commands are those of the recipes' README. Needs root; takes minutes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from calculator_run import TRAINS_ON_CPU, Run

pytestmark = [
    *TRAINS_ON_CPU,
    pytest.mark.e2e,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"),
]

RECIPE = Path(__file__).parents[2] / "examples" / "train" / "gsm8k" / "train.sh"
DEVICE = "vt0"
PORT = 6379
TOKEN = secrets.token_hex(32)
PARTS = ("WorkerDict", "vLLMHttpServer", "AgentLoopWorker", "RewardLoopWorker", "ServeReplica")
"""Titles of the processes that train, sample, drive trajectories, grade and run tools."""


@dataclass(frozen=True)
class Node:
    """A network namespace with a Ray node in it."""

    name: str
    address: str

    def command(self, *words: str) -> list[str]:
        """`words` to be run on this node."""
        return ["ip", "netns", "exec", self.name, *words]

    def start_ray(self, folder: Path, *options: str) -> None:
        """``ray start``, with places for one training process. Returns when the node is up."""
        resources = ("--num-cpus", "16", "--num-gpus", "1", "--object-store-memory", "300000000")
        words = (sys.executable, "-m", "ray.scripts.scripts", "start", "--node-ip-address", self.address, *resources)
        log = folder / f"{self.name}.log"
        with log.open("ab") as output:
            done = subprocess.run(
                self.command(*words, *options), env=environment(), stdout=output, stderr=output, timeout=180
            )
        assert done.returncode == 0, log.read_text()[-3000:]

    def titles(self) -> set[str]:
        """Command lines of all processes that run on this node."""
        return {title for pid in self.pids() if (title := _title(pid))}

    def pids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, timeout=10)
        return [int(pid) for pid in listed.stdout.split()]

    def lose(self) -> None:
        """Kill all that runs on this node, as if somebody pulled the plug."""
        while pids := self.pids():
            for pid in pids:
                _kill(pid)
            time.sleep(0.1)


def environment() -> dict[str, str]:
    """Of Ray's processes: one token for the whole cluster, and gloo's network device, since both nodes share a name."""
    dropped = ("PYTHONDONTWRITEBYTECODE", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    return kept | token | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE}


@contextmanager
def two_nodes() -> Iterator[tuple[Node, Node]]:
    """Two namespaces with a cable between them. Whatever runs in them is killed at the end."""
    first, second = (Node(f"vt{os.getpid()}{end}", f"10.77.0.{number}") for number, end in enumerate("ab", 1))
    with ExitStack() as stack:
        for node in (first, second):
            _ip("netns", "add", node.name)
            stack.callback(_ip, "netns", "delete", node.name)
            stack.callback(node.lose)
        peer = ("type", "veth", "peer", "name", DEVICE, "netns", second.name)
        _ip("link", "add", "name", DEVICE, "netns", first.name, *peer)
        for node, other in ((first, second), (second, first)):
            _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _ip("-n", node.name, "link", "set", device, "up")
            # Programs ask which address they would reach the world from, and send nothing there.
            _ip("-n", node.name, "route", "add", "default", "via", other.address)
        yield first, second


class RecipeRun(Run):
    """The recipe gsm8k in its small form over two nodes, started on the first of them."""

    @contextmanager
    def started_on(self, first: Node) -> Iterator[subprocess.Popen[bytes]]:
        """A training under way."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                first.command("bash", str(RECIPE), *self.overrides),
                env=environment() | self.settings() | {"RAY_ADDRESS": f"{first.address}:{PORT}", "NNODES": "2"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait(90)

    def settings(self) -> dict[str, str]:
        """Variables of the launcher: three steps, a checkpoint each."""
        here = {"VERL_TOOL_VENV": sys.prefix, "VERL_TOOL_SKIP_INSTALL": "1", "VERL_TOOL_SKIP_SYSTEM": "1"}
        return here | {"PROFILE": "cpu", "RUN": str(self.folder), "STEPS": "3", "SAVE_FREQ": "1", "TEST_FREQ": "-1"}


def start_second(nodes: tuple[Node, Node], folder: Path) -> None:
    nodes[1].start_ray(folder, "--address", f"{nodes[0].address}:{PORT}")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Two nodes with a Ray cluster on them."""
    folder = tmp_path_factory.mktemp("ray")
    with two_nodes() as (first, second):
        head = ("--head", "--port", str(PORT), "--include-dashboard", "false", "--temp-dir", f"/tmp/vt{os.getpid()}")
        first.start_ray(folder, *head)
        start_second((first, second), folder)
        yield first, second
    shutil.rmtree(f"/tmp/vt{os.getpid()}", ignore_errors=True)


def test_it_spreads_over_both_and_goes_on_after_the_loss_of_one(nodes, tmp_path):
    first, second = nodes
    workers = ("actor_rollout_ref.rollout.agent.num_workers=2", "reward.num_workers=2")
    run = RecipeRun(tmp_path / "run", (*workers, "trainer.val_before_train=false"))
    metrics = run.folder / "metrics.jsonl"
    with run.started_on(first) as process:
        # They are written behind the step's checkpoint.
        run.wait_until(lambda: metrics.exists() and '"step":1' in metrics.read_text(), process, 1200)
        for node in nodes:
            titles = node.titles()
            missing = [part for part in PARTS if not any(part in title for title in titles)]
            assert not missing, f"{missing} not on {node.address}: {sorted(titles)}"
        second.lose()
        assert process.wait(300) == 1, run.printed()[-8000:]
    assert "the training ended" in run.printed()

    start_second(nodes, tmp_path)
    with run.started_on(first) as process:
        assert process.wait(1200) == 0, run.printed()[-8000:]
    trained = run.steps("metrics.1.jsonl") | run.steps()
    assert set(trained) == {1, 2, 3}
    assert min(run.steps()) > 1
    for data in trained.values():
        # Tools were reached from both nodes, and the engines of both have the weights that were trained over both.
        assert data["agent/faulted"] == 0
        assert data["training/rollout_probs_diff_max"] < 1e-4


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=10)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
