"""How many agents one engine bears: the gateway's real pool, an engine whose time is modelled."""
