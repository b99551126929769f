"""Creates the bucket that PERDURE_STORE names, unless it exists. Waits for the S3 server."""

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from perdure.settings.tree import Settings

EXISTS = {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}


def main() -> None:
    settings = Settings()
    bucket = settings.store_url.removeprefix("s3://").split("/", 1)[0]
    retries = Config(retries={"max_attempts": 10, "mode": "standard"})
    client = boto3.client("s3", endpoint_url=settings.s3_endpoint_url, config=retries)
    try:
        client.create_bucket(Bucket=bucket)
    except ClientError as error:
        if error.response["Error"]["Code"] not in EXISTS:
            raise
    print(f"bucket {bucket} is ready")


if __name__ == "__main__":
    main()
