"""What processes that are gone have left in an engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
from containers import REAL_IMAGE, real

from verl_tool.sandbox.backends import Container, ContainerSettings
from verl_tool.sandbox.backends.engine import ContainerEngine
from verl_tool.sandbox.backends.providers.orphans import (
    COMMIT_REPOSITORY,
    OWNER_LABEL,
    _containers,
    owner,
    remove_orphans,
)
from verl_tool.sandbox.limits import SessionLimits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NAME_OWNER = "from verl_tool.sandbox.backends.providers.orphans import owner\nprint(owner())"


def names(*question: str) -> set[str]:
    listed = subprocess.run(["podman", *question], capture_output=True, text=True, check=True, timeout=60)
    return set(listed.stdout.split())


async def test_what_is_of_a_process_that_is_gone_is_removed_and_nothing_else() -> None:
    real("podman")
    gone = (await asyncio.to_thread(subprocess.check_output, [sys.executable, "-c", NAME_OWNER], text=True)).strip()
    assert gone.split(".")[0] == owner().split(".")[0]
    labels = {"verl-tool-left": gone, "verl-tool-living": owner(), "verl-tool-elsewhere": "other-12345678.1.1"}
    limits = ["--network", "none", "--ulimit", "nofile=512:512", "--ulimit", "nproc=1000:1000"]
    image = f"{COMMIT_REPOSITORY}:{gone}.0123"
    try:
        for name, label in labels.items():
            words = ["run", "--detach", "--name", name, "--label", f"{OWNER_LABEL}={label}"]
            words += ["--stop-timeout", "0", *limits, REAL_IMAGE]
            names(*words, "sleep", "100")
        names("tag", REAL_IMAGE, image)
        async with Container(ContainerSettings("podman", REAL_IMAGE), SessionLimits()) as container:
            assert await remove_orphans(ContainerEngine("podman")) >= 2
            assert (await container.exec("echo well")).stdout == "well\n"
        assert names("ps", "--all", "--format", "{{.Names}}") >= {"verl-tool-living", "verl-tool-elsewhere"}
        assert "verl-tool-left" not in names("ps", "--all", "--format", "{{.Names}}")
        assert image not in names("images", "--format", "{{.Repository}}:{{.Tag}}")
        assert await remove_orphans(ContainerEngine("podman")) == 0
    finally:
        names("rm", "--force", "--ignore", *labels)


def test_both_engines_lists_are_read() -> None:
    podman = json.dumps([{"Names": ["a"], "Labels": {OWNER_LABEL: "x"}}, {"Names": ["b"], "Labels": None}])
    docker = '{"Names":"a","Labels":"other=1,verl-tool-owner=x"}\n{"Names":"b","Labels":""}\n'
    assert _containers(podman) == [("a", {OWNER_LABEL: "x"}), ("b", {})]
    assert [(name, labels.get(OWNER_LABEL)) for name, labels in _containers(docker)] == [("a", "x"), ("b", None)]
    assert _containers("") == []
