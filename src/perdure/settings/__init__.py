"""Every variable that a user may set: our own tree, the documents' aliases, other tools' variables."""
