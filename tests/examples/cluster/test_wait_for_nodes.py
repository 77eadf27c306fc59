"""What is missing of a Ray cluster, and the deadline of waiting for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from script_module import load_script

SCRIPT = Path(__file__).parents[3] / "examples" / "cluster" / "wait_for_nodes.py"
describe_missing = load_script("wait_for_nodes", SCRIPT).describe_missing


def node(number: int, gpus: int, alive: bool = True) -> dict:
    resources = {"CPU": 8.0} | ({"GPU": float(gpus)} if gpus else {})
    name, address = f"node{number}", f"192.0.2.{number}"
    return {"NodeManagerAddress": address, "NodeManagerHostname": name, "Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("nodes", "missing"),
    [
        ([node(1, 8), node(2, 8)], ""),
        ([node(1, 8), node(2, 8), node(3, 0)], ""),  # a head without GPUs is not counted
        ([node(1, 8)], "1 of 2 nodes have joined, node2 has not"),
        ([node(1, 8), node(2, 8, alive=False)], "1 of 2 nodes have joined, node2 has not"),
        ([node(1, 8), node(2, 7)], "2 of 2 nodes have joined, node2 (192.0.2.2) has 7 GPUs, not 8"),
        ([], "0 of 2 nodes have joined, node1 has not, node2 has not"),
    ],
)
def test_what_is_missing_is_named(nodes, missing):
    assert describe_missing(nodes, 2, 8, ["node1", "node2"]) == missing


def test_nodes_are_known_by_their_addresses_too():
    assert describe_missing([node(1, 8)], 2, 8, ["192.0.2.1", "192.0.2.2"]).endswith("joined, 192.0.2.2 has not")


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_ends_the_wait():
    """Port 9 is nobody's: Ray goes on trying for longer than the timeout."""
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--nodes", "2", "--timeout", "5"],
        env=os.environ | {"RAY_ADDRESS": "127.0.0.1:9", "RAY_AUTH_MODE": "disabled"},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert run.returncode == 1
    assert "error: after 5 s the Ray cluster is not complete: it does not answer" in run.stderr
