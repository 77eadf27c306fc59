"""The ground on which hostile snippets are run: a pool, things worth stealing, a victim, and witnesses of all that."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from verl_tool.sandbox import Limits, RunResult, SandboxPool, SessionLimits
from verl_tool.sandbox.worker import Worker

OUTPUT_CAP = 1 << 20
SETTLE_SECONDS = 0.15
_PLANTED = ("/etc/sbx_pwn", "/usr/sbx_pwn", "/sbx_pwn", "/root/sbx_pwn")
_VICTIM = """
import subprocess, sys, types
victim_variable = 1
sys.modules["victim_module"] = types.ModuleType("victim_module")
open("victim.txt", "w").write("victim")
subprocess.run([sys.executable, "-c", "import time; time.sleep(600)", "sbx-victim-arg"])
"""


@dataclass(frozen=True)
class Outcome:
    """What a hostile snippet did, to itself and to others. Names as in the predicates of adversarial.json."""

    result: RunResult
    wall: float
    next_ok: bool

    @property
    def rc(self) -> int:
        """Exit status as a caller of `subprocess` sees it."""
        code = self.result.exit_code
        return code if code is not None else -(self.result.signal or 0)

    def names(self) -> dict[str, object]:
        """What the run itself shows."""
        result = self.result
        return {
            "out": result.stdout_raw,
            "err": result.stderr_raw,
            "out_cap": OUTPUT_CAP,
            "out_len": len(result.stdout_raw),
            "err_len": len(result.stderr_raw),
            "out_total": result.stdout_bytes,
            "rc": self.rc,
            "timed_out": result.timed_out,
            "wall": self.wall,
            "next_ok": self.next_ok,
        }


class HostileGround:
    """Use as an async context manager, on one event loop."""

    def __init__(self, pool: SandboxPool, directory: Path) -> None:
        """`pool`: started after this, so that its environment holds the canary. `directory`: empty, of the host's."""
        self.pool = pool
        self.secret = secrets.token_hex(16)
        self.directory = directory
        (directory / "secret.txt").write_text(self.secret)
        os.environ["SBX_CANARY"] = self.secret
        self._victim: asyncio.Task[RunResult] | None = None

    async def __aenter__(self) -> HostileGround:
        self.tcp, self.udp = socket.socket(), socket.socket(type=socket.SOCK_DGRAM)
        self.tcp.bind(("127.0.0.1", 0))
        self.tcp.listen()
        self.port: int = self.tcp.getsockname()[1]
        self.udp.bind(("127.0.0.1", self.port))
        self.udp.setblocking(False)
        self.abstract = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):  # another test run on this machine holds it: as good
            self.abstract.bind("\0sbx-canary")
            self.abstract.listen()
        await self.pool.start()
        self._victim = asyncio.create_task(self.pool.run(_VICTIM, limits=Limits(wall_seconds=600)))
        await asyncio.sleep(1.0)
        async with self.pool.session():  # starts the forkserver of sessions
            self._servers = {worker.pid for worker in self._workers()}
        self._before = self._processes()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._victim is not None
        self._victim.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._victim
        await self.pool.close()
        for listener in (self.tcp, self.udp, self.abstract):
            listener.close()
        del os.environ["SBX_CANARY"]

    async def unleash(self, code: str, limits: Limits) -> Outcome:
        """Run one snippet, then a harmless one."""
        code = code.replace("{CANARY_DIR}", str(self.directory)).replace("SBX_PORT", str(self.port))
        begun = time.monotonic()
        result = await self.pool.run(code, limits=limits)
        wall = time.monotonic() - begun
        after = await self.pool.run("print(1+1)")
        return Outcome(result, wall, after.stdout == "2\n")

    async def unleash_in_session(self, code: str, limits: Limits) -> Outcome:
        """Run one snippet as a cell, then a harmless one in the same session."""
        code = code.replace("{CANARY_DIR}", str(self.directory)).replace("SBX_PORT", str(self.port))
        async with self.pool.session(limits=SessionLimits(**asdict(limits))) as session:
            begun = time.monotonic()
            result = await session.run(code)
            wall = time.monotonic() - begun
            after = await session.run("print(1+1)")
            return Outcome(result, wall, after.stdout == "2\n")

    async def witness(self, outcomes: Iterable[Outcome]) -> dict[str, object]:
        """What became of everything else, once all these have ended."""
        await asyncio.sleep(SETTLE_SECONDS)
        secret = self.secret.encode()
        stats = self.pool.stats()
        servers = {worker.pid for worker in self._workers()}
        return {
            "leftover": len(self._processes() - self._before),
            "server_alive": stats.restarts == 0 and servers == self._servers and stats.workers < len(servers),
            "victim_alive": self._victim is not None and not self._victim.done(),
            "canary_leaked": any(secret in o.result.stdout_raw + o.result.stderr_raw for o in outcomes),
            "host_unchanged": self._host_unchanged(),
            "udp_received": self._datagram(),
            **self._traces(),
        }

    def _traces(self) -> dict[str, object]:
        return {
            "no_core": not list(Path.cwd().glob("core*")) and not list(self.directory.glob("core*")),
            "shm_clean": not os.path.exists("/dev/shm/sbx_canary_shm"),
            "sysv_clean": str(0x5B5B) not in Path("/proc/sysvipc/shm").read_text().split(),
        }

    def _workers(self) -> list[Worker]:
        assert self.pool._sessions is not None
        return [*self.pool._workers, *self.pool._sessions._workers]

    def _processes(self) -> set[int]:
        """All processes below the pool's workers."""
        parents: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                    parents.setdefault(int(file.read().rpartition(")")[2].split()[1]), []).append(int(name))
        found: set[int] = set()
        queue = [worker.pid for worker in self._workers() if worker.pid]
        while queue:
            children = parents.get(queue.pop(), [])
            found.update(children)
            queue += children
        return found

    def _host_unchanged(self) -> bool:
        planted = [path for path in _PLANTED if os.path.exists(path)]
        customized = [path for path in os.sys.path if os.path.exists(os.path.join(path or ".", "sitecustomize.py"))]  # type: ignore[attr-defined]
        entries = sorted(os.listdir(self.directory))
        return not planted and not customized and entries == ["secret.txt"] and self._canary_intact()

    def _canary_intact(self) -> bool:
        return (self.directory / "secret.txt").read_text() == self.secret

    def _datagram(self) -> bool:
        try:
            self.udp.recv(16)
        except BlockingIOError:
            return False
        return True
