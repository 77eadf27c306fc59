"""The GPU stack without a GPU: `bash scripts/test_gpu_stack.sh` makes the environment in which it is imported."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import import_gpu_stack
import pytest

ROOT = Path(__file__).resolve().parents[2]


def gpu_python() -> Path | None:
    """The Python of the GPU stack: this process's, or that of .venv-gpu."""
    if list(Path(sysconfig.get_path("purelib")).glob("vllm-*.dist-info")):
        return Path(sys.executable)
    python = ROOT / ".venv-gpu" / "bin" / "python"
    return python if python.exists() else None


def locked(package: str) -> str:
    pins = (ROOT / "scripts" / "constraints" / "gpu.txt").read_text()
    return re.search(rf"^{package}==([^ ;\n]+)", pins, re.MULTILINE)[1]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(gpu_python() is None, reason="there is no .venv-gpu; bash scripts/test_gpu_stack.sh makes one")
def test_everything_of_ours_and_the_engine_is_imported():
    environment = {k: v for k, v in os.environ.items() if k not in ("VERL_PLATFORM", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(gpu_python()), import_gpu_stack.__file__],
        env=environment | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["failures"] == {}
    expected = {name: locked(name) for name in ("torch", "vllm", "transformers", "ray")}
    assert expected.items() <= found["versions"].items()
