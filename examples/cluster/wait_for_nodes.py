"""Wait until a Ray cluster has the nodes and GPUs that a training needs.

    RAY_ADDRESS=first-node:6379 python examples/cluster/wait_for_nodes.py --nodes 4 --gpus 8 --timeout 600

Exit code 1 after the timeout; the error names what is missing.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time

import ray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True, help="nodes that must have joined")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that each of them must have")
    parser.add_argument("--timeout", type=float, default=600, help="seconds")
    parser.add_argument("--names", default="", help="names or addresses of the nodes, by commas")
    arguments = parser.parse_args()
    names = [name for name in arguments.names.split(",") if name]
    missing = "it does not answer"

    def give_up() -> None:
        # From a thread, for Ray's own attempts to connect cannot be interrupted.
        print(f"error: after {arguments.timeout:g} s the Ray cluster is not complete: {missing}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(arguments.timeout, give_up)
    timer.daemon = True
    timer.start()
    while True:
        before, missing = missing, describe_missing(list_nodes(), arguments.nodes, arguments.gpus, names)
        if not missing:
            break
        if missing != before:
            print(f"waiting: {missing}", file=sys.stderr, flush=True)
        time.sleep(1)
    timer.cancel()
    print(f"{arguments.nodes} nodes with {arguments.gpus} GPUs each", file=sys.stderr, flush=True)


def list_nodes() -> list[dict]:
    """What Ray says of its nodes; none while the cluster cannot be joined, as when its head is still starting."""
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)
        return ray.nodes()
    except (ConnectionError, RuntimeError) as error:
        print(f"waiting: {error}", file=sys.stderr, flush=True)
        ray.shutdown()
        return []


def describe_missing(nodes: list[dict], count: int, gpus: int, names: list[str]) -> str:
    """Say what of `count` nodes with `gpus` GPUs each is missing among Ray's `nodes`; empty if nothing is."""
    alive = {node["NodeManagerAddress"]: node for node in nodes if node["Alive"]}
    complete = {address for address, node in alive.items() if node["Resources"].get("GPU", 0) >= gpus}
    if len(complete) >= count:
        return ""
    reasons = [f"{len(alive)} of {count} nodes have joined"]
    reasons += [f"{name} has not" for name in names if not is_among(name, alive)]
    for address in alive.keys() - complete:
        has = alive[address]["Resources"].get("GPU", 0)
        reasons.append(f"{alive[address]['NodeManagerHostname']} ({address}) has {has:g} GPUs, not {gpus}")
    return ", ".join(reasons)


def is_among(name: str, alive: dict[str, dict]) -> bool:
    """Whether the node that has this name or address is among those that are alive, by address."""
    if any(node["NodeManagerHostname"].split(".")[0] == name.split(".")[0] for node in alive.values()):
        return True
    try:
        return socket.gethostbyname(name) in alive
    except OSError:
        return False


if __name__ == "__main__":
    main()
