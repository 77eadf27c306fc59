"""Ray Serve below the service: the tool server's `ServeCluster`, with another application on it."""

from __future__ import annotations

import time

from ray import serve
from ray.serve import Application, RunTarget
from ray.serve.schema import ApplicationStatus

from eval_service.deployment import DEPLOYMENT
from verl_tool.servers.serve.serve_cluster import POLL_SECONDS, ServeCluster, StartError

_WORDS = 2000
"""Characters of a replica's last words that are quoted."""


class ServiceCluster(ServeCluster):
    """Ray and Serve for one service; a context manager that gives back what it took."""

    deployment = DEPLOYMENT

    def serve_application(self, app: Application, name: str, timeout_seconds: float) -> None:
        """Deploy `app` and return once it serves. Raises StartError with the words of the replica that could not."""
        serve.run_many(
            [RunTarget(app, name=name, route_prefix=self.route_prefix)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        deadline = time.monotonic() + timeout_seconds
        while True:
            time.sleep(POLL_SECONDS)
            status = serve.status().applications.get(name)
            if status is not None and status.status == ApplicationStatus.RUNNING:
                return
            words = "\n".join(d.message for d in status.deployments.values()) if status else ""
            if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
                raise StartError(f"a replica could not start: {words[-_WORDS:] or status.message}")
            if time.monotonic() > deadline:
                raise StartError(f"the replicas were not ready in {timeout_seconds:g} s: {words[-_WORDS:]}")

    def reason(self, name: str) -> str:
        """The end of what Serve says about an application's deployments. Raises RayError if the cluster is gone."""
        status = serve.status().applications.get(name)
        return "\n".join(d.message for d in status.deployments.values())[-_WORDS:] if status else ""

    def drain(self, name: str, timeout_seconds: float) -> None:
        """Take the application away once its replicas have answered what they work on, at most for so long.

        Serve's own shutdown stops the ingress at the same time as the replicas, and cuts their answers off.
        """
        serve.delete(name, _blocking=False)
        deadline = time.monotonic() + timeout_seconds
        while name in serve.status().applications and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
