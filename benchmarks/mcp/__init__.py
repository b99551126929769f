"""The cost of the gateway in a call of an MCP server."""
