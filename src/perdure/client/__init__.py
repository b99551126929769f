"""The SDK for training loops: an async API, and a sync version of it."""
