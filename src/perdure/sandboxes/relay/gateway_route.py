"""Chooses before the boot how a sandbox reaches the gateway. The setting and the provider decide.

Also checks the URL from inside. `host_relay` runs the relays.
"""

import ipaddress
from typing import Literal
from urllib.parse import urlsplit

from perdure.errors import ConfigurationError
from perdure.sandboxes.base import Sandbox, SandboxProvider

Reach = Literal["auto", "url", "socket", "stdio"]

OPEN_S = 20.0

_OPEN = """
url=$1
if command -v python3 >/dev/null 2>&1; then
    exec python3 -c 'import sys, urllib.request as u
opener = u.build_opener(u.ProxyHandler({}))
try: opener.open(sys.argv[1], timeout=10).read(64)
except Exception as error: sys.exit(str(error))' "$url"
elif command -v curl >/dev/null 2>&1; then exec curl -fsS --noproxy '*' -m 10 -o /dev/null "$url"
elif command -v wget >/dev/null 2>&1; then exec wget -q -T 10 --no-proxy -O /dev/null "$url"
fi
echo "neither python3, curl nor wget is there to open it with" >&2; exit 1
"""


def choose_reach(wanted: Reach, provider: SandboxProvider, gateway_url: str) -> Reach:
    """What `wanted` means for sandboxes of this provider; `auto` becomes one of the others.

    `auto`: the unix socket if the sandbox sees this host; the URL if other hosts can open it; a relay.
    Raises: ConfigurationError naming the setting and the fix.
    """
    if wanted == "auto":
        if provider.sees_host:
            return "socket"
        return "stdio" if is_private_to_host(gateway_url) else "url"
    if wanted == "socket" and not provider.sees_host:
        raise ConfigurationError(
            f"gateway.reach = socket: sandboxes of {provider.name!r} cannot open a socket of this host; "
            "set PERDURE_GATEWAY__REACH=auto"
        )
    if wanted == "url" and provider.isolated and is_private_to_host(gateway_url):
        raise ConfigurationError(
            f"gateway.url {gateway_url} is an address that only this host can open, not a sandbox of "
            f"{provider.name!r}; set PERDURE_GATEWAY__URL to an address that it can open, or "
            "PERDURE_GATEWAY__REACH=auto"
        )
    return wanted


async def open_from_inside(sandbox: Sandbox, gateway_url: str) -> str:
    """Open the gateway from inside the sandbox once. Empty, or why it failed."""
    argv = ["sh", "-c", _OPEN, "sh", f"{gateway_url}/healthz"]
    result = await sandbox.exec(argv, timeout=OPEN_S)
    if result.status.ok:
        return ""
    said = result.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
    return said[0][:300] if said else "no answer"


def unreachable(sandbox: Sandbox, gateway_url: str, reason: str) -> ConfigurationError:
    return ConfigurationError(
        f"gateway.url {gateway_url} cannot be opened inside sandbox {sandbox.identity}: {reason}; "
        "set PERDURE_GATEWAY__URL to an address it can open, or PERDURE_GATEWAY__REACH=stdio"
    )


def is_private_to_host(url: str) -> bool:
    """Loopback, the unspecified address, `localhost`, a unix socket, or no address at all."""
    parts = urlsplit(url)
    host = (parts.hostname or "").rstrip(".").lower()
    if parts.scheme not in ("http", "https") or not host:
        return True
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address
    return bool(mapped.is_loopback or mapped.is_unspecified)
