"""Opens the store that PERDURE_STORE names: a folder or a bucket."""

import contextlib
from pathlib import Path

from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.storage.local_store import LocalStore


def store_to_read(settings: Settings) -> Store:
    """Open the store for a command that only reads. Creates no folder.

    Raises: ConfigurationError, also if `PERDURE_STORE` names a folder that does not exist.
    """
    named = settings.store.removeprefix("file://")
    if named and "://" not in named and not Path(named).is_dir():
        raise ConfigurationError(f"PERDURE_STORE={named}: there is no such folder")
    return open_store(settings)


def open_store(settings: Settings) -> Store:
    """Open the store that the settings name: a folder, or `s3://bucket/prefix`.

    Raises: ConfigurationError for any other URL.
    """
    if settings.store_url.startswith("s3://"):
        from perdure.storage.s3_store import S3Store  # boto3 takes a third of a second

        return S3Store(settings.store_url, endpoint_url=settings.s3_endpoint_url)
    folder = settings.store_url.removeprefix("file://")
    if "://" in folder:
        raise ConfigurationError(f"PERDURE_STORE is {folder}: use a folder, or s3://bucket/prefix")
    if not settings.store:
        with contextlib.suppress(OSError):  # LocalStore has the better message
            settings.home.absolute().mkdir(mode=0o700, parents=True, exist_ok=True)
    return LocalStore(folder)
