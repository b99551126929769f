"""Creates the bucket that PERDURE_STORE names, unless it exists, and expires abandoned journals and
uploads.

A graded rollout deletes its journal, so the remaining ones belong to rollouts without a grade. The
script keeps the bucket's other rules and waits for the S3 server.
"""

import argparse
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from perdure.settings.settings_tree import Settings
from perdure.storage import store_keys

EXISTS = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}
DAYS = 30
"""Must be longer than a rollout may take, including pauses of its run."""
UPLOAD_DAYS = 7
"""Days until the parts of an incomplete upload are removed."""


def rules(prefix: str, days: int) -> list[dict[str, Any]]:
    """`prefix`: the store's prefix in its bucket, empty or ending with a slash."""
    return [
        _rule(prefix + store_keys.JOURNAL, Expiration={"Days": days}),
        _rule(prefix, AbortIncompleteMultipartUpload={"DaysAfterInitiation": UPLOAD_DAYS}),
    ]


def _rule(prefix: str, **action: Any) -> dict[str, Any]:
    return {
        "ID": f"perdure {prefix}",
        "Status": "Enabled",
        "Filter": {"Prefix": prefix},
        **action,
    }


def _existing_rules(client: Any, bucket: str) -> list[dict[str, Any]]:
    try:
        found = client.get_bucket_lifecycle_configuration(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchLifecycleConfiguration":
            raise
        return []
    there: list[dict[str, Any]] = found["Rules"]
    return there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=DAYS, help="until abandoned journals expire")
    days = parser.parse_args().days
    settings = Settings()
    bucket, _, folder = settings.store_url.removeprefix("s3://").rstrip("/").partition("/")
    retries = Config(retries={"max_attempts": 10, "mode": "standard"})
    client = boto3.client("s3", endpoint_url=settings.s3_endpoint_url, config=retries)
    try:
        client.create_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] not in EXISTS:
            raise
    ours = rules(f"{folder}/" if folder else "", days)
    named = {rule["ID"] for rule in ours}
    others = [rule for rule in _existing_rules(client, bucket) if rule.get("ID") not in named]
    client.put_bucket_lifecycle_configuration(
        Bucket=bucket, LifecycleConfiguration={"Rules": [*others, *ours]}
    )
    print(f"bucket {bucket} is ready; abandoned journals expire after {days} days")


if __name__ == "__main__":
    main()
