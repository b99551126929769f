"""The durable results of activities: S3 or a local directory, one contract."""
