"""The gateway as an HTTP server: sockets, routes, limits."""
