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

from verl_tool.errors import SandboxError
from verl_tool.sandbox.backends.engine import ContainerEngine, end
from verl_tool.sandbox.backends.providers import orphans
from verl_tool.sandbox.backends.providers.command_line import CommandLineProcess
from verl_tool.sandbox.backends.providers.pods import LABELS, POLICY, KubernetesSettings, allows_egress, pod, policy
from verl_tool.sandbox.backends.providers.protocol import ContainerSpec
from verl_tool.sandbox.backends.providers.remote import RemoteProvider, parse_settings

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
_policies: dict[tuple[str, ...], float] = {}
"""When the policy was last seen, by cluster and namespace."""


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
        """Have the policy in the namespace, and no other that allows what it denies. Raises SandboxError."""
        now = time.monotonic()
        if now - _policies.get(self._where, -_POLICY_SECONDS) < _POLICY_SECONDS:
            return
        found = json.loads(await self._ask("get", "networkpolicy", "--output", "json"))["items"]
        policies, denying = {each["metadata"]["name"]: each for each in found}, policy()
        current = policies.pop(POLICY, None)
        if opening := sorted(name for name, each in policies.items() if allows_egress(each)):
            namespace = f"the namespace {self.settings.namespace}"
            words = f"NetworkPolicy {opening[0]} of {namespace} allows its pods connections (egress)"
            raise SandboxError(f"{words}; have it select other pods, or set another namespace", retryable=False)
        if current is None or current["spec"] != denying["spec"]:
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
            fields = [*seen.stdout.decode(errors="replace").strip("\n").split("\t"), "", "", ""]
            phase, reason, waiting, message = fields[:4]
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


def _selector() -> str:
    return ",".join(f"{name}={value}" for name, value in LABELS.items())


def _failure(action: str, complaint: bytes) -> SandboxError:
    words = complaint.decode(errors="replace").strip()[-_MAX_BYTES:]
    return SandboxError(f"kubectl {action} failed: {words or 'nothing was said'}", bool(_FOR_NOW.search(words)))
