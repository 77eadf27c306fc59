"""The public web: search providers, pages, and a store of answers. Independent of tools."""
