"""Makes the loop's toy tokenizer known to these tests, and a real model where one is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "agent_loop"))

ROOT = Path(__file__).parents[2]
MODEL_SECONDS = 1500


@pytest.fixture(scope="session")
def calculator_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of the calculator recipe, which has just begun to call the tool.

    It takes half a minute on two idle cores. VERL_TOOL_CALCULATOR_MODEL names one that is there already.
    """
    made = os.environ.get("VERL_TOOL_CALCULATOR_MODEL")
    if made:
        return Path(made)
    folder = tmp_path_factory.mktemp("model") / "calculator"
    script = ROOT / "examples/train/calculator/warmup.py"
    command = [sys.executable, str(script), "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=MODEL_SECONDS)
    return folder
