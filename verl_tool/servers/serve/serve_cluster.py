"""The Ray cluster and the Serve instance below a server: joined or started, and left as they were found."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from types import TracebackType
from urllib.parse import urlsplit

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, RunTarget
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview
from ray.util import list_named_actors
from typing_extensions import Self

from verl_tool.errors import ConfigError, StartError
from verl_tool.http.listening_socket import base_url
from verl_tool.servers.serve.deployment import DEPLOYMENT, application
from verl_tool.servers.serve.launcher import NAMESPACE, announce_stop, claim_name, release_name
from verl_tool.servers.serve.local_ray import keep_token_private, make_token, on_loopback, private_folder
from verl_tool.servers.serve.ports import Reservation, hold_port, reserve_port
from verl_tool.servers.serve.replica_output import ReplicaOutput
from verl_tool.servers.settings import APP_NAME_PATTERN, AutoscalingSettings, ReplicaSettings
from verl_tool.util.child_processes import HEAD, ChildProcesses
from verl_tool.util.json_text import excerpt

POLL_SECONDS = 0.2
"""How often the state of the application is looked at while it starts."""
SERVE_ENDS_SECONDS = 120.0
"""How long a Serve that is being shut down is waited for."""
DELETE_SECONDS = 20.0
"""How long the end of our application is waited for where Serve goes on."""
ANSWER_SECONDS = 30.0
"""Deadline for the replicas to answer at the server's port, once Serve says that they run."""
START_TRIES = 2
"""Ray gives its processes half a minute to come up, which a busy machine may not."""
OBJECT_STORE_BYTES = 100 << 20
"""Of a local cluster. Tool calls do not go through Ray's object store."""
_CONTROLLER_VARIABLES = {
    # A replica that cannot start says so at its first try; the same fault twenty times helps nobody.
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    # Ten times a second, Serve's default, costs 5% of a core, server idle or not, and finds nothing new.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
}
"""Environment of Serve's controller."""
_INTERRUPTED = 130
"""Exit code of a process that was interrupted."""
_EXITED = ("NOT_STARTED", ApplicationStatus.DELETING.value)


def _cause(text: str) -> str:
    """The line of a replica's traceback that a user needs: our own error if there is one, else the last."""
    local = re.findall(r"verl_tool\.errors\.\w+: (.+)", text)
    if local:
        return str(local[-1])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray gave no reason"


class ServeCluster:
    """Ray and Serve for one server; a context manager that gives back what it took.

    Replicas of its application listen at `host`, `port` of their nodes. `ray_address`: a running cluster to join; None:
    a local one is started, which ends with this process, with `logical_cpus` for replicas. `app_name`: of the
    application; another live server may not have it. What a launcher that is dead left under the same name is replaced,
    if its one deployment is called `deployment`, as ours is. `quote`: what a user needs of the words of a replica that
    could not start.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        ray_address: str | None = None,
        logical_cpus: int | None = None,
        app_name: str = "verl_tool",
        deployment: str = DEPLOYMENT,
        quote: Callable[[str], str] = _cause,
    ) -> None:
        if re.fullmatch(APP_NAME_PATTERN, app_name) is None:
            raise ConfigError(f"--app_name is {excerpt(app_name)}; it must match {APP_NAME_PATTERN}")
        self.host = host
        self.port = port
        self.app_name = app_name
        self.local = ray_address is None
        self._output = ReplicaOutput(app_name, local=self.local)
        self._address = ray_address
        self._logical_cpus = logical_cpus
        self._deployment = deployment
        self._quote = quote
        self._stops_serve = True
        self._reserved: Reservation | None = None
        self._deployed = False
        self._processes = ChildProcesses()

    def __enter__(self) -> Self:
        """Connect to Ray and Serve, which are started if need be.

        Raises StartError, PortInUseError for a port and NameInUseError for a name of another live server.
        """
        # On a cluster that is joined, replicas of a launcher that was killed may listen there; they are ended below.
        self._reserved = hold_port(self.host, self.port) if self.local else reserve_port(self.port)
        try:
            self._connect()
            if not self.local:
                claim_name(self.app_name)
            self._join_or_start_serve()
            if not self.local:
                self._reserved = hold_port(self.host, self.port, self._reserved)
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop Serve and what else this object started."""
        if self._has_lost_head():
            self._abandon(0 if kind is None else _INTERRUPTED if kind is KeyboardInterrupt else 1)
            return
        try:
            announce_stop(self.app_name)
            if self._deployed:
                self._skip_drain()
            self._take_away()
        except RayError:
            # The cluster is gone already; there is nothing left to stop in it.
            pass
        finally:
            self._leave()

    @property
    def url(self) -> str:
        """Base URL of the server, as seen from this machine."""
        return base_url(self.host, self.port)

    def deploy(
        self,
        settings: ReplicaSettings,
        replicas: int | AutoscalingSettings,
        *,
        cpus_per_replica: float = 1.0,
        timeout_seconds: float = 180.0,
    ) -> None:
        """Deploy the tools, or update them without losing a request if they run; return once they serve.

        Raises StartError with the words of the replica that could not start.
        """
        where = {"app_name": self.app_name, "listen_host": self.host, "listen_port": self.port}
        settings = settings.model_copy(update=where)
        self._deployed = True
        self.serve_application(application(settings, replicas, cpus_per_replica=cpus_per_replica), timeout_seconds)

    def serve_application(self, app: Application, timeout_seconds: float) -> None:
        """Hand the application to Serve, and return once it serves.

        Raises StartError with the words of the replica that could not start.
        """
        self._run(app)
        deadline = time.monotonic() + timeout_seconds
        while True:
            time.sleep(POLL_SECONDS)
            status = self._status()
            if status is not None and status.status == ApplicationStatus.RUNNING:
                return
            words = self._words(status)
            if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
                raise StartError(words or self._quote(status.message))
            if time.monotonic() > deadline:
                raise StartError(f"the replicas were not ready in {timeout_seconds:g} s: {words}")

    def wait_until_it_answers(self, answers: Callable[[int, bytes], bool]) -> None:
        """Return once `answers` holds of an answer (status, body) of ``/health``. Raises StartError at a deadline."""
        what = f"an answer of {self.url}/health (is there a replica on this node?)"
        wait_until(lambda: _answers(f"{self.url}/health", answers), ANSWER_SECONDS, what)

    def drain(self, timeout_seconds: float) -> None:
        """Take the application away once its replicas have answered what they work on, at most for so long.

        Serve's own shutdown would cut their answers off.
        """
        announce_stop(self.app_name)
        self._delete(timeout_seconds)

    def _has_lost_head(self) -> bool:
        """Whether the local cluster has lost its head: no call of Ray's would come back."""
        if not self.local:
            return False
        self._processes.refresh()
        return self._processes.has_lost_head()

    def _abandon(self, exit_code: int) -> None:
        """End a local cluster without its help, and later this process: Ray's part of it can no longer be ended."""
        self._processes.terminate(at_once=True)
        self._release_port()
        # Before what Ray wants to do at the end: wait for its head for a minute, and read what is gone.
        atexit.register(_exit_at_once, exit_code)

    def live_state(self) -> str:
        """The application's state in Serve's words, such as ``RUNNING``. Raises StartError if it is gone."""
        if self._has_lost_head():
            raise StartError(f"the Ray cluster is gone: its process {HEAD} has ended")
        try:
            state = self._state()
        except RayError as error:
            raise StartError(f"the Ray cluster is gone: {error}") from error
        if state in _EXITED:
            raise StartError(f"somebody took the application {self.app_name!r} off the cluster (it is {state})")
        return state

    def replicas_words(self) -> str:
        """What Serve says about the application's replicas, quoted; empty if all is well."""
        return self._words(self._status())

    def _status(self) -> ApplicationStatusOverview | None:
        return serve.status().applications.get(self.app_name)

    def _state(self) -> str:
        status = self._status()
        return status.status.value if status is not None else "NOT_STARTED"

    def _words(self, status: ApplicationStatusOverview | None) -> str:
        words = "\n".join(deployment.message for deployment in status.deployments.values()) if status else ""
        return self._quote(words) if words.strip() else ""

    def _connect(self) -> None:
        if not self.local:
            keep_token_private()
            try:
                with self._output.printed():
                    ray.init(address=self._address, namespace=NAMESPACE, logging_level=logging.WARNING)
            except (RayError, ConnectionError, OSError, ValueError, RuntimeError) as error:
                raise StartError(f"no Ray cluster at {self._address!r} can be joined: {error}") from error
            return
        for tries_left in reversed(range(START_TRIES)):
            try:
                self._start_ray()
            except Exception as error:  # Ray raises a bare Exception if its processes do not come up
                ray.shutdown()
                if not tries_left:
                    raise StartError(f"a local Ray cluster could not be started: {error}") from error
            else:
                return

    def _start_ray(self) -> None:
        make_token()
        with on_loopback(), self._output.printed():
            ray.init(
                address="local",
                namespace=NAMESPACE,
                logging_level=logging.WARNING,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                num_cpus=self._logical_cpus,
                _temp_dir=str(private_folder()),
                _system_config={
                    # Ray runs its workers at niceness 15; here they are the service itself.
                    "worker_niceness": 0,
                    # Its agent has 15 s to come up, which a busy machine may not give it.
                    "agent_register_timeout_ms": 60_000,
                    # Nobody reads Ray's own metrics here, and each request would pay; the replicas have theirs.
                    "enable_metrics_collection": False,
                    # Nor its records of past calls, of which it would keep a hundred thousand.
                    "task_events_report_interval_ms": 0,
                    # Nothing here runs as a task: no idle workers.
                    "enable_worker_prestart": False,
                    "prestart_worker_first_driver": False,
                },
            )

    def _run(self, app: Application) -> None:
        """Hand the application to Serve. If Serve is just being shut down, as it is for a while after its launcher
        has gone, wait for its end and start another."""
        for tries_left in reversed(range(START_TRIES)):
            try:
                serve.run_many(
                    [RunTarget(app, name=self.app_name, route_prefix=None)],
                    wait_for_ingress_deployment_creation=False,
                    wait_for_applications_running=False,
                )
                # A Serve that is being shut down ignores it, and still lists what a dead launcher left.
                if self._state() not in _EXITED:
                    return
                reason = "Ray Serve on this cluster is being shut down"
            except (RayError, RayServeException, RuntimeError, ValueError) as error:
                reason = _cause(str(error))
            if self.local or not tries_left:
                break
            wait_until(lambda: not _serve_runs(), SERVE_ENDS_SECONDS, f"the end of Ray Serve ({reason})")
            self._join_or_start_serve()
        raise StartError(f"Ray Serve did not take the application {self.app_name!r}: {reason}")

    def _join_or_start_serve(self) -> None:
        own = None if self.local else serve.status().applications.get(self.app_name)
        # What a dead launcher left is ours to end, with the Serve that it may have started.
        self._stops_serve = own is not None or self.local or not _serve_runs()
        if own is not None and own.deployments and set(own.deployments) != {self._deployment}:
            raise StartError(
                f"the application {self.app_name!r} on this cluster is none of ours; give another name with --app_name"
            )
        try:
            # Requests reach the replicas themselves. Where Serve runs already, this changes nothing.
            serve.start(
                proxy_location="Disabled",
                logging_config={"log_level": "WARNING"},
                controller_options={"runtime_env": {"env_vars": _CONTROLLER_VARIABLES}},
            )
            logging.getLogger("ray.serve").setLevel(logging.WARNING)
        except (RayError, RuntimeError, TimeoutError) as error:
            raise StartError(f"Ray Serve did not start: {_cause(str(error))}") from error
        if own is not None:
            # Replaced as in a rolling update it would keep its CPUs until its successors have found others.
            self._skip_drain()
            self._delete()

    def _take_away(self) -> None:
        """Leave Serve as it was found: without our application, and ended if nobody else uses it."""
        if self.local or (self._stops_serve and set(serve.status().applications) <= {self.app_name}):
            serve.shutdown()
            return
        self._delete()

    def _delete(self, seconds: float = DELETE_SECONDS) -> None:
        """Take the application away, and wait at most so long until it is."""
        if self._status() is not None:
            serve.delete(self.app_name, _blocking=False)
        deadline = time.monotonic() + seconds
        while self._status() is not None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _skip_drain(self) -> None:
        """Told that all stops, replicas do not wait for their trajectories."""
        with contextlib.suppress(RayError, RayServeException, TimeoutError):
            # If they are gone, or on a node that was lost, they end after their drain.
            serve.get_app_handle(self.app_name).broadcast("stop_without_drain").results(timeout_s=5.0)

    def _leave(self) -> None:
        if not self.local:
            # Whoever waits for the name needs the port next.
            self._release_port()
        release_name(self.app_name)
        if self.local:
            self._processes.refresh()
        ray.shutdown()
        self._processes.terminate(at_once=False)
        self._release_port()

    def _release_port(self) -> None:
        if self._reserved is not None:
            self._reserved.release()


def _exit_at_once(exit_code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _serve_runs() -> bool:
    """Whether Serve runs on the cluster, be it without an application."""
    try:
        return any(actor["namespace"] == "serve" for actor in list_named_actors(all_namespaces=True))
    except RayError:
        return False


def wait_until(condition: Callable[[], bool], timeout_seconds: float, what: str) -> None:
    """Return once `condition` holds. Raises StartError, naming `what`, after `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise StartError(f"{what} did not happen in {timeout_seconds:g} s")
        time.sleep(POLL_SECONDS)


def _answers(url: str, answers: Callable[[int, bytes], bool]) -> bool:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5.0)
    try:
        connection.request("GET", address.path)
        answer = connection.getresponse()
        return answers(answer.status, answer.read())
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
