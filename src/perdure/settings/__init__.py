"""All variables that a user may set: Perdure's settings, aliases from other systems, and variables
of other tools."""
