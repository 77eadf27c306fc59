"""The Model Context Protocol (https://modelcontextprotocol.io) in both directions: our tools for MCP clients, and tools
of MCP servers among ours. Needs the extra ``mcp``; importing this package imports nothing of it."""
