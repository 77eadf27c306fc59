"""Serve BFCL's multi-turn tasks on a Unix socket, run by the Python that has the package bfcl-eval.

    PYTHON -I bfcl_server.py serve SOCKET MEMORY_BYTES CPU_SECONDS
    PYTHON -I bfcl_server.py rows multi_turn_base

A connection is one episode in a process of its own: the package evaluates calls in global variables of its module, and
a policy may make it compute for long. Both sides write JSON lines. ``rows`` prints a task a line.
"""

import ast
import contextlib
import importlib
import json
import os
import resource
import socketserver
import sys

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


def data_folder():
    package = importlib.import_module("bfcl_eval")
    return os.path.join(os.path.dirname(package.__file__), "data")


def read_lines(*names):
    with open(os.path.join(data_folder(), *names), encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def checked_call(text):
    """Return a call as the package evaluates it. Raises ValueError unless it is one function of literal arguments."""
    call = ast.parse(text, mode="eval").body
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text[:200]!r} is no call of a function")
    for value in [*call.args, *(keyword.value for keyword in call.keywords)]:
        ast.literal_eval(value)
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"{text[:200]!r} has arguments without names")
    return text


class Task:
    """One task, as the package plays it."""

    def __init__(self, entry):
        unknown = sorted(set(entry["involved_classes"]) - CLASSES)
        if unknown:
            raise ValueError(f"involved_classes has {unknown}; known: {sorted(CLASSES)}")
        self.entry = entry
        self.long_context = "long_context" in entry["id"] or "composite" in entry["id"]

    def functions(self):
        files = importlib.import_module(BACKEND).MULTI_TURN_FUNC_DOC_FILE_MAPPING
        names = [files[name] for name in self.entry["involved_classes"]]
        return [function for name in names for function in read_lines("multi_turn_func_doc", name)]

    def call(self, text):
        results, _ = importlib.import_module(EXECUTION).execute_multi_turn_func_call(
            [checked_call(text)],
            self.entry["initial_config"],
            self.entry["involved_classes"],
            MODEL,
            self.entry["id"],
            long_context=self.long_context,
        )
        return results[0]

    def check(self, turns, truth):
        """Return what the package's checker says of the calls of each turn."""
        truth = [[checked_call(call) for call in turn] for turn in truth]
        turns = [[[checked_call(call) for call in step] for step in turn] for turn in turns]
        turns += [[] for _ in range(len(truth) - len(turns))]
        category = self.entry["id"].rsplit("_", 1)[0]
        found = importlib.import_module(CHECKER).multi_turn_checker(turns, truth, self.entry, category, MODEL)
        return {name: found.get(name) for name in ("valid", "error_type", "error_message")}


class Episode(socketserver.StreamRequestHandler):
    """One connection: the task first, then calls, then the check."""

    def handle(self):
        self.server.socket.close()
        resource.setrlimit(resource.RLIMIT_AS, (self.server.memory_bytes,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (self.server.cpu_seconds,) * 2)
        task = None
        for line in self.rfile:
            question = json.loads(line)
            try:
                if "entry" in question:
                    task = Task(question["entry"])
                    answer = {"functions": task.functions()}
                elif "call" in question:
                    answer = {"result": task.call(question["call"])}
                else:
                    answer = task.check(question["turns"], question["truth"])
            except Exception as error:  # noqa: BLE001 - functions of the package, with arguments of a policy
                answer = {"error": f"{type(error).__name__}: {error}"[:1000]}
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class Server(socketserver.ForkingMixIn, socketserver.UnixStreamServer):
    max_children = 100_000
    """The tool bounds the number of episodes."""
    request_queue_size = 1024
    block_on_close = False

    def service_actions(self):
        super().service_actions()
        if os.getppid() != self.parent:
            os._exit(0)


def serve(path, memory_bytes, cpu_seconds):
    # Modules and functions of the package may print.
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    for module in (CHECKER, BACKEND, *importlib.import_module(BACKEND).CLASS_FILE_PATH_MAPPING.values()):
        # Classes of other suites need packages that need not be there.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with Server(path, Episode) as server:
        server.parent = os.getppid()
        server.memory_bytes, server.cpu_seconds = memory_bytes, cpu_seconds
        os.write(answers, json.dumps({"ready": True}).encode() + b"\n")
        os.close(answers)
        server.serve_forever(poll_interval=0.5)


def print_rows(category):
    answers = {row["id"]: row["ground_truth"] for row in read_lines("possible_answer", f"BFCL_v4_{category}.json")}
    for entry in read_lines(f"BFCL_v4_{category}.json"):
        print(json.dumps({"entry": entry, "truth": answers[entry["id"]]}))


if __name__ == "__main__":
    if sys.argv[1] == "rows":
        print_rows(sys.argv[2])
    else:
        serve(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
