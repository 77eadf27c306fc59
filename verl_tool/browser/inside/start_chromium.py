"""Opens the proxy's socket where chromium runs, hands it to the server's process, and becomes chromium.

Arguments: Unix socket, port, megabytes of data a process may have, chromium, its arguments. The network namespace has
the loopback device only, so that this socket is the only way out. Standard library only.
"""

import os
import resource
import socket
import sys

_WAIT_SECONDS = 20.0


def main() -> None:
    """Raises OSError if the server cannot be reached."""
    control, port, megabytes, chromium, *arguments = sys.argv[1:]
    limit = int(megabytes) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(_WAIT_SECONDS)
        server.connect(control)
        if int(port):
            # Every address 127.x.y.z is this machine's: the one that a connection is for tells the context.
            listener = socket.create_server(("0.0.0.0", int(port)), backlog=512)
            socket.send_fds(server, [b"listener"], [listener.fileno()])
            listener.close()
        else:
            server.sendall(b"no listener")
        server.recv(1)
    # The profile is in a file system of its own, not where the driver made a folder for it.
    own = [each for each in arguments if not each.startswith("--user-data-dir=")]
    folder = os.environ["PROFILE"]
    os.execv(chromium, [chromium, f"--user-data-dir={folder}", *own])


if __name__ == "__main__":
    main()
