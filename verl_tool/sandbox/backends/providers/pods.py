"""What a cluster is asked for: pods, and a policy that denies them the network."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
failures = 0
while failures < 3 or time.monotonic() < first + 2:
    try:
        socket.create_connection(address, 1).close()
        failures = 0
    except OSError:
        first = first if failures else time.monotonic()
        failures += 1
    if not failures and time.monotonic() > deadline:
        raise SystemExit('this pod reaches %s:%d: the cluster does not enforce network policies' % address)
    time.sleep(0.2)
"""
"""Run by each pod before all else. A policy takes effect some time after the start of a pod, or, without a network
plugin that knows policies, never. One connection that fails may have another reason."""


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


def allows_egress(other: Mapping[str, Any]) -> bool:
    """Return whether a NetworkPolicy of the namespace may allow pods connections, since policies add up. A selector by
    the label ``run``, which ``kubectl run`` sets to the pod's name, counts as one that selects them."""
    spec = other.get("spec") or {}
    if not spec.get("egress") or "Egress" not in spec.get("policyTypes", ["Egress"]):
        return False
    selector = spec.get("podSelector") or {}
    labels = selector.get("matchLabels") or {}
    matches = [{"key": key, "operator": "In", "values": [value]} for key, value in labels.items()]
    return all(_may_match(each) for each in (*matches, *(selector.get("matchExpressions") or ())))


def _may_match(expression: Mapping[str, Any]) -> bool:
    key, operator, values = expression["key"], expression["operator"], expression.get("values") or ()
    if key == "run":
        return bool(operator != "DoesNotExist")
    if operator in ("Exists", "DoesNotExist"):
        return (key in LABELS) == (operator == "Exists")
    return (LABELS.get(key) in values) == (operator == "In")


def policy() -> dict[str, Any]:
    """Denies all traffic of the pods."""
    spec = {"podSelector": {"matchLabels": LABELS}, "policyTypes": ["Ingress", "Egress"]}
    metadata = {"name": POLICY, "labels": LABELS}
    return {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata, "spec": spec}
