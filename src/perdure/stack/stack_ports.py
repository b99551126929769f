"""Chooses a stack's TCP ports: those that the user set, otherwise the defaults or free ones."""

import socket
from collections.abc import Sequence

from perdure.errors import ConfigurationError
from perdure.settings import settings_loader
from perdure.settings.settings_tree import Settings

LOOPBACK = "127.0.0.1"


def choose(settings: Settings, path: str, taken: Sequence[int] = (), host: str = LOOPBACK) -> int:
    """The port of the setting at `path`, or a free port if the default is taken.

    Raises: ConfigurationError if the user set the port and it is taken.
    """
    wanted: int = settings_loader.value(settings, path)
    if wanted and wanted not in taken and is_free(wanted, host):
        return wanted
    if wanted and settings_loader.is_set(settings, path):
        raise ConfigurationError(
            f"{settings_loader.variable(path)}={wanted} is taken on {host}: stop the process that listens there, "
            "set another port, or unset it to get a free one"
        )
    return free_port(host)


def check_host(host: str) -> None:
    """Raises: ConfigurationError if this machine cannot listen on `host`."""
    try:
        free_port(host)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on PERDURE_GATEWAY__HOST={host!r}: {error.strerror}"
        ) from error


def is_free(port: int, host: str = LOOPBACK) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = LOOPBACK) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
