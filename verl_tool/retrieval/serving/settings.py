"""What a retrieval server is told at its start, in the form in which it travels to every replica."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt

from verl_tool.retrieval.index import MAX_TOPK
from verl_tool.retrieval.search_batcher import MAX_BATCH
from verl_tool.servers.settings import APP_NAME_PATTERN

APP_NAME = "verl_tool_retrieval"


class RetrievalSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    index: str
    """Folder of the index, on every node with a replica."""
    embedder: str | None = None
    """Where its model is, if not where it was when the index was built."""
    topk: int = Field(default=3, ge=1, le=MAX_TOPK)
    """Passages for a query of a request that says nothing of it."""
    max_batch: PositiveInt = MAX_BATCH
    max_queued_queries: PositiveInt = 8192
    """Queries in one replica, running or waiting, beyond which it answers 503."""
    request_timeout_seconds: PositiveFloat = 60.0
    api_key: str | None = Field(default=None, repr=False)
    server: str = ""
    """Name of the server from its start to its end."""
    app_name: str = Field(default=APP_NAME, pattern=APP_NAME_PATTERN)
    listen_host: str = "127.0.0.1"
    listen_port: PositiveInt | None = None
    """None: a request's ``Host`` may bear any port."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names by which clients may call (`HostCheck`)."""
    several_nodes: bool = False
    """Whether replicas may sit on other machines."""
    log_level: str = "INFO"
