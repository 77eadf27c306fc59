"""Pods of a Kubernetes cluster, by the command line ``kubectl``, which also says which cluster and as whom.

``kubectl run --stdin --rm`` creates the pod, waits for it, attaches to it and deletes it at the end. The pod's process
waits for its first line, so that nothing is lost before that; when the attached stream ends (``stdinOnce``), it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends.engine import ContainerEngine, end
from verl_tool.sandbox.backends.providers import orphans
from verl_tool.sandbox.backends.providers.command_line import CommandLineProcess
from verl_tool.sandbox.backends.providers.protocol import ContainerSpec
from verl_tool.sandbox.backends.providers.relayed import RemoteProvider, RemoteSettings, parse_settings
from verl_tool.sandbox.backends.providers.runtime import images_runtime

LABELS = {"verl-tool": "workspace"}
"""Of every pod and of the policy: ``kubectl get pods --selector verl-tool=workspace``."""
POLICY = "verl-tool-no-network"
_CALL_SECONDS = 60.0
_POLICY_SECONDS = 60.0
"""For which the policy is taken to be as it was seen."""
_MAX_BYTES = 2000
_STATUS = (
    '{.status.phase}{"\\t"}{.status.reason}{"\\t"}{.status.containerStatuses[*].state.waiting.reason}{"\\t"}'
    '{.status.containerStatuses[*].state.waiting.message} {.status.conditions[?(@.status=="False")].message}'
    '{.status.message}{"\\n"}'
)
_HOPEFUL = {"", "ContainerCreating", "PodInitializing", "ErrImagePull"}
"""Reasons to wait for which no more is known."""
_PULL_REFUSED = re.compile("not found|unknown|does not exist|denied|unauthorized|forbidden", re.IGNORECASE)
_FOR_NOW = re.compile(
    "quota|timeout|timed out|too many|refused|unavailable|internal|connection|EOF|reset|TLS handshake", re.IGNORECASE
)
"""Complaints of ``kubectl`` that another try may not meet."""
_NO_NETWORK = """
import os, socket, time
address = os.environ['KUBERNETES_SERVICE_HOST'], int(os.environ['KUBERNETES_SERVICE_PORT'])
deadline = time.monotonic() + 20
while True:
    try:
        socket.create_connection(address, 2).close()
    except OSError:
        break
    if time.monotonic() > deadline:
        raise SystemExit('this pod reaches %s:%d: the cluster does not enforce network policies' % address)
    time.sleep(0.2)
"""
"""Run by each pod before all else. A policy takes effect some time after the start of a pod, or, without a network
plugin that knows policies, never."""


_FIXED_FIELDS = {
    *("containers", "initContainers", "ephemeralContainers", "volumes", "restartPolicy", "activeDeadlineSeconds"),
    *("automountServiceAccountToken", "enableServiceLinks", "hostNetwork", "hostPID", "hostIPC"),
    *("shareProcessNamespace", "securityContext", "terminationGracePeriodSeconds"),
}
_policies: dict[tuple[str, ...], float] = {}
"""When the policy was last seen, by cluster and namespace."""


class KubernetesSettings(RemoteSettings):
    namespace: str = Field(default="default", min_length=1)
    context: str = ""
    """Of the kubeconfig. Defaults to the current one."""
    pod: dict[str, Any] = Field(default_factory=dict)
    """Further fields of a pod's spec: nodeSelector, tolerations, imagePullSecrets, runtimeClassName."""
    same_user: bool = False
    """Programs are the user of the pod's first process, which is then not root, for namespaces that allow no other.
    They can end their pod (``state_lost``), and cannot speak for it."""
    check_network: bool = True
    """Each pod begins only when it cannot reach the cluster's API server. On a cluster of one node it always can."""

    @field_validator("pod")
    @classmethod
    def _has_free_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        if fixed := _FIXED_FIELDS & set(fields):
            raise ValueError(f"{', '.join(sorted(fixed))} cannot be set: the isolation of pods depends on it")
        return fields


class KubernetesProvider(RemoteProvider):
    """See `ContainerProvider`."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Raises ConfigError."""
        self.settings = parse_settings(KubernetesSettings, "kubernetes", settings)
        super().__init__("kubernetes", self.settings)
        self.same_user = self.settings.same_user
        self.engine = ContainerEngine("kubectl", prefixes=("",))
        context = ("--context", self.settings.context) if self.settings.context else ()
        self._where = (*context, "--namespace", self.settings.namespace)

    async def start(self, spec: ContainerSpec) -> CommandLineProcess:
        self.check(spec)
        await self._deny_network()
        seconds = f"{self.settings.start_seconds:g}s"
        process = await self.engine.start(
            *(*self._where, "run", spec.name, "--image", spec.settings.image, "--restart", "Never"),
            *("--stdin", "--rm", "--quiet", "--pod-running-timeout", seconds),
            *("--overrides", json.dumps(pod(spec, self.settings))),
        )
        try:
            await self._wait(spec.name, process)
        except BaseException:
            await end(process)
            await self.remove(spec.name)
            raise
        return CommandLineProcess(process)

    async def remove(self, name: str) -> None:
        words = ("delete", "pod", name, "--now", "--wait=false", "--ignore-not-found")
        await self.engine.run([*self._where, *words], seconds=_CALL_SECONDS)

    async def remove_orphans(self) -> int:
        form = f'{{range .items[*]}}{{.metadata.name}} {{.metadata.annotations.{orphans.OWNER_LABEL}}}{{"\\n"}}{{end}}'
        listed = await self._ask("get", "pods", "--selector", _selector(), "--output", f"jsonpath={form}")
        pods = [line.partition(" ") for line in listed.splitlines()]
        left = [name for name, _, owner in pods if orphans.has_ended(owner)]
        for name in left:
            await self.remove(name)
        return len(left)

    async def _deny_network(self) -> None:
        """Have the policy in the namespace. Raises SandboxError."""
        now = time.monotonic()
        if now - _policies.get(self._where, -_POLICY_SECONDS) < _POLICY_SECONDS:
            return
        found = await self._ask("get", "networkpolicy", POLICY, "--ignore-not-found", "--output", "jsonpath={.spec}")
        denying = policy()
        if not found or json.loads(found) != denying["spec"]:
            # Validation would fetch megabytes of schemas.
            await self._ask("apply", "--validate=false", "--filename", "-", stdin=json.dumps(denying))
        _policies[self._where] = now

    async def _ask(self, *words: str, stdin: str = "") -> str:
        ran = await self.engine.run([*self._where, *words], seconds=_CALL_SECONDS, stdin=stdin.encode())
        if ran.code != 0:
            raise _failure(" ".join(words[:2]), ran.stderr if ran.code is not None else b"timed out")
        return ran.stdout.decode(errors="replace")

    async def _wait(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Wait until the pod runs. Raises SandboxError with the reason if it does not, `process` ends or it is late."""
        status = "it was not created"
        deadline = asyncio.get_running_loop().time() + self.settings.start_seconds
        while asyncio.get_running_loop().time() < deadline:
            if process.returncode is not None:
                assert process.stderr is not None
                raise _failure("run", await process.stderr.read(_MAX_BYTES))
            seen = await self.engine.run(
                [*self._where, "get", "pod", name, "--ignore-not-found", "--output", f"jsonpath={_STATUS}"],
                seconds=_CALL_SECONDS,
            )
            phase, reason, waiting, message = (seen.stdout.decode(errors="replace").strip("\n").split("\t") + [""] * 4)[
                :4
            ]
            if phase in ("Running", "Succeeded") or (phase == "Failed" and not reason):
                return  # one that has ended has printed why
            status = " ".join(word for word in (phase, reason, waiting, message) if word) or status
            if phase == "Failed":  # Evicted, for instance
                raise SandboxError(f"kubernetes pod failed: {status}", retryable=True)
            if waiting not in _HOPEFUL:
                retryable = waiting == "ImagePullBackOff" and not _PULL_REFUSED.search(message)
                raise SandboxError(f"kubernetes pod cannot start: {status}", retryable=retryable)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), 1.0)
        raise SandboxError(
            f"kubernetes pod does not run after {self.settings.start_seconds:g} s: {status}", retryable=True
        )


def pod(spec: ContainerSpec, settings: KubernetesSettings) -> dict[str, Any]:
    """The pod of a container."""
    limits, half = spec.limits, str(spec.limits.disk_bytes // 2)
    amounts = {"cpu": f"{spec.settings.cpus:g}", "memory": str(limits.memory_bytes)}
    shell, script, read = images_runtime().command
    security: dict[str, Any] = {
        "runAsUser": 0,
        "runAsGroup": 0,
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": not spec.settings.writable,
        "capabilities": {"drop": ["ALL"], "add": list(spec.capabilities)},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if settings.same_user:
        security.update(runAsUser=65534, runAsGroup=65534, runAsNonRoot=True, capabilities={"drop": ["ALL"]})
    container = {
        "name": spec.name,
        "image": spec.settings.image,
        "command": ["sh", shell, script, (_NO_NETWORK if settings.check_network else "") + read],
        "workingDir": "/",
        "stdin": True,
        "stdinOnce": True,
        "securityContext": security,
        "resources": {"limits": amounts, "requests": amounts},
        "volumeMounts": [{"name": f"folder-{n}", "mountPath": path} for n, path in enumerate(spec.folders)],
    }
    memory = {"emptyDir": {"medium": "Memory", "sizeLimit": half}}
    own = {
        "containers": [container],
        "restartPolicy": "Never",
        "activeDeadlineSeconds": int(spec.settings.max_seconds),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostNetwork": False,
        "terminationGracePeriodSeconds": 1,
        "volumes": [{"name": f"folder-{n}", **memory} for n in range(len(spec.folders))],
    }
    owner = {orphans.OWNER_LABEL: orphans.owner()}
    metadata = {"labels": LABELS, "annotations": owner}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**settings.pod, **own}}


def policy() -> dict[str, Any]:
    """Denies all traffic of the pods."""
    spec = {"podSelector": {"matchLabels": LABELS}, "policyTypes": ["Ingress", "Egress"]}
    metadata = {"name": POLICY, "labels": LABELS}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}


def _selector() -> str:
    return ",".join(f"{name}={value}" for name, value in LABELS.items())


def _failure(action: str, complaint: bytes) -> SandboxError:
    words = complaint.decode(errors="replace").strip()[-_MAX_BYTES:]
    return SandboxError(f"kubectl {action} failed: {words or 'nothing was said'}", bool(_FOR_NOW.search(words)))
