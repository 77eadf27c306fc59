"""Who starts containers."""

from verl_tool.sandbox.backends.providers.protocol import ContainerProvider


def find_provider(name: str) -> ContainerProvider:
    """Return the provider of a name. Raises ConfigError if it is not available."""
    from verl_tool.sandbox.backends.providers.command_line import CommandLineProvider

    return CommandLineProvider(name)
