"""Render conversations and observations with a chat template."""
