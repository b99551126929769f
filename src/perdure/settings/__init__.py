"""Every variable that a user may set: our own tree, aliases from the documents, and variables of
other tools."""
