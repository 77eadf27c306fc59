"""Models behind the endpoint: token ids in, token ids out."""
