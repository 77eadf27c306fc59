"""Requests that real agents sent to a scripted model server (tests/gateway/data/recordings.tar.xz)."""

from __future__ import annotations

import functools
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ARCHIVE = Path(__file__).parents[1] / "gateway" / "data" / "recordings.tar.xz"
_DIALECTS = {"completions": "chat", "responses": "responses", "messages": "messages"}


@dataclass(frozen=True)
class RecordedRequest:
    """One request and its answer."""

    dialect: str
    kind: str
    """``main``, ``sub``, ``aux`` or ``compact``."""
    op: str
    """Action of the script: ``cut:…`` broke the stream half-way."""
    status: int | None
    """None if it was never answered."""
    headers: dict[str, str]
    body: dict[str, Any]
    response: dict[str, Any]
    """The whole answer in unstreamed form."""


@functools.cache
def recordings() -> dict[str, tuple[RecordedRequest, ...]]:
    """Return the requests to the model by ``agent/scenario``, in their order."""
    found = {}
    with tarfile.open(_ARCHIVE) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.name.endswith(".json") else None
            if file is not None:
                run = json.load(file)
                found[member.name.removesuffix(".json")] = tuple(_requests(run))
    return found


def _requests(run: dict[str, Any]) -> list[RecordedRequest]:
    requests = []
    for each in run["requests"]:
        dialect = _DIALECTS.get(each["path"].split("?")[0].rpartition("/")[2])
        if each["method"] != "POST" or dialect is None or not isinstance(each["body"], dict):
            continue
        body = dict(each["body"])
        if isinstance(body.get("tools"), dict):
            body["tools"] = run["tools"][body["tools"]["$tools"]]
        headers = {name.lower(): value for name, value in (each.get("headers") or {}).items()}
        requests.append(
            RecordedRequest(
                *(dialect, each.get("kind") or "", str(each.get("op") or ""), each.get("status")),
                *(headers, body, each.get("response") or {}),
            )
        )
    return requests
