"""The Ray cluster and the Serve instance below a tool server: joined or started, and left as they were found."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application, RunTarget
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ServeInstanceDetails
from typing_extensions import Self

from verl_tool.errors import ConfigError, StartError
from verl_tool.json_text import shown
from verl_tool.servers.cluster.registry import NAMESPACE, registry_handle, registry_name
from verl_tool.servers.replica_parts import make_tools
from verl_tool.servers.serve.deployment import DEPLOYMENT, application
from verl_tool.servers.serve.ingress import IngressMode, environment
from verl_tool.servers.serve.ingress_standby import IngressStandby
from verl_tool.servers.serve.launcher import announce_stop, claim_name, release_name
from verl_tool.servers.serve.local_ray import (
    folder_for_sockets,
    keep_token_private,
    make_token,
    on_loopback,
    private_folder,
)
from verl_tool.servers.serve.ports import Reservation, reserve_block, reserve_port
from verl_tool.servers.serve.replica_output import ReplicaOutput
from verl_tool.servers.settings import APP_NAME_PATTERN, ROUTE_PREFIX_PATTERN, AutoscalingSettings, ReplicaSettings
from verl_tool.util.child_processes import HEAD, ChildProcesses

POLL_SECONDS = 0.2
"""How often the state of the application is looked at while it starts."""
SERVE_ENDS_SECONDS = 120.0
"""How long a Serve that is being shut down is waited for."""
DELETE_SECONDS = 20.0
"""How long the end of our application is waited for where Serve goes on."""
REPLICA_LEAVING_SECONDS = 1.0
"""How long a replica that is taken away still answers, so that HAProxy hears of it first."""
INGRESS_SECONDS = 30.0
"""Deadline for the ingress to find a replica."""
START_TRIES = 2
"""Ray gives its processes half a minute to come up, which a busy machine may not."""
OBJECT_STORE_BYTES = 100 << 20
"""Of a local cluster. Tool calls do not go through Ray's object store."""
_LONGEST_TEMP = 16
"""Characters: Serve makes a folder with a name of 56 in ours, and HAProxy takes sockets with a path of at most 97."""
PROXY_MARGIN_SECONDS = 60.0
"""How much longer than the server Serve's Python proxy waits: for a body that comes slowly, and for a replica."""
_INTERRUPTED = 130
"""Exit code of a process that was interrupted."""
_GONE = ("NOT_STARTED", ApplicationStatus.DELETING.value)
_HOST_PATTERN = r"^[A-Za-z0-9_.:%-]+$"
"""A name, or an address, which may have a zone behind a ``%``."""


class ServeCluster:
    """Ray and Serve for one tool server; a context manager that gives back what it took.

    `ray_address`: a running cluster to join; None: a local one is started, which ends with this process, with
    `logical_cpus` for replicas. `ingress_location`: on which nodes there is an ingress; by default on every node with a
    replica, so that each node reaches the tools at `host`, `port` of its own. `app_name`: of the application; another
    live server may not have it. `route_prefix`: path below which the server is found; by default ``/`` if Serve is
    started here.

    Where Serve runs on the cluster already, its ingress is used, whatever `host` and `port` say, and the default
    path is ``/APP_NAME``. What a launcher that is dead left there under the same name is replaced.

    `request_timeout_seconds`: the longest that a replica takes for a request. Without HAProxy, the ingress of a local
    cluster answers 408 to what has no answer some time after it.
    """

    deployment = DEPLOYMENT
    """Name of the one deployment of an application of ours."""

    def __init__(
        self,
        *,
        host: str,
        port: int,
        ingress_mode: IngressMode,
        ray_address: str | None = None,
        logical_cpus: int | None = None,
        ingress_location: ProxyLocation = ProxyLocation.EveryNode,
        app_name: str = "verl_tool",
        route_prefix: str | None = None,
        request_timeout_seconds: float | None = None,
    ) -> None:
        _refuse_odd("host", host, _HOST_PATTERN)
        _refuse_odd("app_name", app_name, APP_NAME_PATTERN)
        _refuse_odd("route_prefix", route_prefix or "/", ROUTE_PREFIX_PATTERN)
        self.host = host
        self.port = port
        self.ingress_mode = ingress_mode
        self.app_name = app_name
        self.route_prefix = route_prefix or "/"
        self.joined_serve = False
        """Serve ran on the cluster already."""
        self._wanted_prefix = route_prefix
        self._stops_serve = True
        self._serve_goes_on = False
        self.local = ray_address is None
        self._output = ReplicaOutput(app_name, local=self.local)
        self._address = ray_address
        self._logical_cpus = logical_cpus
        self._ingress_location = ingress_location
        self._request_timeout = request_timeout_seconds
        self._folder: Path | None = None
        self._reserved: list[Reservation] = []
        self._deployed = False
        self._watch: IngressStandby | None = None
        self._processes = ChildProcesses()

    def __enter__(self) -> Self:
        """Connect to Ray and Serve, which are started if need be.

        Raises StartError, PortTakenError for a port and NameTakenError for a name of another live server.
        """
        self._folder = Path(tempfile.mkdtemp(prefix="vt-", dir=folder_for_sockets(_LONGEST_TEMP)))
        try:
            if self.local:
                self._reserve_ingress_port()
            self._connect()
            if not self.local:
                claim_name(self.app_name)
            self._join_or_start_serve()
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
            if self._watch is not None:
                self._watch.stop()
            if self._deployed:
                _stop_registry(self.app_name)
            self._take_away()
        except RayError:
            # The cluster is gone already; there is nothing left to stop in it.
            pass
        finally:
            self._leave()

    @property
    def url(self) -> str:
        """Base URL of the server, as seen from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.port}{self.route_prefix.rstrip('/')}"

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
        front = {"listen_host": self.host, "listen_port": self.port, "route_prefix": self.route_prefix}
        settings = settings.model_copy(update={"app_name": self.app_name, **front})
        if not self._deployed:
            self._deployed = True
            if any(tool.stateful for tool in make_tools(settings)):
                # It starts while the replicas do. That of a dead launcher was told to stop, maybe.
                registry_handle(self.app_name, settings.state_ttl_seconds).begin.remote()
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
                raise StartError(words or self.quote(status.message))
            if time.monotonic() > deadline:
                raise StartError(f"the replicas were not ready in {timeout_seconds:g} s: {words}")

    def wait_for_ingress(self, answers: Callable[[int, bytes], bool]) -> None:
        """Return once `answers` holds of an answer (status, body) of ``/health``. Raises StartError at a deadline."""
        wait_until(lambda: _answers(f"{self.url}/health", answers), INGRESS_SECONDS, f"an answer of {self.url}/health")

    def watch_ingress(self) -> None:
        """From now on HAProxy is stood in for at once if it dies. On a local cluster; elsewhere Serve sees to it."""
        if self.local and self.ingress_mode.haproxy is not None and self._folder is not None and self._watch is None:
            host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
            self._watch = IngressStandby(self.ingress_mode.haproxy, self._folder, host, self.port)
            self._watch.start()

    def _has_lost_head(self) -> bool:
        """Whether the local cluster has lost its head: no call of Ray's would come back."""
        if not self.local:
            return False
        self._processes.refresh()
        return self._processes.has_lost_head()

    def _abandon(self, exit_code: int) -> None:
        """End a local cluster without its help, and later this process: Ray's part of it can no longer be ended."""
        if self._watch is not None:
            self._watch.stop()
        self._processes.terminate(at_once=True)
        self._release_ports()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
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
        if state in _GONE:
            raise StartError(f"somebody took the application {self.app_name!r} off the cluster (it is {state})")
        return state

    def replicas_words(self) -> str:
        """What Serve says about the application's replicas, as `quote` gives it; empty if all is well."""
        return self._words(self._status())

    def quote(self, words: str) -> str:
        """What a user needs of the words of a replica that could not start."""
        return _cause(words)

    def _status(self) -> ApplicationStatusOverview | None:
        return serve.status().applications.get(self.app_name)

    def _state(self) -> str:
        status = self._status()
        return status.status.value if status is not None else "NOT_STARTED"

    def _words(self, status: ApplicationStatusOverview | None) -> str:
        words = "\n".join(deployment.message for deployment in status.deployments.values()) if status else ""
        return self.quote(words) if words.strip() else ""

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
                },
            )

    def _run(self, app: Application) -> None:
        """Hand the application to Serve. If Serve is just being shut down, as it is for a while after its launcher
        has gone, wait for its end and start another."""
        for tries_left in reversed(range(START_TRIES)):
            try:
                serve.run_many(
                    [RunTarget(app, name=self.app_name, route_prefix=self.route_prefix)],
                    wait_for_ingress_deployment_creation=False,
                    wait_for_applications_running=False,
                )
                # A Serve that is being shut down ignores it, and still lists what a dead launcher left.
                if self._state() not in _GONE:
                    return
                reason = "Ray Serve on this cluster is being shut down"
            except (RayError, RayServeException, RuntimeError, ValueError) as error:
                reason = _cause(str(error))
            if self.local or not tries_left:
                break
            wait_until(lambda: _running_serve() is None, SERVE_ENDS_SECONDS, f"the end of Ray Serve ({reason})")
            self._join_or_start_serve()
        raise StartError(f"Ray Serve did not take the application {self.app_name!r}: {reason}")

    def _join_or_start_serve(self) -> None:
        assert self._folder is not None
        running = None if self.local else _running_serve()
        if running is None:
            if not self._reserved:
                self._reserve_ingress_port()
            self._start_serve(self._folder)
            # Somebody else may have been faster.
            running = None if self.local else _running_serve()
        if running is not None:
            self._join(running)

    def _join(self, running: ServeInstanceDetails) -> None:
        """Take the ingress and the path from the Serve that runs. Raises StartError if there is no place for us."""
        own = running.applications.get(self.app_name)
        if own is not None and own.deployments and set(own.deployments) != {self.deployment}:
            raise StartError(
                f"the application {self.app_name!r} on this cluster is none of ours; give another name with --app_name"
            )
        front = running.http_options
        if front is None or running.proxy_location == ProxyLocation.Disabled:
            raise StartError(
                "Ray Serve runs on this cluster without HTTP; start it with a proxy_location other than Disabled, "
                "or leave out --ray_address"
            )
        started_here = bool(self._reserved) and front.port == self.port
        self.joined_serve = not started_here
        self.host, self.port = front.host, front.port
        # What a dead launcher left is ours to end, with the Serve that it may have started.
        self._stops_serve = started_here or own is not None
        left = own.route_prefix if own is not None else None
        self.route_prefix = self._wanted_prefix or left or ("/" if started_here else f"/{self.app_name}")
        for name, other in running.applications.items():
            if name != self.app_name and other.route_prefix == self.route_prefix:
                raise StartError(
                    f"the application {name!r} on this cluster is at {self.route_prefix!r}; "
                    "choose another path with --route_prefix"
                )
        if own is not None:
            # Replaced as in a rolling update it would keep its CPUs until its successors have found others.
            _stop_registry(self.app_name)
            self._delete()

    def _take_away(self) -> None:
        """Leave Serve as it was found: without our application, and ended if nobody else uses it."""
        if self.local or (self._stops_serve and set(serve.status().applications) <= {self.app_name}):
            serve.shutdown()
            return
        self._serve_goes_on = not self.joined_serve
        self._delete()

    def _delete(self, seconds: float = DELETE_SECONDS) -> None:
        """Take the application away, and wait at most so long until it is."""
        if self._status() is not None:
            serve.delete(self.app_name, _blocking=False)
        deadline = time.monotonic() + seconds
        while self._status() is not None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _reserve_ingress_port(self) -> None:
        self._reserved.append(reserve_port(self.port))
        refuse_busy_port(self.host, self.port)

    def _start_serve(self, folder: Path) -> None:
        block = reserve_block()
        self._reserved.append(block)
        variables = environment(
            self.ingress_mode,
            folder,
            REPLICA_LEAVING_SECONDS,
            block.ports,
            secrets.token_hex(8),
            loopback_only=self.local,
            route_prefix=self.route_prefix,
        )
        try:
            serve.start(
                http_options=HTTPOptions(host=self.host, port=self.port, request_timeout_s=self._proxy_timeout()),
                proxy_location=self._ingress_location,
                controller_options={"runtime_env": {"env_vars": variables}},
            )
        except (RayError, RuntimeError, TimeoutError) as error:
            raise StartError(f"Ray Serve did not start: {_cause(str(error))}") from error

    def _proxy_timeout(self) -> float | None:
        """After how many seconds Serve's Python proxy gives up. None: never, for others' applications may be slower."""
        if not self.local or self.ingress_mode.haproxy is not None or self._request_timeout is None:
            return None
        return self._request_timeout + PROXY_MARGIN_SECONDS

    def _leave(self) -> None:
        if self._deployed:
            _kill_actor(registry_name(self.app_name))
        if not self.local:
            # Whoever waits for the name needs the ports next.
            self._release_ports()
        release_name(self.app_name)
        if self.local:
            self._processes.refresh()
        ray.shutdown()
        self._processes.terminate(at_once=False)
        self._release_ports()
        # HAProxy's files are there, and others may go on using the Serve that was started here.
        if self._folder is not None and not self._serve_goes_on:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _release_ports(self) -> None:
        while self._reserved:
            self._reserved.pop().release()


def _exit_at_once(exit_code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _running_serve() -> ServeInstanceDetails | None:
    """The Serve that runs on the cluster, if one does."""
    try:
        client = _get_global_client(raise_if_no_controller_running=False)
        return ServeInstanceDetails(**client.get_serve_details()) if client is not None else None
    except (RayError, RayServeException):
        return None


def _refuse_odd(option: str, value: str, pattern: str) -> None:
    """Raises ConfigError for what would be something else in the config that Serve writes for HAProxy."""
    if re.fullmatch(pattern, value) is None:
        raise ConfigError(f"--{option} is {shown(value)}; it must match {pattern}")


def refuse_busy_port(host: str, port: int) -> None:
    """Raises StartError if nobody can listen on `port` of `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            # Two sockets that allow reuse may both bind; only one may listen.
            probe.listen(1)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise StartError(f"port {port} on {host} cannot be used: {reason}; choose another with --port") from error


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


def _stop_registry(app_name: str) -> None:
    """Told that all stops, replicas do not wait for their trajectories."""
    try:
        registry = ray.get_actor(registry_name(app_name), namespace=NAMESPACE)
        ray.get(registry.stop.remote(), timeout=5.0)
    except (ValueError, RayError):
        # It is gone, or on a node that was lost: then replicas end after their drain.
        return


def _kill_actor(name: str) -> None:
    if not ray.is_initialized():
        return
    try:
        ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    except (ValueError, RayError):
        # It is gone already.
        return


def _cause(text: str) -> str:
    """The line of a replica's traceback that a user needs: our own error if there is one, else the last."""
    ours = re.findall(r"verl_tool\.errors\.\w+: (.+)", text)
    if ours:
        return str(ours[-1])
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "Ray gave no reason"
