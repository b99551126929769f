"""Checks the engines that the settings or this home's roster name."""

import asyncio
import contextlib
import hashlib
import hmac
import socket
from urllib.parse import urlsplit

from perdure.engines.engine_roster import StoredRoster, roster_key
from perdure.engines.engine_state import EngineRecord, name_of
from perdure.engines.reported_model import engine_settings, key_refusal, named_engine
from perdure.errors import ConfigurationError, GatewayUnavailable, PerdureError
from perdure.home_folder import load_secret, load_secrets
from perdure.settings import process_environment
from perdure.settings.settings_tree import EngineSettings, Settings
from perdure.stack.stack_plan import SCRIPTED
from perdure.stack.stack_state import StackState
from perdure.storage.store_url import open_store

CONNECT_S = 5.0
NO_ENGINE = (
    "{agent} calls a model and no engine is configured: set OPENAI_BASE_URL (or ANTHROPIC_BASE_URL, "
    "PERDURE_ENGINE__URL), run `perdure down` if a stack runs, and repeat the command"
)


def check_engine(engine: str, agent: str) -> None:
    """Connect to the engines in `URL=WEIGHT,URL`; one that accepts is enough.

    Raises: ConfigurationError if no engine is named, GatewayUnavailable if none accepts.
    """
    if not engine:
        raise ConfigurationError(NO_ENGINE.format(agent=agent))
    if not engine.startswith("http"):
        return  # the scripted policy: the supervisor watches it
    failed: OSError | None = None
    for part in engine.split(","):
        address = urlsplit(part.strip().partition("=")[0])
        port = address.port or (443 if address.scheme == "https" else 80)
        try:
            socket.create_connection((address.hostname or "", port), CONNECT_S).close()
        except OSError as error:
            failed = error
        else:
            return
    raise GatewayUnavailable(
        f"the engine at {engine} cannot be reached ({failed}): start it, or run `perdure down` "
        "and set another one"
    ) from failed


def check_same_engine(settings: Settings, state: StackState) -> None:
    """Refuse engine settings of this command that differ from those of the running stack.

    A stack with a scripted policy is not compared: --engine named it, whatever the variables say. A
    setting at its default is not compared either. Raises: ConfigurationError with the differences.
    """
    if state.engine.startswith(SCRIPTED):
        return
    default, asked = EngineSettings().model_dump(), engine_settings(settings)
    differs = [
        f"{name} {state.engine_settings[name] or 'none'!r}, now {value!r}"
        for name, value in asked.items()
        if value != default[name] and state.engine_settings.get(name, value) != value
    ]
    if not differs and _has_another_key(settings, state):
        differs = [f"the key in {named_engine(settings).key_variable} has changed"]
    if differs:
        raise ConfigurationError(
            f"the stack here was started with other engine settings: {'; '.join(differs)}."
            " To use the new ones, run `perdure down` and repeat the command"
        )


def check_key(settings: Settings, engine: str) -> None:
    """Ask the engines in `URL=WEIGHT,URL` for their models, with the key of the settings.

    The key is sent only to the engine that the settings name. Raises: ConfigurationError, which names
    the variable, if an engine refuses the key.
    """
    if not engine.startswith("http") or engine != named_engine(settings).url:
        return
    for part in engine.split(","):
        url = part.strip().partition("=")[0]
        if refusal := asyncio.run(key_refusal(url, settings)):
            raise ConfigurationError(refusal)


def key_digest(settings: Settings) -> str:
    """A keyed digest of the engine's key: the stack's state never holds the key. Empty: no key is set."""
    key = process_environment.named(named_engine(settings).key_variable)
    return _digest(load_secrets(settings).newest, key) if key else ""


def _has_another_key(settings: Settings, state: StackState) -> bool:
    """Whether this command has a key and the stack was started with another one or with none."""
    if state.engine_key is None:
        return False
    key = process_environment.named(named_engine(settings).key_variable)
    accepted = load_secrets(settings).accepted if key else ()
    return bool(key) and state.engine_key not in [_digest(one, key) for one in accepted]


def _digest(secret: bytes, key: str) -> str:
    return hmac.new(secret, b"engine key " + key.encode(), hashlib.sha256).hexdigest()


def forget_scripted(settings: Settings, state: StackState | None) -> None:
    """Remove the scripted engine of an ended stack from the roster: nothing answers there any more."""
    if state is None or not state.engine.startswith(SCRIPTED):
        return
    url = state.engine_settings.get("url", "")
    with contextlib.suppress(PerdureError, ValueError):
        name = name_of(url)
        asyncio.run(home_roster(settings).change(lambda roster: roster.without(name)))


def home_roster(settings: Settings) -> StoredRoster:
    """The roster that gateways, the engine manager and `perdure engines` of this home share."""
    return StoredRoster(open_store(settings), home_roster_key(settings))


def home_roster_key(settings: Settings) -> str:
    return roster_key(load_secret(settings))


def has_added_engines(settings: Settings) -> bool:
    """Whether the roster has engines that did not come from a gateway's settings."""
    return bool(_added(settings))


def has_no_ready_engine(settings: Settings) -> bool:
    """Whether none of those engines is ready. A gateway that starts later may still find one ready."""
    return not any(record.serves for record in _added(settings))


def _added(settings: Settings) -> list[EngineRecord]:
    """Leaves out engines from settings: only the gateway with those settings uses them."""
    roster = asyncio.run(home_roster(settings).read())
    return [one for one in roster.engines if not one.removed and not one.from_settings]
