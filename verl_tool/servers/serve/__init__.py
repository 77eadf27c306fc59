"""The tool server on Ray Serve: its cluster, its deployment and its ports."""
