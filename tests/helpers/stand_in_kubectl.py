#!/usr/bin/env python3
"""A stand-in for the command line ``kubectl`` 1.32: ``run``, ``get``, ``apply`` and ``delete`` for pods that are local
processes, as in `stand_in_docker`. It rejects pods that are not isolated. Uses the standard library only.

Images: ``missing`` and ``private`` cannot be pulled, ``huge`` fits no node, ``evicted`` fails, ``quota`` and
``restricted`` are rejected.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from stand_in_docker import MARK, STATE, confined, remove

_REJECTED = {
    "quota": 'Error from server (Forbidden): pods "x" is forbidden: exceeded quota: cpu',
    "restricted": 'Error from server (Forbidden): pods "x" is forbidden: violates PodSecurity "restricted:latest"',
}
_STATUSES = {
    "missing": "Pending\t\tImagePullBackOff\tBack-off pulling image: not found ",
    "private": "Pending\t\tImagePullBackOff\tBack-off pulling image: 503 Service Unavailable ",
    "huge": "Pending\t\t\t 0/3 nodes are available: 3 Insufficient memory.",
    "evicted": "Failed\tEvicted\t\t The node was low on resource: memory.",
}
_CAPABILITIES = [{"SETUID", "SETGID", "KILL", "CHOWN"}]
_CAPABILITIES.append(
    _CAPABILITIES[0] | {"SETPCAP", "DAC_OVERRIDE", "FOWNER", "FSETID", "NET_BIND_SERVICE", "SYS_CHROOT"}
)


def main(arguments: list[str]) -> int:
    assert arguments[:2] == ["--namespace", "trials"], arguments
    action, *words = arguments[2:]
    if action == "run":
        return _run(words)
    if action == "apply":
        (STATE / "policy.json").write_text(sys.stdin.read())
    elif action == "delete":
        assert words[0] == "pod"
        remove(STATE / words[1])
    elif words[0] == "networkpolicy":
        assert words[1:] == ["--output", "json"], words
        policies = [json.loads(file.read_text()) for file in sorted(STATE.glob("*policy.json"))]
        print(json.dumps({"kind": "List", "apiVersion": "v1", "items": policies}))
    elif words[0] == "pods":
        for file in sorted(STATE.glob("*/pod.json")):
            annotations = json.loads(file.read_text())["metadata"]["annotations"]
            print(file.parent.name, annotations["verl-tool-owner"])
    elif (STATE / words[1]).exists():
        pod = json.loads((STATE / words[1] / "pod.json").read_text())
        print(_STATUSES.get(pod["spec"]["containers"][0]["image"], "Running\t\t\t "))
    return 0


def _run(words: list[str]) -> int:
    name, options = words[0], dict(zip(words[1::2], words[2::2], strict=False))
    flags = ["--stdin", "--rm", "--quiet"]
    assert [word for word in words if word in flags] == flags, words
    options = {word: words[n + 1] for n, word in enumerate(words) if word.startswith("--") and word not in flags}
    assert options["--restart"] == "Never", options
    pod = json.loads(options["--overrides"])
    image = pod["spec"]["containers"][0]["image"]
    assert image == options["--image"], options
    assert json.loads((STATE / "policy.json").read_text())["spec"] == {
        "podSelector": {"matchLabels": pod["metadata"]["labels"]},
        "policyTypes": ["Ingress", "Egress"],
    }
    if image in _REJECTED:
        print(_REJECTED[image], file=sys.stderr)
        return 1
    (STATE / name).mkdir()
    (STATE / name / "pod.json").write_text(json.dumps(pod))
    if image in _STATUSES:
        signal.pause()
    try:
        command = command_of(STATE / name, pod["spec"])
        environment = {"PATH": os.environ["PATH"], MARK: name}
        environment |= {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        remove(STATE / name)


def command_of(state: Path, spec: dict[str, Any]) -> list[str]:
    """Words that run a pod, whose folder is `state`."""
    [container] = spec["containers"]
    security = container["securityContext"]
    assert not spec["automountServiceAccountToken"]
    assert not spec["enableServiceLinks"]
    assert not spec.get("hostNetwork")
    assert spec["restartPolicy"] == "Never"
    assert spec["activeDeadlineSeconds"] > 0
    assert container["stdin"]
    assert container["stdinOnce"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"]["drop"] == ["ALL"]
    added = security["capabilities"].get("add", [])
    user = security["runAsUser"]
    assert security.get("runAsNonRoot") or set(added) == _CAPABILITIES[not security["readOnlyRootFilesystem"]]
    assert container["resources"]["limits"]["memory"].isdigit()
    volumes = {each["name"]: each["emptyDir"] for each in spec["volumes"]}
    assert all(each["medium"] == "Memory" and each["sizeLimit"].isdigit() for each in volumes.values())
    folders = [each["mountPath"] for each in container["volumeMounts"]]
    assert len(folders) == len(volumes)
    if not security["readOnlyRootFilesystem"]:
        folders.append("/repo")
        (state / "repo").mkdir()
        (state / "repo" / "original").write_text("original")
    options = {"--cap-add": added, "--tmpfs": [f"{each}:" for each in folders], "--workdir": [container["workingDir"]]}
    words = confined(state, container["command"], options, hidden=[])
    if user:
        words[1:1] = ["--unshare-user", "--uid", str(user), "--gid", str(user)]
    return words


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
