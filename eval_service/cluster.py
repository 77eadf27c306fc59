"""Ray Serve below the service: the tool server's `ServeCluster`, with another application on it."""

from __future__ import annotations

from verl_tool.servers.serve.launcher import announce_stop
from verl_tool.servers.serve.serve_cluster import ServeCluster

_WORDS = 2000
"""Characters of a replica's last words that are quoted."""


class ServiceCluster(ServeCluster):
    """Ray and Serve for one service; a context manager that gives back what it took."""

    def quote(self, words: str) -> str:
        """The end of a replica's words: a model may fail to load for reasons that take a traceback to tell."""
        return words[-_WORDS:]

    def drain(self, timeout_seconds: float) -> None:
        """Take the application away once its replicas have answered what they work on, at most for so long.

        Serve's own shutdown would cut their answers off.
        """
        announce_stop(self.app_name)
        self._delete(timeout_seconds)
