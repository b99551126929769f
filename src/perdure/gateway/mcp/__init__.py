"""Calls of MCP servers: forwarded with the server's credentials, bounded, and recorded."""
