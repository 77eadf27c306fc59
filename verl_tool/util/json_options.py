"""Options and lines of files that are JSON objects."""

from __future__ import annotations

import json
from typing import Any

from verl_tool.errors import ConfigError


def json_object(text: str, shown: str) -> dict[str, Any]:
    """The object that `text` is. Raises ConfigError that calls it `shown`."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{shown} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{shown} is no JSON object")
    return content
