"""`python -m perdure.gateway`: one gateway process, configured by PERDURE_* settings.

`perdure up` passes two options to each process of its pool. `--listeners 5,6` names descriptors of
listening sockets that the pool shares; `--health PATH` is a unix socket of this process alone.
"""

import argparse
import sys
from pathlib import Path

import uvloop

from perdure import tracing
from perdure.errors import ConfigurationError, MissingDependency
from perdure.gateway.http.http_server import serve
from perdure.home_folder import keep_private, load_secrets
from perdure.settings.settings_loader import load_settings
from perdure.storage.store_url import open_store
from perdure.telemetry import configure_logging


def main() -> int:
    options = _options()
    try:
        settings = load_settings()
        keep_private(settings)
        configure_logging("gateway")
        tracing.configure(settings, "gateway")
        serving = serve(
            settings,
            load_secrets(settings),
            open_store(settings),
            descriptors=options.listeners,
            health=options.health,
        )
        uvloop.run(serving)
        tracing.flush()
    except (ConfigurationError, MissingDependency) as error:
        print(f"perdure gateway: {error}", file=sys.stderr)
        return 2
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perdure.gateway")
    parser.add_argument("--listeners", type=_descriptors, default=(), metavar="FD,FD")
    parser.add_argument("--health", type=Path, metavar="PATH")
    return parser.parse_args()


def _descriptors(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
