"""Who starts containers."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from verl_tool.errors import ConfigError
from verl_tool.sandbox.backends.providers.protocol import ContainerProvider

ELSEWHERE = ("kubernetes", "modal", "e2b", "daytona")
"""Providers whose containers are on other machines."""
_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


def find_provider(name: str, settings: Mapping[str, Any] = _NO_SETTINGS) -> ContainerProvider:
    """Return a provider: one of `ELSEWHERE`, or a program that understands the arguments of ``docker``. settings: of
    its own. Raises ConfigError if it is not available."""
    if name == "kubernetes":
        from verl_tool.sandbox.backends.providers.kubernetes import KubernetesProvider

        return KubernetesProvider(settings)
    if name == "modal":
        from verl_tool.sandbox.backends.providers.modal import ModalProvider

        return ModalProvider(settings)
    if name == "e2b":
        from verl_tool.sandbox.backends.providers.e2b import E2BProvider

        return E2BProvider(settings)
    if name == "daytona":
        from verl_tool.sandbox.backends.providers.daytona import DaytonaProvider

        return DaytonaProvider(settings)
    if settings:
        raise ConfigError(f"{name} has no settings of its own, but got {', '.join(settings)}; leave them out")
    from verl_tool.sandbox.backends.providers.command_line import CommandLineProvider

    return CommandLineProvider(name)
