"""Measures prefix-cache hits of the gateway's choice of engines, compared with other routers."""
