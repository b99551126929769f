"""An attempt's session at the gateway: opened, reached from the sandbox, replayed."""
