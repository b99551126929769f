"""`python -m tests.compose.instance`: the toy instances in the store and home of these settings."""

import asyncio

from perdure.settings.settings_tree import Settings
from perdure.storage.store_url import open_store
from tests.stack.made_instances import add_instances

if __name__ == "__main__":
    settings = Settings()
    asyncio.run(add_instances(settings.home, open_store(settings)))
