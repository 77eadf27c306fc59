"""Where a trajectory's programs and files are: a session of this project's own sandbox, or a container."""

from verl_tool.sandbox.backends.container import Container
from verl_tool.sandbox.backends.container_pool import ContainerPool
from verl_tool.sandbox.backends.protocol import Program, Sandbox, WorkspaceSandbox
from verl_tool.sandbox.backends.settings import ContainerSettings
from verl_tool.sandbox.backends.terminal import ContainerProgram

__all__ = [
    "Container",
    "ContainerPool",
    "ContainerProgram",
    "ContainerSettings",
    "Program",
    "Sandbox",
    "WorkspaceSandbox",
]
