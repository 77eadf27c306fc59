"""A package with the modules of bfcl-eval that are used here, in a virtual environment of its own, and one task."""

from __future__ import annotations

import json
import sys
import venv
from pathlib import Path
from typing import Any

_BACKEND = """
CLASS_FILE_PATH_MAPPING = {"MathAPI": "bfcl_eval.math_api", "TicketAPI": "bfcl_eval.not_installed"}
MULTI_TURN_FUNC_DOC_FILE_MAPPING = {"MathAPI": "math_api.json"}
"""
_CLASS = """
import time

print("a module that prints")


class MathAPI:
    def _load_scenario(self, config, long_context=False):
        self.total = config["total"]

    def add(self, number, label=""):
        self.total += number
        return {"total": self.total, "label": label}

    def reset(self):
        self.total = 0
        return None

    def compute(self, seconds):
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def allocate(self, megabytes):
        return str(len(bytearray(megabytes << 20)))

    def sleep(self, seconds):
        time.sleep(seconds)
"""
_EXECUTION = """
import json

from bfcl_eval.math_api import MathAPI

states = {}


def execute_multi_turn_func_call(calls, initial_config, involved_classes, model, entry, long_context=False):
    if model not in states:
        states[model] = MathAPI()
        states[model]._load_scenario(initial_config["MathAPI"])
    results = []
    for call in calls:
        try:
            result = eval("state." + call, {"state": states[model]})
            results.append(json.dumps(result) if isinstance(result, dict) else str(result))
        except Exception as error:
            results.append(f"Error during execution: {error}")
    return results, {"MathAPI": states[model]}
"""
_CHECKER = """
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils import execute_multi_turn_func_call as execute


def multi_turn_checker(turns, truth, entry, category, model):
    for number, (turn, gold) in enumerate(zip(turns, truth)):
        states = []
        for name, calls in (("eval", [call for step in turn for call in step]), ("truth", gold)):
            states.append(execute(calls, entry["initial_config"], [], model + name, entry["id"])[1]["MathAPI"].total)
            int(states[-1])  # raises for an infinite one
        if states[0] != states[1]:
            return {"valid": False, "error_type": "state", "error_message": f"turn {number}: {states}"}
    return {"valid": True}
"""
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "dict",
            "properties": {"number": {"type": "float"}, "label": {"type": "string"}},
            "required": ["number"],
        },
    },
    {"name": "reset", "description": "Start again.", "parameters": {"type": "dict", "properties": {}}},
    *(
        {
            "name": name,
            "description": f"{name}.",
            "parameters": {"type": "dict", "properties": {unit: {"type": "float"}}},
        }
        for name, unit in (("compute", "seconds"), ("sleep", "seconds"), ("allocate", "megabytes"))
    ),
]
ENTRY: dict[str, Any] = {
    "id": "multi_turn_small_0",
    "question": [[{"role": "user", "content": "Add 2."}], [], [{"role": "user", "content": "Add 3."}]],
    "initial_config": {"MathAPI": {"total": 5}},
    "involved_classes": ["MathAPI"],
    "missed_function": {"1": ["reset"]},
}
TRUTH: list[list[str]] = [["add(number=2)"], ["reset()"], ["add(3)"]]


def make_stand_in(folder: Path) -> Path:
    """Make the environment in `folder` and return its interpreter."""
    venv.create(folder, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    package = folder / "lib" / version / "site-packages" / "bfcl_eval"
    checker = package / "eval_checker" / "multi_turn_eval"
    data = package / "data"
    files = {
        package / "__init__.py": "",
        package / "math_api.py": _CLASS,
        package / "constants" / "__init__.py": "",
        package / "constants" / "executable_backend_config.py": _BACKEND,
        package / "eval_checker" / "__init__.py": "",
        checker / "__init__.py": "",
        checker / "multi_turn_utils.py": _EXECUTION,
        checker / "multi_turn_checker.py": _CHECKER,
        data / "BFCL_v4_multi_turn_small.json": json.dumps(ENTRY),
        data / "possible_answer" / "BFCL_v4_multi_turn_small.json": json.dumps(
            {"id": ENTRY["id"], "ground_truth": TRUTH}
        ),
        data / "multi_turn_func_doc" / "math_api.json": "\n".join(map(json.dumps, FUNCTIONS)),
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return folder / "bin" / "python"
