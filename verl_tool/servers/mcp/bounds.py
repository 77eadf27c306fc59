"""What an MCP server, which is anybody's, may send at most. Beyond it the connection is closed."""

from __future__ import annotations

from verl_tool.errors import VerlToolError

MAX_MESSAGE_BYTES = 4 << 20
"""Of one message: a page's screenshot, or a long text."""
MAX_BYTES = 16 << 20
"""Of all messages between one call and the next, for a server may send any number of notifications."""
MAX_PARTS = 4096
"""Messages, or parts of them, in these bytes: to read one costs the event loop some 0.1 ms, however short it is."""
MAX_PAGES = 32
"""Of one list of tools."""
MAX_TOOLS = 256
"""Of one server."""
MAX_TOOL_NAME = 128
"""Characters of a tool's whole name, ``mcp__server__tool``."""
MAX_DESCRIPTION = 4096
"""Characters of a tool's description; of a longer one the end is left out."""
MAX_SCHEMA_BYTES = 64 << 10
"""Of a tool's schema, as JSON."""
MAX_SCHEMA_DEPTH = 32
MAX_IMAGE_CHARACTERS = 3 << 20
"""Of an image, as base64."""


class TooMuchError(VerlToolError):
    """A server sent more than it may."""


class Budget:
    """What a server may still send; renewed by every call."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """A call begins."""
        self._bytes, self._parts = MAX_BYTES, MAX_PARTS

    def take(self, size: int) -> None:
        """A message, or a part of one, of `size` bytes has come. Raises TooMuchError."""
        self._bytes -= size
        self._parts -= 1
        if self._bytes < 0 or self._parts < 0:
            raise TooMuchError(f"it sent more than {MAX_BYTES >> 20} MiB or {MAX_PARTS} messages for one call")
