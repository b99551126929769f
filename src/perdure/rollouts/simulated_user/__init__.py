"""The user of a conversation: asks a script or a model for the next message, and has each turn graded."""
