"""Looking at runs in a browser: see `verl_tool.viewer.viewer_cli`."""
