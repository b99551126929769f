"""State that all processes of a home share: host name, secrets, file modes, used sandbox providers.

Session keys, the control token, the engines' keys and the name of their roster are derived from a
secret. The package that uses a key derives it.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import socket
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from perdure.errors import ConfigurationError
from perdure.settings.settings_tree import Settings
from perdure.variant_registry import SANDBOXES

SECRET_VARIABLE, PREVIOUS_VARIABLE = "PERDURE_SECRET", "PERDURE_SECRET_PREVIOUS"
SHORTEST_SECRET = 16
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PRIVATE = ("git", "logs", "providers", "run", "scratch", "store")
"""Folders of the home that no sandbox mounts."""
STORED = (".perdure", "blobs", "engines", "instances", "journal", "runs")
"""Perdure's folders in a store. The store's root folder may also contain other files."""


def host_of(settings: Settings) -> str:
    """`<hostname>-<six hex digits of the home>`. Two homes have two names, also on cloned machines
    with the same hostname.

    A local sandbox can be reached only through the home that created it.
    """
    home = settings.home.absolute()
    digits = hashlib.sha256(f"{home} {_host_id(home / 'run' / 'host')}".encode()).hexdigest()[:6]
    return f"{socket.gethostname()}-{digits}"


def _host_id(path: Path) -> str:
    """A random id for each boot of the machine, because a machine image may contain a copy of the
    home. No sandbox survives a reboot."""
    boot = BOOT_ID.read_text().strip()
    with contextlib.suppress(OSError, ValueError):
        found, of_boot = path.read_text().split()
        if of_boot == boot:
            return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        words = file.read().split()
        if len(words) != 2 or words[1] != boot:
            words = [secrets.token_hex(8), boot]
            file.truncate(0)
            file.write(" ".join(words) + "\n")
    return words[0]


class Secrets:
    """The secrets of a home. The newest one signs, and all are accepted, so that one can replace
    another while sessions are open. Each access reads the source again, so that running processes
    see changes."""

    def __init__(self, read: Callable[[], tuple[bytes, ...]]) -> None:
        """`read`: the valid secrets, the newest first."""
        self._read = read

    @classmethod
    def of(cls, *secrets: bytes) -> "Secrets":
        return cls(lambda: secrets)

    @property
    def accepted(self) -> tuple[bytes, ...]:
        return self._read()

    @property
    def newest(self) -> bytes:
        """Signs session keys and control calls."""
        return self._read()[0]

    @property
    def oldest(self) -> bytes:
        """Names the roster and keys the engines, which must not change during a secret rotation."""
        return self._read()[-1]


def load_secrets(settings: Settings) -> Secrets:
    """PERDURE_SECRET and PERDURE_SECRET_PREVIOUS if they are set (for several hosts). Otherwise the
    lines of a file in the home, which the first process creates.

    Raises: ConfigurationError if a secret is too short or the file cannot be read.
    """
    given = settings.secret.get_secret_value().strip()
    earlier = settings.secret_previous.get_secret_value().replace(",", " ").split()
    if given:
        return Secrets.of(*_long_enough([given, *earlier], SECRET_VARIABLE))
    if earlier:
        raise ConfigurationError(f"{PREVIOUS_VARIABLE} is set without {SECRET_VARIABLE}")
    file = _SecretFile(settings.home.absolute() / "run" / "secret")
    file.read()
    return Secrets(file.read)


def load_secret(settings: Settings) -> bytes:
    """The home's oldest valid secret, from which the engines' keys and their roster's name are
    derived.

    Raises: ConfigurationError if it is too short or cannot be read.
    """
    return load_secrets(settings).oldest


def episodes_token(secret: bytes) -> str:
    """The bearer token that a gateway requires for reading episodes."""
    return hmac.new(secret, b"episodes", hashlib.sha256).hexdigest()


def _long_enough(found: Sequence[str], source: str) -> tuple[bytes, ...]:
    """Raises: ConfigurationError."""
    if not found or any(len(secret) < SHORTEST_SECRET for secret in found):
        raise ConfigurationError(f"{source} is shorter than {SHORTEST_SECRET} characters")
    return tuple(secret.encode() for secret in found)


class _SecretFile:
    """A file of secrets, one per line, newest first. It is read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = (0, 0, 0)
        self._secrets: tuple[bytes, ...] = ()

    def read(self) -> tuple[bytes, ...]:
        """Raises: ConfigurationError. After the first read, a broken file keeps the loaded
        secrets."""
        try:
            text = _read_or_create(self._path) if not self._secrets else None
            found = self._path.stat()
            seen = (found.st_ino, found.st_mtime_ns, found.st_size)
            if seen != self._seen:
                text = text or self._path.read_text()
                self._secrets = _long_enough(text.split(), str(self._path))
                self._seen = seen
        except OSError as error:
            if not self._secrets:
                raise ConfigurationError(
                    f"cannot read {self._path}: {error.strerror}; set {SECRET_VARIABLE}"
                ) from error
        except ConfigurationError:
            if not self._secrets:
                raise
        return self._secrets


def _read_or_create(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError):
        if found := path.read_text().strip():
            return found
        path.unlink(missing_ok=True)  # an empty file is left by a power cut
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".secret.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(secrets.token_hex(32) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)  # the first process to link creates the secret, and the others read it
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    return path.read_text().strip()


def keep_private(settings: Settings) -> None:
    """Make the files that this process creates from now on private to its user.

    Also close what an earlier version left readable for other users: the home, the files in it that
    no sandbox mounts, and the objects of a store that is a folder.
    Raises: ConfigurationError if this user cannot use the home.
    """
    os.umask(0o077)
    home = settings.home.absolute()
    try:
        home.mkdir(parents=True, exist_ok=True)
        for folder in (*(home / name for name in PRIVATE), *_stored(settings)):
            _close_all(folder)
        for file in (*home.glob("temporal.db*"), home):
            _close(file)
    except OSError as error:
        raise ConfigurationError(
            f"PERDURE_HOME={home} or the store cannot be used: {error.strerror} ({error.filename})"
        ) from error


def _stored(settings: Settings) -> list[Path]:
    store = settings.store_url.removeprefix("file://")
    return [] if "://" in store else [Path(store).absolute() / name for name in STORED]


def _close_all(folder: Path) -> None:
    """Close a tree. Its root is closed last, so a closed root means that the tree is done."""
    if folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) & 0o077:
        for where, _, files in os.walk(folder, topdown=False):
            for path in (*(os.path.join(where, name) for name in files), where):
                _close(path)


def _close(path: str | Path) -> None:
    with contextlib.suppress(OSError):  # the file is gone, or belongs to another user
        mode = os.lstat(path).st_mode
        if mode & 0o077 and not stat.S_ISLNK(mode) and not mode & stat.S_ISVTX:
            os.chmod(path, stat.S_IMODE(mode) & 0o700)


def make_readable_by_sandboxes(folder: Path) -> None:
    """Let any user read a folder that sandboxes mount, because a sandbox's user may be another user
    of the host. The modes of the home keep the host's other users out."""
    for where, _, files in os.walk(folder):
        for path in (where, *(os.path.join(where, name) for name in files)):
            mode = os.lstat(path).st_mode
            wanted = stat.S_IMODE(mode) | 0o044 | (0o011 if mode & 0o100 else 0)
            if not stat.S_ISLNK(mode) and wanted != stat.S_IMODE(mode):
                os.chmod(path, wanted)


def record_provider(home: Path, name: str) -> None:
    """Record that this home uses provider `name`, unless the registry lists it."""
    if name not in SANDBOXES:
        folder = home / "providers"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / quote(name, safe="")).touch()


def list_recorded_providers(home: Path) -> list[str]:
    """All providers that may have sandboxes of this home: the registry's, and those recorded as
    used."""
    folder = home / "providers"
    used = [unquote(entry.name) for entry in folder.iterdir()] if folder.is_dir() else []
    return [*SANDBOXES, *sorted(used)]
