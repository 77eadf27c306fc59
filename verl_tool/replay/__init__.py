"""Repeat what a stored run did, and report what differs: scores, tool calls, an update."""
