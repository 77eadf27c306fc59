"""Our tools and tasks for other systems: one file per protocol, each in front of a tool server."""
