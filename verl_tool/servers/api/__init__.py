"""The tool server over HTTP: requests in, answers out."""
