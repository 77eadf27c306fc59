"""One of NeMo-Gym's own resources servers. Run by an interpreter that has nemo-gym, with a package, a class and a port.

Protocol and limits of connections are those of its `run_webserver`, which needs Ray and a head server besides.
"""

# mypy: ignore-errors
import importlib
import sys
from functools import partial
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import KeepaliveHttpToolsProtocol, ServerClient

if __name__ == "__main__":
    package, name, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    kind = getattr(importlib.import_module(f"resources_servers.{package}.app"), name)
    config = kind.model_fields["config"].annotation(
        name=package, host="127.0.0.1", port=port, entrypoint="app.py", domain="agent"
    )
    server = kind(config=config, server_client=MagicMock(spec=ServerClient))
    app = server.setup_webserver()
    server.setup_exception_middleware(app)
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=port,
        log_level="warning",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=0.5,
        http=partial(KeepaliveHttpToolsProtocol, keepalive=(60, 10, 3)),
    )
