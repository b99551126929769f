"""The models that a request names, looked up in the roster before anything boots."""

import contextlib
from collections.abc import Iterable, Mapping

from perdure.client.request_comparison import Identity
from perdure.engines.engine_roster import Roster, StoredRoster, roster_key
from perdure.engines.model_choice import chosen_model, engines_of
from perdure.engines.reported_model import engine_names
from perdure.errors import ConfigurationError, GatewayUnavailable
from perdure.home_folder import load_secret
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.types import DEFAULT_MODEL, RolloutRequest

TOKENIZER = "engine.tokenizer"
"""The field of a rollout's identity that names the tokenizer of its recorded ids."""


async def check_models(
    settings: Settings, store: Store, request: RolloutRequest, engine: Mapping[str, str]
) -> None:
    """`engine`: from `engine_settings`.

    Raises: ConfigurationError, which lists the available models, if no engine has a model that the
    request names; StoreUnavailable.
    """
    names = [request.model, *request.models.values()]
    if request.user is not None and request.user.model:
        names.append(request.user.model)
    await check_named(settings, store, names, request.run_id, engine)


async def check_named(
    settings: Settings, store: Store, names: Iterable[str], run: str, engine: Mapping[str, str]
) -> None:
    """`names`: of models; otherwise as `check_models`."""
    roster = await _roster(settings, store, engine)
    for name in names:
        _chosen_model(roster, name, run, engine)


async def engine_of_roster(
    settings: Settings, store: Store, request: RolloutRequest, engine: Mapping[str, str]
) -> Identity:
    """What the roster says about the request's model; empty if that is the model of the settings, or if
    no engine has it. Raises: StoreUnavailable."""
    roster = await _roster(settings, store, engine)
    try:
        model = _chosen_model(roster, request.model, request.run_id, engine)
    except ConfigurationError:
        return {}
    default = engine.get("model") or DEFAULT_MODEL
    if model in ("", default):
        return {}
    known = engines_of(roster.engines, model, request.run_id, default)
    model_format = roster.formats.get(model)
    found = {
        "engine.model": model,
        "engine.root": next((one.served.root for one in known if one.served.root), ""),
        TOKENIZER: model_format.tokenizer if model_format is not None else "",
    }
    return {name: value for name, value in found.items() if value}


async def _roster(settings: Settings, store: Store, engine: Mapping[str, str]) -> Roster:
    stored = StoredRoster(store, roster_key(load_secret(settings)))
    return (await stored.read()).used_with(engine_names(engine.get("url", "")))


def _chosen_model(roster: Roster, name: str, run: str, engine: Mapping[str, str]) -> str:
    """The model that a name means; empty if only the gateway can tell. Raises: ConfigurationError."""
    configured, default = bool(engine.get("url")), engine.get("model") or DEFAULT_MODEL
    with contextlib.suppress(GatewayUnavailable):
        try:
            return chosen_model(roster, name, run=run, default=default, configured=configured)
        except ConfigurationError:
            # A hosted API may have any model. Its engine is not in the roster.
            if not configured or any(one.from_settings for one in roster.engines):
                raise
    return ""
