"""`python -m perdure.gateway`: one gateway process, configured by PERDURE_* settings.

`--listeners 5,6` are descriptors of listening sockets shared with other gateways, `--health PATH` a
unix socket of this process alone: what `perdure up` passes to each process of its pool.
"""

import argparse
import sys
from pathlib import Path

from perdure import lean_imports, tracing
from perdure.errors import ConfigurationError, MissingDependency
from perdure.settings.load import load_settings


def main() -> int:
    options = _options()
    try:
        leave_out_what_is_unused()
        import uvloop

        from perdure.gateway.http.server import serve
        from perdure.home import keep_private, load_secrets
        from perdure.storage.base import open_store
        from perdure.telemetry import configure_logging

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


def leave_out_what_is_unused() -> None:
    """Before other imports."""
    lean_imports.for_no_terminal("structlog", "httpx")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m perdure.gateway")
    parser.add_argument("--listeners", type=_descriptors, default=(), metavar="FD,FD")
    parser.add_argument("--health", type=Path, metavar="PATH")
    return parser.parse_args()


def _descriptors(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
