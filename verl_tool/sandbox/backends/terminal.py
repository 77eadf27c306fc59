"""A program that goes on running in a container, such as a shell on a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from verl_tool.sandbox.backends.engine import end
from verl_tool.sandbox.worker import RunStatus

if TYPE_CHECKING:
    from verl_tool.sandbox.backends.container import Container

_SECONDS = 20.0
_NO_ECHO = (
    "stty -opost -echo -echoe -echok -echonl -echoctl rows 50 cols 200 2>/dev/null; "
    "printf '\\036%032d:0:/\\036' 0; exec env \"$@\""
)
"""Before a program on a terminal: no echo, and a marker as of a shell's (`workspace.shell`), which says that what is
typed from now on is not echoed. The program's variables are set behind this shell, which drops some of them."""
_FOREGROUND = """
for folder in /proc/[0-9]*; do
    if { mapfile -d '' -t variables < "$folder/environ" && read -r stat < "$folder/stat"; } 2>/dev/null; then
        set -- "$1" "$2" ${stat##*) }
        if [ "$6" = "${folder#/proc/}" ] && [ "$8" -gt 0 ]; then
            case " ${variables[*]} " in *" $1 "*)
                if [ -n "$2" ] && { [ "$2" != KILL ] || [ "$8" != "$6" ]; }; then kill "-$2" -- "-$8" || exit 1; fi
                echo "$6 $8"; exit 0 ;;
            esac
        fi
    fi
done
exit 1
"""
"""Of the session leader whose environment has ``$1``: its id, and the foreground group of its terminal. The signal
``$2``, if there is one, is sent to that group; SIGKILL not to the leader's own."""


class ContainerProgram:
    """A process of the command line, and what it runs in the container."""

    def __init__(
        self,
        container: Container,
        command: Sequence[str],
        streams: tuple[int, int, int],
        env: Mapping[str, str],
        cwd: str,
        terminal: bool,
    ) -> None:
        self._container, self._streams = container, streams
        self._mark = secrets.token_hex(8)
        options = (
            ("--interactive", "--tty", "--detach-keys", "ctrl-@,ctrl-@,ctrl-_") if terminal else ("--interactive",)
        )
        variables = [f"{name}={value}" for name, value in env.items()]
        wrapped = ["bash", "-c", _NO_ECHO, "bash", *variables, *command] if terminal else command
        self._arguments = [*container.exec_arguments(self._mark, env, cwd, *options), *wrapped]
        self._process: asyncio.subprocess.Process | None = None
        self._killing: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Once. Raises OSError."""
        self._process = await self._container.engine.start(*self._arguments, streams=self._streams)

    def kill(self) -> None:
        if self._killing is None:
            self._killing = asyncio.get_running_loop().create_task(self._kill())

    async def wait(self) -> RunStatus:
        assert self._process is not None
        code = await self._process.wait()
        if self._killing is not None:
            await asyncio.shield(self._killing)
        return RunStatus(True, True, None, (code & 0xFF) << 8, 0.0, 0.0, 0, -1)

    async def hang_up(self) -> None:
        """The container has ended: let go of the command line's process."""
        if self._process is not None:
            await end(self._process)
        if self._killing is not None:
            await asyncio.wait({self._killing}, timeout=_SECONDS)

    async def foreground(self, number: signal.Signals | None = None) -> tuple[int, int]:
        """The program, and the process group in the foreground of its terminal, after a signal to that; 0 and 0 if that
        is not known, or the signal could not be sent."""
        script = [
            "bash",
            "-c",
            _FOREGROUND,
            "bash",
            f"VERL_TOOL_COMMAND={self._mark}",
            number.name[3:] if number else "",
        ]
        arguments = [*self._container.exec_arguments("", {}, "/"), *script]
        ran = await self._container.engine.run(arguments, seconds=_SECONDS)
        words = ran.stdout.split()
        if ran.code != 0 or len(words) != 2:
            return 0, 0
        return int(words[0]), int(words[1])

    async def _kill(self) -> None:
        with contextlib.suppress(OSError):
            await self._container.kill(self._mark)
        if self._process is not None:
            await end(self._process)
