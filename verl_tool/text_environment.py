"""The earlier name of `verl_tool.notebook.text_environment`."""

from verl_tool.notebook.text_environment import TextEnvironment

__all__ = ["TextEnvironment"]
