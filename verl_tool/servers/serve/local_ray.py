"""A Ray cluster of this machine alone: its processes listen on 127.0.0.1, and its files are this user's."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import ray
from ray._common.network_utils import is_localhost, node_ip_address_from_perspective
from ray._private import ray_constants, services

from verl_tool.errors import ConfigError
from verl_tool.util.env_variables import variables_unless_set

LOOPBACK_ENVIRONMENT = {
    # torch's and vLLM's process groups would listen on the address that the host's name or the way to the network has.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
"""For the processes of a cluster of one machine, unless the user has set them."""
_LONGEST_TEMP = 24
"""Characters: Ray makes Unix sockets far below its folder, and their paths may have 107."""


def address_to_join(address: str | None) -> str | None:
    """The cluster that ``ray.init(address)`` would join: of `address`, ``RAY_ADDRESS``, or ``ray start`` on this node.

    None: it would start one. Raises ConfigError if one is asked for and none runs here, or its address is none.
    """
    try:
        found: str | None = services.canonicalize_bootstrap_address(address)  # type: ignore[arg-type]  # None: a default
    except ConnectionError as error:
        raise ConfigError(f"{error}; run `ray start --head` on this machine first, or unset RAY_ADDRESS") from None
    except ValueError as error:
        raise ConfigError(f"{error}; give HOST:PORT, auto or local (RAY_ADDRESS)") from None
    return found


@contextmanager
def on_loopback() -> Iterator[None]:
    """Within the block, a cluster that ``ray.init(address="local")`` starts listens on 127.0.0.1 only.

    Each of Ray's processes listens on 127.0.0.1 if that is its node's address, and on all addresses if not. `ray.init`
    replaces a 127.0.0.1 that it is told by the address on the network, unless it is set to one machine, as it is on a
    laptop; it reads that setting (``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER``) once, when it is imported.
    """
    with mock.patch.object(ray_constants, "ENABLE_RAY_CLUSTER", False), variables_unless_set(LOOPBACK_ENVIRONMENT):
        yield


def network_address() -> str:
    """By which other machines reach this node, whether or not its Ray listens for them."""
    address: str = ray.util.get_node_ip_address()
    return node_ip_address_from_perspective() if is_localhost(address) else address


def folder_for_sockets(longest: int) -> Path:
    """``RAY_TMPDIR`` or the system's folder for temporary files; ``/tmp`` if its path has more than `longest`
    characters, for the path of a Unix socket below it is limited."""
    temp = Path(os.environ.get("RAY_TMPDIR") or tempfile.gettempdir())
    return temp if len(str(temp)) <= longest else Path("/tmp")


def private_folder() -> Path:
    """Where Ray keeps sockets, logs and spilled objects: in ``RAY_TMPDIR`` or ``/tmp``, and nobody else's to enter.

    Ray's own choice, ``/tmp/ray``, is writable for all, so that any user could take a socket's place.
    """
    folder = folder_for_sockets(_LONGEST_TEMP) / f"verl-tool-{os.geteuid()}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        # Somebody else took the name.
        folder = Path(tempfile.mkdtemp(prefix="verl-tool-", dir=folder.parent))
    folder.chmod(0o700)
    # Ray opens the folder that it is given to all, as its own choice; so it is given one within.
    return folder / "ray"


def make_token() -> None:
    """A token for a cluster that is to be started, whole at once, unless there is one. Then as `keep_token_private`.

    Of two clusters that start at the same moment with Ray's own way, each would make one.
    """
    path = _token_file()
    if path is not None and path == _default_token_file() and not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_at_once(path, secrets.token_hex(32))
    keep_token_private()


def keep_token_private() -> None:
    """Let nobody but this user read Ray's token, if there is one: Ray itself leaves it readable for all."""
    path = _token_file()
    if path is None or not path.exists():
        return
    _for_the_owner_only(path, 0o600)
    if path == _default_token_file():
        _for_the_owner_only(path.parent, 0o700)


def _token_file() -> Path | None:
    """Where Ray looks for the token; None if it looks in no file."""
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return None
    provided = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(provided) if provided else _default_token_file()


def _default_token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"


def _write_at_once(path: Path, text: str) -> None:
    """If another process was first, its file stays."""
    descriptor, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        with suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _for_the_owner_only(path: Path, mode: int) -> None:
    found = path.stat()
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
        path.chmod(mode)
