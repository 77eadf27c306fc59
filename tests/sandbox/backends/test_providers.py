"""Providers on other machines, by stand-ins made from their documentation and source."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import stand_in_kubectl
from containers import require_bubblewrap
from stand_in_docker import remove
from stand_in_services import StandInService, stand_in_service
from toy_tools import until

from verl_tool.errors import ConfigError, SandboxError, ToolFault
from verl_tool.protocol import FaultKind, StepRequest
from verl_tool.sandbox.backends import Container, ContainerSettings
from verl_tool.sandbox.backends.providers import ELSEWHERE, find_provider, kubernetes, orphans, pods, relayed
from verl_tool.sandbox.limits import SessionLimits
from verl_tool.servers.execution.toolset import ToolSet
from verl_tool.servers.tools import load_tools

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LIMITS = SessionLimits(wall_seconds=30, output_bytes=2000, disk_bytes=8 << 20, processes=20, total_wall_seconds=100)


@dataclass
class Place:
    """Where containers of a provider are."""

    name: str
    folder: Path
    service: StandInService | None

    def settings(self, image: str = "any", **more: Any) -> ContainerSettings:
        provider = {"start_seconds": 20, **more.pop("provider", {})}
        if self.name == "kubernetes":
            provider["namespace"] = "trials"
        return ContainerSettings(self.name, image, provider=provider, **more)

    @property
    def live(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.is_dir())


@pytest.fixture(params=ELSEWHERE)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    require_bubblewrap()
    folder = tmp_path / "containers"
    if request.param != "kubernetes":
        service = stand_in_service(request.param, folder)
        monkeypatch.setitem(sys.modules, request.param, service.module)
        return Place(request.param, folder, service)
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {stand_in_kubectl.__file__} "$@"\n')
    program.chmod(stat.S_IRWXU)
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_STAND_IN", str(folder))
    monkeypatch.setattr(kubernetes, "_policies", {})
    return Place("kubernetes", folder, None)


async def test_a_container_does_what_others_do(place: Place) -> None:
    async with Container(place.settings(), LIMITS) as container:
        result = await container.exec("cat; echo err >&2; pwd; echo $X; id -u; exit 3", stdin="in\n", env={"X": "1 2"})
        assert (result.stdout, result.stderr, result.exit_code) == ("in\n/box/work\n1 2\n65534\n", "err\n", 3)
        content = os.urandom(1 << 20)
        await container.write_file("new/a.bin", content)
        assert await container.read_file("/box/work/new/a.bin") == content
        assert (await container.run("x = 6\nx * 7", interactive=True)).stdout == "42\n"
        assert (await container.run("x", interactive=True)).stdout == "6\n"
        program = await container.spawn_inside(["bash", "--norc"], terminal=True)
        program.stdin.write(b"PS1=; echo $((6 * 7)); tty\n")
        assert b"42\n/dev/pts/" in await asyncio.wait_for(read_until(program.stdout, b"pts/"), 20)
        program.kill()
        assert await asyncio.wait_for(program.wait(), 20) == -9
        assert "NoNewPrivs:\t1" in (await container.exec("cat /proc/self/status")).stdout
        assert place.live == [container.name]
    assert place.live == []
    with pytest.raises(ToolFault, match="was stopped"):
        await container.exec("true")


async def read_until(reader: asyncio.StreamReader, word: bytes) -> bytes:
    found = b""
    while word not in found:
        found += await reader.read(1000)
    return found


async def test_tools_use_them(place: Place) -> None:
    provider = dict(place.settings().provider)
    options = {"backend": place.name, "image": "any", "provider": provider, "timeout_seconds": 20, "workers": 1}
    served = ToolSet(load_tools("bash_terminal", shared=options))
    await served.start()
    arguments = {"name": "bash_terminal", "arguments": {"command": "echo $((6 * 7)) > a; cat a"}}
    action = f"<tool_call>{json.dumps(arguments)}</tool_call>"
    [result] = await served.step([StepRequest("t", action, finish=False)], timeout_seconds=60)
    assert result.observation is not None
    assert "42" in result.observation
    await served.close()
    assert place.live == []


async def test_one_that_vanishes_is_lost(place: Place) -> None:
    async with Container(place.settings(), LIMITS) as container:
        await container.run("x = 1")
        await asyncio.to_thread(remove, place.folder / container.name)
        await until(lambda: not container.alive)
        for call in (container.exec("true"), container.run("x"), container.read_file("f")):
            with pytest.raises(ToolFault) as caught:
                await call
            assert caught.value.kind is FaultKind.STATE_LOST


async def test_a_failed_start_says_whether_another_try_may_succeed(place: Place, tmp_path: Path) -> None:
    for image, retryable in (("missing", False), ("quota" if place.service is None else "busy", True)):
        with pytest.raises(SandboxError, match="^kube" if place.service is None else place.name) as caught:
            await Container(place.settings(image), LIMITS).start()
        assert caught.value.retryable == retryable, caught.value
    with pytest.raises(SandboxError, match="on other machines") as caught:
        await Container(place.settings(readable=(str(tmp_path),)), LIMITS).start()
    assert not caught.value.retryable
    assert place.live == []


async def test_results_are_judged_by_the_files_of_the_work_folder(place: Place) -> None:
    settings = place.settings(writable=True, workdir="/repo")
    async with Container(settings, LIMITS) as container:
        assert (await container.exec("rm original; id -u; echo new > new; echo t > /tmp/t")).stdout == "0\n"
        with pytest.raises(SandboxError, match="cannot be copied") as caught:
            await container.fork()
        assert not caught.value.retryable
        async with container.companion(LIMITS, ("/tests",)) as companion:
            assert (await companion.exec("ls /repo /tests")).stdout == "/repo:\noriginal\n\n/tests:\n"
            assert await container.copy_files(companion, 30) == ""
            assert (await companion.exec("ls; cat new /tmp/t")).stdout == "new\nnew\nt\n"
    async with Container(place.settings(writable=True), LIMITS) as container:
        with pytest.raises(SandboxError, match="set workdir"):
            async with container.companion(LIMITS):
                pass
    async with Container(place.settings(writable=True, user="65534", workdir="/repo"), LIMITS) as container:
        assert (await container.exec("id -u")).stdout == "65534\n"
        with pytest.raises(SandboxError, match="are not root"):
            async with container.companion(LIMITS):
                pass
    assert place.live == []


@pytest.mark.parametrize("place", ["kubernetes"], indirect=True)
async def test_programs_may_be_the_containers_own_user(place: Place) -> None:
    async with Container(place.settings(provider={"same_user": True}), LIMITS) as container:
        left = await container.exec("setsid sleep 301 & id -u; grep CapEff /proc/self/status")
        assert left.stdout == "65534\nCapEff:\t0000000000000000\n"
        program = await container.spawn_inside(["sleep", "302"])
        await container.run("x = 1")
        await container.end_programs()
        assert await asyncio.wait_for(program.wait(), 20) == -9
        # Process 1 is of the stand-in; that of a pod is the resident.
        others = "for each in /proc/[2-9]*; do [ $each = /proc/$$ ] || echo garbage > $each/fd/1; done"
        assert (await container.exec(f"pgrep sleep; {others}")).stdout == ""
        await container.write_file("a", b"a")
        assert await container.read_file("a") == b"a"
        with pytest.raises(ToolFault) as caught:
            await container.exec("kill -9 -1; sleep 1")
        assert caught.value.kind is FaultKind.STATE_LOST


async def test_one_that_cannot_change_users_says_so(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.service is None:
        pytest.skip("the pod says which user it is")
    run = place.service.run
    monkeypatch.setattr(place.service, "run", lambda name, words, root=True, **more: run(name, words, False, **more))
    with pytest.raises(SandboxError, match="may not become another user") as caught:
        await Container(place.settings(), LIMITS).start()
    assert not caught.value.retryable


async def test_settings_reach_the_service(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.service is None:
        pytest.skip("the stand-in for kubectl checks pods")
    monkeypatch.setattr(relayed, "_RENEW_SECONDS", 0.05)
    async with Container(place.settings(cpus=2), LIMITS) as container:
        await until(lambda: place.name == "modal" or place.service.renewed > 2)  # type: ignore[union-attr]
        await asyncio.sleep(0.2)
        assert (await container.exec("echo well")).stdout == "well\n"
    [created] = place.service.created
    assert created["block"] is True
    resources = created.get("resources") or {name: created.get(name) for name in ("cpu", "memory")}
    expected: dict[str, Any] = {"modal": {"cpu": (2, 2), "memory": (2048, 2048)}, "e2b": {"cpu": None, "memory": None}}
    assert resources == {**expected, "daytona": {"cpu": 2, "memory": 2, "disk": None}}[place.name]
    with pytest.raises(SandboxError, match=f"{place.name} run failed"):
        await Container(place.settings("broken"), LIMITS).start()
    assert place.live == []


async def test_a_creation_that_is_cancelled_leaves_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    if place.service is None:
        pytest.skip("kubectl is ended, and the pod deleted")
    add = place.service.add
    starting = asyncio.create_task(Container(place.settings(), LIMITS).start())

    def cancel(*words: Any, **more: Any) -> str:
        starting.cancel()
        return add(*words, **more)

    monkeypatch.setattr(place.service, "add", cancel)
    with pytest.raises(asyncio.CancelledError):
        await starting
    await until(lambda: place.service is not None and place.service.created and place.live == [])


@pytest.mark.parametrize("place", ["kubernetes"], indirect=True)
async def test_pods_that_do_not_start_say_why(place: Place) -> None:
    for image, words, retryable in (
        ("private", "ImagePullBackOff.*503", True),
        ("huge", "does not run after .* Insufficient memory", True),
        ("evicted", "Evicted +The node was low", True),
        ("restricted", "violates PodSecurity", False),
    ):
        with pytest.raises(SandboxError, match=words) as caught:
            await Container(place.settings(image, provider={"start_seconds": 3}), LIMITS).start()
        assert caught.value.retryable == retryable
    await until(lambda: place.live == [])


@pytest.mark.parametrize("place", ["kubernetes"], indirect=True)
async def test_pods_of_processes_that_are_gone_are_removed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Container(place.settings(), LIMITS) as container:
        assert await container.provider.remove_orphans() == 0
        monkeypatch.setattr(orphans, "_started", lambda pid: 1)
        assert await container.provider.remove_orphans() == 1
        await until(lambda: not container.alive)


def test_a_pod_waits_until_it_has_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.getsockname()[1]))
        code = pods.NO_NETWORK.replace("+ 20", "+ 0.5")
        with pytest.raises(SystemExit, match="does not enforce network policies"):
            exec(code, {})
        connect, attempts = socket.create_connection, iter((False, False, True, False))

        def fail_at_first(*address: Any) -> socket.socket:
            if not next(attempts, True):
                raise ConnectionResetError
            return connect(*address)

        monkeypatch.setattr(socket, "create_connection", fail_at_first)
        with pytest.raises(SystemExit, match="does not enforce network policies"):
            exec(code, {})
        monkeypatch.undo()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    exec(code, {})


def network_policy(selector: dict[str, Any], egress: list[Any], **more: Any) -> dict[str, Any]:
    return {"metadata": {"name": "other"}, "spec": {"podSelector": selector, "egress": egress, **more}}


@pytest.mark.parametrize("place", ["kubernetes"], indirect=True)
async def test_another_policy_may_not_allow_what_ours_denies(place: Place) -> None:
    for selector in ({}, {"matchLabels": pods.LABELS}):
        (place.folder / "other-policy.json").write_text(json.dumps(network_policy(selector, [{}])))
        with pytest.raises(SandboxError, match="NetworkPolicy other of the namespace trials allows") as caught:
            await Container(place.settings(), LIMITS).start()
        assert not caught.value.retryable
    (place.folder / "other-policy.json").write_text(json.dumps(network_policy({"matchLabels": {"app": "db"}}, [{}])))
    async with Container(place.settings(), LIMITS) as container:
        assert (await container.exec("echo well")).stdout == "well\n"


@pytest.mark.parametrize(
    ("policy", "allows"),
    [
        (pods.policy(), False),
        (network_policy({}, [{"ports": [{"port": 53}]}], policyTypes=["Ingress", "Egress"]), True),
        (network_policy({}, [{}], policyTypes=["Ingress"]), False),
        (network_policy({}, [], policyTypes=["Egress"]), False),
        (network_policy({"matchLabels": {**pods.LABELS, "app": "db"}}, [{}]), False),
        (network_policy({"matchLabels": {"verl-tool": "other"}}, [{}]), False),
        (network_policy({"matchLabels": {"run": "verl-tool-1"}}, [{}]), True),
        (network_policy({"matchExpressions": [{"key": "verl-tool", "operator": "Exists"}]}, [{}]), True),
        (network_policy({"matchExpressions": [{"key": "app", "operator": "DoesNotExist"}]}, [{}]), True),
        (network_policy({"matchExpressions": [{"key": "app", "operator": "Exists"}]}, [{}]), False),
        (network_policy({"matchExpressions": [{"key": "app", "operator": "NotIn", "values": ["db"]}]}, [{}]), True),
        (network_policy({"matchExpressions": [{"key": "app", "operator": "In", "values": ["db"]}]}, [{}]), False),
    ],
)
def test_policies_that_allow_pods_connections_are_found(policy: dict[str, Any], allows: bool) -> None:
    assert pods.allows_egress(policy) == allows


def test_settings_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("modal", "e2b", "daytona"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ConfigError, match=rf"needs the package {name} .*source scripts/env.sh {name}"):
            find_provider(name)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("modal", {"apps": "x"}, "provider settings of modal: apps: Extra inputs"),
        ("kubernetes", {"pod": {"hostNetwork": True}}, "hostNetwork cannot be set"),
        ("docker", {"namespace": "x"}, "docker has no settings of its own"),
    ]
    for name, settings, words in cases:
        with pytest.raises(ConfigError, match=words):
            find_provider(name, settings)
    with pytest.raises(ConfigError, match="without writable"):
        ContainerSettings("docker", "any", user="root")
