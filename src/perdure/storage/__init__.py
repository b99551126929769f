"""The store for durable results of activities: S3 or a local folder, with one contract."""
