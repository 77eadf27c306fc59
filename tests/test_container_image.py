"""The Dockerfile, built by podman on a Debian made here, and the project in that image.

Needs root, podman and debootstrap, or an image that VERL_TOOL_TEST_BASE names. The build reaches packages as this
machine does: by its network, its folders of wheels and its certificates.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMAGE = "localhost/verl-tool-test:cpu"
TESTS = ("tests/formats", "tests/test_protocol.py")
SANDBOX = """
import asyncio
from verl_tool.sandbox import SandboxPool
async def level():
    async with SandboxPool(required_level="full") as pool:
        print(pool.level.describe())
asyncio.run(level())
"""
pytestmark = [
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
    pytest.mark.e2e,
    pytest.mark.timeout(3600),
]


def run(*command: str, seconds: float = 600) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if given := os.environ.get("VERL_TOOL_TEST_BASE"):
        yield given
        return
    if shutil.which("debootstrap") is None or os.geteuid() != 0:
        pytest.skip("no base image: debootstrap is not installed, or this is not root; VERL_TOOL_TEST_BASE names one")
    folder, name = tmp_path_factory.mktemp("base"), "localhost/verl-tool-test:base"
    run("debootstrap", "--variant=minbase", "bookworm", str(folder / "root"))
    run("tar", "-C", str(folder / "root"), "-cf", str(folder / "root.tar"), ".")
    run("podman", "import", str(folder / "root.tar"), name)
    shutil.rmtree(folder)
    yield name
    run("podman", "rmi", "--force", name)


def packages() -> list[str]:
    """Options by which the build reaches packages as this machine does."""
    options = ["--network", "host"]
    if wheels := os.environ.get("PIP_FIND_LINKS"):
        options += ["--volume", f"{wheels}:{wheels}:ro", "--build-arg", f"PIP_FIND_LINKS={wheels}"]
    if certificates := os.environ.get("SSL_CERT_FILE"):
        options += [
            "--volume",
            f"{certificates}:/run/certificates:ro",
            "--build-arg",
            "SSL_CERT_FILE=/run/certificates",
        ]
    return options


@pytest.fixture(scope="module")
def image(base: str) -> Iterator[str]:
    settings = (f"BASE={base}", "PROFILE=cpu", "EXTRAS=dev", f"IMAGE={IMAGE}", f"ARGS={' '.join(packages())}")
    run("make", "image", *settings, seconds=3000)
    yield IMAGE
    run("podman", "rmi", "--force", IMAGE)


def test_any_user_can_train_and_test_with_it(image):
    def inside(*command: str) -> str:
        return run("podman", "run", "--rm", "--network=none", "--user=1000:1000", image, *command, seconds=1500)

    assert "2.13.0+cpu" in inside("python", "-c", "import torch, verl, vllm, verl_tool; print(torch.__version__)")
    assert " passed" in inside("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
    inside("sh", "-c", "touch data/mine outputs/mine ~/mine && gcc --version && python3-config --includes")
    assert "gpu" in inside("env", "DRY_RUN=command", "PROFILE=gpu", "bash", "examples/train/acecoder/train.sh")


def test_the_sandbox_isolates_in_it(image):
    allowed = ("--security-opt=seccomp=unconfined", "--security-opt=unmask=ALL")
    options = ("--rm", "--init", "--network=none", *allowed)
    assert run("podman", "run", *options, image, "python", "-c", SANDBOX).startswith("full")


def test_nothing_of_this_machine_is_in_it(image):
    listed = run("podman", "run", "--rm", "--network=none", image, "sh", "-c", "ls -A /opt/verl-tool; env")
    assert not {".git", ".venv", ".tools"} & set(listed.split())
    assert "SSL_CERT_FILE" not in listed
    assert "PIP_FIND_LINKS" not in listed
