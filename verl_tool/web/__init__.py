"""The public web: search providers, pages, what was answered before. Knows nothing of tools."""
