"""The SDK for training loops: async first, with a sync twin."""
