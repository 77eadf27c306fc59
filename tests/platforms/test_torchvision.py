"""PyPI's torchvision can be imported beside a CPU build of torch; scripts/env.sh sees to that."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.slow
SITE = Path(__file__).parents[2] / "scripts" / "site"
STAND_IN = """
def _has_ops():
    return {has_ops}
"""


def run(code: str, *path: Path) -> str:
    environment = {"PYTHONPATH": ":".join(map(str, path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.skipif(find_spec("torchvision") is None, reason="torchvision is not here: source scripts/env.sh train")
def test_torchvision_can_be_imported() -> None:
    code = "import torch, torchvision.ops, qwen_vl_utils; print(torch.ops.torchvision.nms)"
    assert run(code) == "torchvision.nms"


@pytest.mark.parametrize(("has_ops", "declared"), [("False", "['nms', 'qnms']"), ("True", "[]")])
def test_operators_are_declared_where_they_do_not_load(tmp_path: Path, has_ops: str, declared: str) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "extension.py").write_text(STAND_IN.format(has_ops=has_ops))
    code = """
import verl_tool_torchvision, importlib
importlib.reload(verl_tool_torchvision)  # as if it were installed and imported once more
import torchvision.extension, torch
print([name for name in ("nms", "qnms") if hasattr(torch.ops.torchvision, name)])
"""
    assert run(code, tmp_path, SITE) == declared
