"""`python -m perdure.gateway`: one gateway process, configured by PERDURE_* settings."""

import asyncio
import sys

from perdure.errors import ConfigurationError, MissingDependency
from perdure.settings import Settings


def main() -> int:
    try:
        from perdure.gateway.control import load_secret
        from perdure.gateway.server import serve
        from perdure.storage.base import open_store
        from perdure.telemetry import configure_logging

        settings = Settings()
        configure_logging(settings, "gateway")
        asyncio.run(serve(settings, load_secret(settings), open_store(settings)))
    except (ConfigurationError, MissingDependency) as error:
        print(f"perdure gateway: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
