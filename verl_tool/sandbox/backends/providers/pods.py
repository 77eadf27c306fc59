"""What a cluster is asked for: pods, and a policy that denies them the network."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field, field_validator

from verl_tool.sandbox.backends.providers import orphans
from verl_tool.sandbox.backends.providers.protocol import ContainerSpec
from verl_tool.sandbox.backends.providers.remote import RemoteSettings
from verl_tool.sandbox.backends.providers.runtime import images_runtime

LABELS = {"verl-tool": "workspace"}
"""Of every pod and of the policy: ``kubectl get pods --selector verl-tool=workspace``."""
POLICY = "verl-tool-no-network"
NO_NETWORK = """
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
        "command": ["sh", shell, script, (NO_NETWORK if settings.check_network else "") + read],
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
        "activeDeadlineSeconds": math.ceil(spec.settings.max_seconds),
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
