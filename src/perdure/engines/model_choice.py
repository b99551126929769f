"""Which model of the roster a request's name means, and which engines may sample for it.

In requests and in the roster, `policy` means the model that the settings name.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase

from perdure.engines.engine_roster import ModelFormat, Roster
from perdure.engines.engine_state import EngineRecord, EngineState
from perdure.errors import Boundary, ConfigurationError, GatewayUnavailable
from perdure.types import DEFAULT_MODEL, Frozen


class ChosenModel(Frozen):
    """A model that a request names. None stands for the settings' model on engines of every run."""

    name: str
    format: ModelFormat | None = None
    """None: the format of the settings."""
    is_hosted: bool = False
    """Whether the hosted API of the settings answers, and not engines of the roster."""
    is_reserved: bool = False
    """Whether only engines that are reserved for the run may sample."""


def chosen_model(
    roster: Roster,
    name: str,
    *,
    run: str = "",
    default: str = DEFAULT_MODEL,
    configured: bool = False,
) -> str:
    """The model that `name` means in a request of this run.

    `default`: the model that the settings name. `configured`: whether the settings name its engine.
    `policy` means the default model. If no engine has it and all engines have one other model,
    `policy` means that one. A model may also be named as its engines report it: `org/name`, or a
    folder.

    Raises: ConfigurationError, which lists the available models; GatewayUnavailable if an engine
    has not reported its model yet.
    """
    present = [one for one in roster.engines if not one.removed and may_serve(one, run)]
    models = {_model_of(one, default) for one in present}
    if name in (DEFAULT_MODEL, default):
        if configured or default in models or not models:
            return default
        if len(models) == 1:
            return models.pop()
        raise ConfigurationError(
            f"the request names no model, and the engines have several: {', '.join(sorted(models))}. "
            "Name one with --model (in a request: 'model')"
        )
    if name in models:
        return name
    if "/" in name:
        reported = {_model_of(one, default) for one in present if _has_name(one, name)}
        if default in reported or len(reported) == 1:
            return default if default in reported else reported.pop()
        if any(one.state is EngineState.STARTING and not one.served.root for one in present):
            raise GatewayUnavailable(
                f"no engine has reported the model {name} yet, and one is still starting",
                boundary=Boundary.ENGINE,
            )
    raise ConfigurationError(
        f"no engine has the model {name}: the engines have {', '.join(sorted(models)) or 'none'}. "
        f"Name one of these, or add an engine with `perdure engines add URL --model {name}`"
    )


def engines_of(
    records: Iterable[EngineRecord],
    model: str,
    run: str,
    default: str = DEFAULT_MODEL,
    *,
    reserved: bool = False,
) -> list[EngineRecord]:
    """The engines that may sample a run's calls to a model: those reserved for the run if there are
    any, otherwise those that serve every run. `reserved`: never the latter."""
    asked = default if model == DEFAULT_MODEL else model
    found = [one for one in records if _model_of(one, default) == asked and may_serve(one, run)]
    own = [one for one in found if one.run and not one.removed]
    return own or [one for one in found if not (one.run or reserved)]


def may_serve(record: EngineRecord, run: str) -> bool:
    """Whether the engine may sample for this run. `run`: empty for calls outside runs."""
    return not record.run or (bool(run) and fnmatchcase(run, record.run))


def _has_name(record: EngineRecord, name: str) -> bool:
    """Whether the engine's model has this name, regardless of its owner and its folder's path."""
    last = [one.rpartition("/")[2] for one in (record.model, record.served.root)]
    return name.rpartition("/")[2] in filter(None, last)


def _model_of(record: EngineRecord, default: str) -> str:
    return default if record.model == DEFAULT_MODEL else record.model
