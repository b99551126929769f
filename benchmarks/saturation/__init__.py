"""How many agents one engine can serve: the gateway's real pool with a modelled engine."""
