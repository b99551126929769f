"""What all processes of a home share: its host name, its secret, the sandbox providers it has used.

Session keys, the control token, the engines' keys and the name of their roster derive from the secret.
The package that uses a key derives it.
"""

import hashlib
import os
import secrets
import socket
from pathlib import Path
from urllib.parse import quote, unquote

from perdure.errors import ConfigurationError
from perdure.registry import SANDBOXES
from perdure.settings.tree import Settings

SECRET_VARIABLE = "PERDURE_SECRET"
SHORTEST_SECRET = 16


def host_of(settings: Settings) -> str:
    """`<hostname>-<six hex digits of the home>`: two homes of one machine have two names.

    Local sandboxes can only be reached through the home that made them.
    """
    home = hashlib.sha256(str(settings.home.absolute()).encode()).hexdigest()[:6]
    return f"{socket.gethostname()}-{home}"


def load_secret(settings: Settings) -> bytes:
    """The home's secret: PERDURE_SECRET if set (for many hosts), otherwise a file under the home, which
    the first process creates.

    Raises: ConfigurationError if it is too short or cannot be read.
    """
    given = settings.secret.get_secret_value().strip()
    source = SECRET_VARIABLE
    if not given:
        path = settings.home.absolute() / "run" / "secret"
        source = str(path)
        try:
            given = _read_or_create(path)
        except OSError as error:
            raise ConfigurationError(
                f"cannot read {path}: {error.strerror}; set {SECRET_VARIABLE}"
            ) from error
    if len(given) < SHORTEST_SECRET:
        raise ConfigurationError(f"{source} is shorter than {SHORTEST_SECRET} characters")
    return given.encode()


def _read_or_create(path: Path) -> str:
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".secret.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)  # the first process to link creates the secret; the others read it
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return path.read_text().strip()


def remember_sandboxes(home: Path, name: str) -> None:
    """Record that this home uses provider `name`, unless the registry names it."""
    if name not in SANDBOXES:
        folder = home / "providers"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / quote(name, safe="")).touch()


def sandboxes_of(home: Path) -> list[str]:
    """Every provider that may have sandboxes of this home: those of the registry and those it used."""
    folder = home / "providers"
    used = [unquote(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    return [*SANDBOXES, *sorted(used)]
