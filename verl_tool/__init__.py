"""Train and evaluate language models that act through tools."""

__version__ = "0.1.0"
