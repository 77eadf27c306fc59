"""From a fresh process within the namespaces to a program that goes on running there, confined as a run is.

What is bounded here is each process (`RLIMIT_DATA` and the like) and the folder; a control group, where there is one,
bounds all of them together. There is no bound of CPU time: whoever waits for the program's answers has deadlines.
"""

from __future__ import annotations

import json
import os
import resource
import sys

from . import confine, linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_GIVES_WAY = 5
_NO_CORE = 1
_BOX = "/box"


def main(config_fd: int) -> NoReturn:
    """Confine this process as the JSON in a file says (`verl_tool.sandbox.sandboxed_service`), and become it."""
    with os.fdopen(config_fd, encoding="utf-8") as file:
        config = json.load(file)
    try:
        confine.die_first()
        confine.join_groups(config["procs_files"])
        for procs_file in config["procs_files"]:
            os.close(procs_file)
        confine.mount_box(config["uid"], config["disk_bytes"], config["disk_files"])
        os.nice(_GIVES_WAY)
        _limit(config)
        if config["as_root"]:
            os.setgroups([])
        confine.drop_privileges(config["as_root"], config["uid"])
        _furnish(config["links"])
        os.chdir(config["cwd"])
        linux.SeccompFilter(bytes.fromhex(config["filter"])).install()
        os.execvpe(config["command"][0], config["command"], config["env"])
    except OSError as error:
        print(f"{config['command'][0]} cannot be started in the sandbox: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def _furnish(links: list[list[str]]) -> None:
    """Its own folders, and in them `links` to what it may read of the host's folders of the same name."""
    for name in ("work", "tmp", "shm"):
        os.mkdir(f"{_BOX}/{name}", 0o700)
    for path, target in links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)


def _limit(config: dict) -> None:
    memory, files, processes = config["memory_bytes"], config["open_files"], config["processes"]
    for what, value in (
        (resource.RLIMIT_CORE, _NO_CORE),
        (resource.RLIMIT_FSIZE, config["disk_bytes"]),
        (resource.RLIMIT_NOFILE, files),
        # Not the address space: runtimes such as Node's reserve far more of it than they use.
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(what, (value, value))
