"""Starts an agent, and forwards what it sends to 127.0.0.1 to the gateway's Unix socket.

Arguments: socket, port, JSON list of files to keep, ``copy``, ``verdict`` or an empty text, command. It reads one line,
the agent's environment, the files to write and which of them are programs as JSON, prints one line at the end, and
gives the agent's output on stderr. With ``copy`` it ends the agent when its input is closed, and sends the files of the
working directory behind the line. With ``verdict`` the line has what the agent wrote to the descriptor in
VERL_TOOL_VERDICT_FD.
Standard library only: it runs alone in the sandbox.
"""

import base64
import contextlib
import ctypes
import io
import json
import os
import pathlib
import socket
import subprocess
import sys
import tarfile
import threading
import time

_PART = 1 << 16
_MAX_BYTES = 1 << 18
_COPY_BYTES = 1 << 20
_PAUSE_SECONDS = 0.1
_SET_DUMPABLE = 4
_VERDICT_VARIABLE = "VERL_TOOL_VERDICT_FD"
_VERDICT_BYTES = 1 << 16
"""Of a pipe, which holds as many without a reader."""


def pump(source, target):
    """Copy until the source ends, and say so to the target."""
    with contextlib.suppress(OSError):
        while part := source.recv(_PART):
            target.sendall(part)
    for end, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
        with contextlib.suppress(OSError):
            end.shutdown(how)


def serve(client, path):
    """One connection."""
    with client, socket.socket(socket.AF_UNIX) as gateway:
        try:
            gateway.connect(path)
        except OSError:
            return
        upwards = threading.Thread(target=pump, args=(client, gateway), daemon=True)
        upwards.start()
        pump(gateway, client)
        upwards.join()


def accept(listener, path):
    """All connections."""
    while True:
        try:
            client, _ = listener.accept()
        except OSError:  # no descriptor is left
            time.sleep(_PAUSE_SECONDS)
            continue
        try:
            threading.Thread(target=serve, args=(client, path), daemon=True).start()
        except RuntimeError:  # no thread is left
            client.close()


def write_files(files, *executable):
    """Put files into the working directory, some of them `executable`. Raises ValueError for a path that leaves it."""
    for name, data in files.items():
        if os.path.isabs(name) or ".." in pathlib.PurePosixPath(name).parts:
            raise ValueError(f"{name!r} is not below the working directory")
        pathlib.Path(name).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(name).write_bytes(base64.b64decode(data))
    for name in executable:
        os.chmod(name, 0o755)


def read_files(names):
    """What there is of the files to keep, as text."""
    found = {}
    for name in names:
        with contextlib.suppress(OSError), open(name, "rb") as file:
            found[name] = file.read(_MAX_BYTES).decode("utf-8", "replace")
    return found


def read_verdict(pipe):
    """What the agent wrote, without waiting for processes that it left."""
    os.set_blocking(pipe, False)
    try:
        return os.read(pipe, _VERDICT_BYTES).decode("utf-8", "replace")
    except BlockingIOError:
        return ""


class Parts(io.RawIOBase):
    """A file for a tar, which is sent in parts with their lengths before them."""

    def write(self, data):
        """Send a part; an empty one is the last."""
        return sys.stdout.buffer.write(len(data).to_bytes(4, "big") + data)


def send_files():
    """Send the working directory as a tar: files, folders and links. What cannot be read is left out."""
    parts = Parts()
    with tarfile.open(fileobj=parts, mode="w|", bufsize=_COPY_BYTES) as tar:
        for folder, folders, names in os.walk("."):
            for name in folders + names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    entry = tar.gettarinfo(path)
                    if entry is None or not (entry.isfile() or entry.isdir() or entry.issym() or entry.islnk()):
                        continue
                    data = b""
                    if entry.isreg():  # it may be written to meanwhile
                        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
                            data = file.read(entry.size)
                        entry.size = len(data)
                    tar.addfile(entry, io.BytesIO(data))
    parts.write(b"")
    sys.stdout.buffer.flush()


def end_with_input(agent):
    """End the agent when its time is over."""
    os.read(0, 1)
    agent.kill()


def main():
    """Run the agent to its end."""
    # The agent runs as the same user: it must not change what is reported of it.
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    path, port, names, extra, *command = sys.argv[1:]
    try:
        env, *files = json.loads(sys.stdin.readline())
        write_files(*files)
        listener = socket.create_server(("127.0.0.1", int(port)))
        threading.Thread(target=accept, args=(listener, path), daemon=True).start()
        pipe = os.pipe() if extra == "verdict" else ()
        if pipe:
            env[_VERDICT_VARIABLE] = str(pipe[1])
        agent = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=2, stderr=2, env={**os.environ, **env}, pass_fds=pipe[1:]
        )
        if extra == "copy":
            threading.Thread(target=end_with_input, args=(agent,), daemon=True).start()
    except (OSError, ValueError) as error:
        result: dict[str, object] = {"error": f"{type(error).__name__}: {error}"}
    else:
        result = {"exit": agent.wait(), "files": read_files(json.loads(names))}
        if pipe:
            result["verdict"] = read_verdict(pipe[0])
    print(json.dumps(result), flush=True)
    if extra == "copy" and "exit" in result:
        send_files()


if __name__ == "__main__":
    main()
