"""Turn a new process inside the namespaces into a long-running program that is confined like a run.

Limits apply to each process (such as `RLIMIT_DATA`) and to the folder; a control group, if there is one, limits all
processes together. CPU time has no limit, because the program's clients have deadlines.
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

_NICENESS = 5
_NO_CORE = 1
_BOX = "/box"


def main(config_fd: int) -> NoReturn:
    """Confine this process by the JSON config (see `verl_tool.sandbox.sandboxed_service`), and execute the program."""
    with os.fdopen(config_fd, encoding="utf-8") as file:
        config = json.load(file)
    try:
        confine.prefer_as_oom_victim()
        confine.join_groups(config["procs_files"])
        for procs_file in config["procs_files"]:
            os.close(procs_file)
        confine.mount_box(config["uid"], config["disk_bytes"], config["disk_files"])
        os.nice(_NICENESS)
        _set_limits(config)
        if config["as_root"]:
            os.setgroups([])
        confine.drop_privileges(config["as_root"], config["uid"])
        _make_folders(config["links"])
        os.chdir(config["cwd"])
        linux.SeccompFilter(bytes.fromhex(config["filter"])).install()
        os.execvpe(config["command"][0], config["command"], config["env"])
    except OSError as error:
        print(f"{config['command'][0]} cannot be started in the sandbox: {error}", file=sys.stderr, flush=True)
        os._exit(127)


def _make_folders(links: list[list[str]]) -> None:
    """Make the program's folders, with `links` to the readable parts of the host's folders of the same name."""
    for name in ("work", "tmp", "shm"):
        os.mkdir(f"{_BOX}/{name}", 0o700)
    for path, target in links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)


def _set_limits(config: dict) -> None:
    memory, files, processes = config["memory_bytes"], config["open_files"], config["processes"]
    for what, value in (
        (resource.RLIMIT_CORE, _NO_CORE),
        (resource.RLIMIT_FSIZE, config["disk_bytes"]),
        (resource.RLIMIT_NOFILE, files),
        # Not RLIMIT_AS: runtimes such as Node's reserve far more address space than they use.
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(what, (value, value))
