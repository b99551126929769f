"""CPU that one model call costs the gateway, by the length of the history and the kind of journal."""
