"""The earlier name of `verl_tool.notebook.text_history`."""

from verl_tool.notebook.text_history import TextHistory

__all__ = ["TextHistory"]
