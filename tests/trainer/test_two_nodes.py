"""A training over two Ray nodes, and the loss of one of them.

The nodes are two network namespaces of this machine (`two_nodes`). The commands are those of the recipes' README. Takes
minutes; what the tool server does when a node is lost at other moments is tested without a training, in
``tests/servers/cluster/test_lost_node.py``.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from calculator_run import TRAINS_ON_CPU, Run
from two_nodes import NEEDS_NAMESPACES, PORT, Node, environment, start_second, two_node_cluster

pytestmark = [*TRAINS_ON_CPU, NEEDS_NAMESPACES, pytest.mark.e2e, pytest.mark.timeout(2400)]

RECIPE = Path(__file__).parents[2] / "examples" / "train" / "gsm8k" / "train.sh"
PARTS = ("WorkerDict", "vLLMHttpServer", "RolloutWorker", "RewardLoopWorker", "ServeReplica")
"""Titles of the processes that train, sample, drive trajectories, grade and run tools."""


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
        """Variables of the launcher: two steps, a checkpoint each."""
        here = {"VERL_TOOL_VENV": sys.prefix, "VERL_TOOL_SKIP_INSTALL": "1", "VERL_TOOL_SKIP_SYSTEM": "1"}
        return here | {"PROFILE": "cpu", "RUN": str(self.folder), "STEPS": "2", "SAVE_FREQ": "1", "TEST_FREQ": "-1"}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    with two_node_cluster(tmp_path_factory.mktemp("ray")) as both:
        yield both


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
        after = random.uniform(0, 10)  # somewhere in the second step
        time.sleep(after)
        second.lose()
        assert process.wait(300) == 1, f"lost {after:.1f} s after the first step\n{run.printed()[-8000:]}"
    assert "the training ended" in run.printed()

    start_second(nodes, tmp_path)
    with run.started_on(first) as process:
        assert process.wait(1200) == 0, run.printed()[-8000:]
    trained = run.steps("metrics.1.jsonl") | run.steps()
    assert set(trained) == {1, 2}
    assert min(run.steps()) > 1
    for data in trained.values():
        # Tools were reached from both nodes, and the engines of both have the weights that were trained over both.
        assert data["agent/faulted"] == 0
        assert data["training/rollout_probs_diff_max"] < 1e-4
