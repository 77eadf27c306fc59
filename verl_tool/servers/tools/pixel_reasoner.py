"""The tools of Pixel Reasoner (arXiv 2505.15966): `zoom_in` for images and `select_frames` for videos."""

from __future__ import annotations

from verl_tool.servers.tools.select_frames import SelectFrames
from verl_tool.servers.tools.zoom_in import ZoomIn


class PixelReasoner(SelectFrames, ZoomIn):
    """Both, for one ``--tool_type``."""
