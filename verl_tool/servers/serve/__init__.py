"""The tool server on Ray Serve: its cluster, its ingress, its deployment and its ports."""
