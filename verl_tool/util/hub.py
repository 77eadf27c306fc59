"""A model hub that cannot be reached: its libraries try each file for minutes before they say so."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import urllib.parse

log = logging.getLogger(__name__)

SECONDS = 15.0
"""For a connection to the hub, the look-up of its name too."""
ADDRESS_SECONDS = 3.0
"""For one of its addresses: packets to the first, such as those of IPv6, may get lost."""
OFFLINE = "HF_HUB_OFFLINE"


def go_offline_without_hub() -> bool:
    """Let ``huggingface_hub`` use its cache alone, in this process and its children, if the hub cannot be reached.

    Returns whether it is offline now. A proxy is taken to reach it, and what the variable says already stays.
    """
    if reported := os.environ.get(OFFLINE, ""):
        return reported.upper() in ("1", "TRUE", "YES", "ON")
    url = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    proxies = (f"{url.scheme}_proxy", "all_proxy")
    if any(os.environ.get(name) or os.environ.get(name.upper()) for name in proxies):
        return False
    if url.hostname is None or _answers(url.hostname, url.port or (443 if url.scheme == "https" else 80)):
        return False
    log.warning(
        "the model hub %s gives no connection (waited for up to %g s): only what this machine has of it in its cache "
        "is used; set %s=0 to ask it all the same",
        url.netloc.rpartition("@")[2],
        SECONDS,
        OFFLINE,
    )
    os.environ[OFFLINE] = "1"
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:  # it has read the variable already
        constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
    return True


def _answers(host: str, port: int) -> bool:
    """Whether a connection comes about. The look-up of a name has no deadline of its own, so a thread waits for it."""
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((host, port), ADDRESS_SECONDS).close()
        except OSError:
            return
        connected.set()

    thread = threading.Thread(target=connect, name="hub", daemon=True)
    thread.start()
    thread.join(SECONDS)
    return connected.is_set()
