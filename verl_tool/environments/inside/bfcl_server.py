"""Serve BFCL's multi-turn tasks on a Unix socket, run by the Python that has the package bfcl-eval.

    PYTHON -I bfcl_server.py serve SOCKET MEMORY_BYTES CPU_SECONDS
    PYTHON -I bfcl_server.py rows multi_turn_base

A connection is one episode in a process of its own: the package evaluates calls in global variables of its module, and
a policy may make it compute for long. Both sides write JSON lines. ``rows`` prints a task a line.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import resource
import socketserver
import sys
from typing import Any

CHECKER = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"
EXECUTION = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils"
BACKEND = "bfcl_eval.constants.executable_backend_config"
CLASSES = frozenset(
    (
        *("GorillaFileSystem", "MathAPI", "MessageAPI", "TwitterAPI"),
        *("TicketAPI", "TradingBot", "TravelAPI", "VehicleControlAPI"),
    )
)
"""Those of the multi-turn tasks. Others of the package reach for the network or for files."""
MODEL = "policy"
MAX_ERROR_CHARACTERS = 1000


def read_lines(*names: str) -> list[Any]:
    """Return the objects in a file of JSON lines in the package's folder of data."""
    [folder] = importlib.import_module("bfcl_eval").__path__
    with open(os.path.join(folder, "data", *names), encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def checked_call(text: str) -> str:
    """Return a call as the package evaluates it. Raises ValueError unless it is one function of literal arguments."""
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text[:200]!r} is no call of a function")
    for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
        ast.literal_eval(value)
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"{text[:200]!r} has arguments without names")
    return text


class BfclTask:
    """One task, as the package plays it."""

    def __init__(self, entry: dict[str, Any]) -> None:
        """Raises ValueError if it involves a class that is not served."""
        unknown = sorted(set(entry["involved_classes"]) - CLASSES)
        if unknown:
            raise ValueError(f"involved_classes has {unknown}; known: {sorted(CLASSES)}")
        self._entry = entry
        self._long_context = "long_context" in entry["id"] or "composite" in entry["id"]

    def functions(self) -> list[Any]:
        """Return the documentation of all functions."""
        files = importlib.import_module(BACKEND).MULTI_TURN_FUNC_DOC_FILE_MAPPING
        names = [files[name] for name in self._entry["involved_classes"]]
        return [function for name in names for function in read_lines("multi_turn_func_doc", name)]

    def call(self, text: str) -> str:
        """Run one call and return what the model reads."""
        results, _ = importlib.import_module(EXECUTION).execute_multi_turn_func_call(
            [checked_call(text)],
            self._entry["initial_config"],
            self._entry["involved_classes"],
            MODEL,
            self._entry["id"],
            long_context=self._long_context,
        )
        return str(results[0])

    def check(self, turns: list[list[list[str]]], truth: list[list[str]]) -> dict[str, Any]:
        """Return what the package's checker says of the calls of each turn."""
        truth = [[checked_call(call) for call in turn] for turn in truth]
        turns = [[[checked_call(call) for call in step] for step in turn] for turn in turns]
        turns += [[] for _ in range(len(truth) - len(turns))]
        category = self._entry["id"].rsplit("_", 1)[0]
        checker = importlib.import_module(CHECKER)
        try:
            found = checker.multi_turn_checker(turns, truth, self._entry, category, MODEL)
        except Exception as error:  # noqa: BLE001 - it runs the policy's calls again
            return {"crashed": describe(error)}
        return {name: found.get(name) for name in ("valid", "error_type", "error_message")}


def describe(error: Exception) -> str:
    """Return an exception's type and message."""
    return f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARACTERS]


class BfclConnection(socketserver.StreamRequestHandler):
    """One connection: the task first, then calls, then the check. It runs in a process of its own."""

    server: Server

    def handle(self) -> None:
        self.server.enter_episode()
        task = None
        for line in self.rfile:
            question = json.loads(line)
            try:
                if task is None:
                    task = BfclTask(question["entry"])
                    answer: dict[str, Any] = {"functions": task.functions()}
                elif "call" in question:
                    answer = {"result": task.call(question["call"])}
                else:
                    answer = task.check(question["turns"], question["truth"])
            except Exception as error:  # noqa: BLE001 - functions of the package, with arguments of a policy
                answer = {"error": describe(error)}
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    """Forks for each connection, and ends with the process that started it."""

    max_children = 100_000
    """The tool bounds the number of episodes."""
    request_queue_size = 1024
    block_on_close = False

    def __init__(self, path: str, memory_bytes: int, cpu_seconds: int) -> None:
        super().__init__(path, BfclConnection)
        self._parent = os.getppid()
        self._limits = {resource.RLIMIT_AS: memory_bytes, resource.RLIMIT_CPU: cpu_seconds}

    def enter_episode(self) -> None:
        """Close what belongs to the server, and set the limits of an episode."""
        self.socket.close()
        for kind, limit in self._limits.items():
            resource.setrlimit(kind, (limit, limit))

    def service_actions(self) -> None:
        super().service_actions()
        if os.getppid() != self._parent:
            os._exit(0)


def serve(path: str, memory_bytes: int, cpu_seconds: int) -> None:
    """Print a line of JSON when connections are accepted, and serve until the parent ends."""
    # Modules and functions of the package may print.
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    paths = importlib.import_module(BACKEND).CLASS_FILE_PATH_MAPPING
    # Those of other suites load a model from the hub, or need packages that need not be there.
    for module in (CHECKER, *(path for name, path in paths.items() if name in CLASSES)):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with Server(path, memory_bytes, cpu_seconds) as server:
        os.write(answers, json.dumps({"ready": True}).encode() + b"\n")
        os.close(answers)
        server.serve_forever(poll_interval=0.5)


def print_rows(category: str) -> None:
    """Print each task of a category with its ground truth."""
    answers = {row["id"]: row["ground_truth"] for row in read_lines("possible_answer", f"BFCL_v4_{category}.json")}
    for entry in read_lines(f"BFCL_v4_{category}.json"):
        print(json.dumps({"entry": entry, "truth": answers[entry["id"]]}))


if __name__ == "__main__":
    if sys.argv[1] == "rows":
        print_rows(sys.argv[2])
    else:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
