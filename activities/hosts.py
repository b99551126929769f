"""What a host is called: its local sandboxes can only be reached through the same home folder."""

import hashlib
import socket

from perdure.settings.tree import Settings


def host_of(settings: Settings) -> str:
    """`<hostname>-<six hex digits of the home>`, so two homes of one machine never mix."""
    home = hashlib.sha256(str(settings.home.absolute()).encode()).hexdigest()[:6]
    return f"{socket.gethostname()}-{home}"
