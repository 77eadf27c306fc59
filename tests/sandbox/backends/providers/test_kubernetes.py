"""The machine's own ``kubectl``, where it is, against a stand-in for a cluster."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from containers import require_bubblewrap
from stand_in_cluster import StandInCluster
from toy_tools import until

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends import Container, ContainerSettings
from verl_tool.sandbox.backends.providers import kubernetes, pods
from verl_tool.sandbox.limits import SessionLimits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

SETTINGS = ContainerSettings("kubernetes", "any", provider={"namespace": "trials", "start_seconds": 40})


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[StandInCluster]:
    require_bubblewrap()
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    (tmp_path / "pods").mkdir()
    monkeypatch.setattr(kubernetes, "_policies", {})
    async with StandInCluster(tmp_path / "pods") as cluster:
        cluster.write_config(tmp_path / "config")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        monkeypatch.setenv("HOME", str(tmp_path))
        yield cluster


async def test_the_real_command_line_runs_a_pod(cluster: StandInCluster, tmp_path: Path) -> None:
    async with Container(SETTINGS, SessionLimits(disk_bytes=8 << 20)) as container:
        content = os.urandom(1 << 20)
        await container.write_file("a", content)
        assert await container.read_file("a") == content
        assert (await container.exec("cat; pwd", stdin="in\n")).stdout == "in\n/box/work\n"
        assert (await container.run("6 * 7", interactive=True)).stdout == "42\n"
        assert await container.provider.remove_orphans() == 0
        assert list(cluster.policies) == ["verl-tool-no-network"]
        assert cluster.policies["verl-tool-no-network"]["spec"] == pods.policy()["spec"]
    await until(lambda: os.listdir(tmp_path / "pods") == [])
    cluster.policies["open"] = {"metadata": {"name": "open"}, "spec": {"podSelector": {}, "egress": [{}]}}
    kubernetes._policies.clear()
    with pytest.raises(SandboxError, match="NetworkPolicy open of the namespace trials allows"):
        await Container(SETTINGS, SessionLimits()).start()


async def test_a_pod_ends_with_the_process_that_started_it(cluster: StandInCluster, tmp_path: Path) -> None:
    program = (
        "import asyncio\nfrom verl_tool.sandbox.backends import Container, ContainerSettings\n"
        "from verl_tool.sandbox.limits import SessionLimits\n"
        "async def main():\n"
        "    settings = ContainerSettings('kubernetes', 'any', provider={'namespace': 'trials'})\n"
        "    await Container(settings, SessionLimits()).start()\n"
        "    print('started', flush=True)\n    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"started\n"
    process.send_signal(signal.SIGKILL)
    await asyncio.wait_for(process.wait(), 30)
    await until(lambda: os.listdir(tmp_path / "pods") == [], seconds=60)
