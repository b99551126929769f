"""Handlers of data sources: each reads rows, prepares sandboxes and grades diffs of its data
source.

`Instance.data_source` selects the handler. The data sources in `variant_registry.ROWS` use `Published`. A
program can add its own without a change to Perdure, with the names and signatures of the OpenHands
NVIDIA module:

    class Mine(AgentHandler):
        name = "mine"

        async def eval(self, job_details, sid=None, allow_skip=True):
            done = await self.sandbox.exec("make check", cwd=self.sandbox.workdir)
            return {"score": float(done.status.ok)}

    register_agent_handler(Mine())
"""

import errno
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from perdure import variant_registry
from perdure.errors import ConfigurationError, InstanceError, PerdureError
from perdure.graders.base import Graded, Grader
from perdure.graders.named_rewards import main_reward, parse_named_rewards
from perdure.instances.rows.formats import swebench
from perdure.instances.rows.row_fields import Row
from perdure.sandboxes.base import Sandbox
from perdure.types import Grade, Instance, Outcome, Rewards, Sampling

_sandbox: ContextVar[Sandbox] = ContextVar("sandbox")


@dataclass(frozen=True)
class LLMConfig:
    """The gateway's API for a handler that runs its own agent in the worker."""

    model: str
    base_url: str
    """The URL of the OpenAI API, with `/v1`."""
    api_key: str = field(repr=False)
    sampling: Sampling
    """The gateway applies it to every call."""


@dataclass(frozen=True)
class JobDetails:
    """The input of `eval`."""

    job_id: str
    """The rollout's workflow id."""
    instance: Instance
    runtime: Sandbox
    """A fresh sandbox in which no agent ran. The sandbox of `init` and `run` is closed."""
    metadata: Any = None
    """The metadata that `init` returned."""
    run_results: Mapping[str, Any] = field(default_factory=dict)
    """The results of the handler's own `run`, plus `git_patch`: the captured diff as bytes. The
    diff is not applied yet."""
    timeout_s: float = 0.0
    """Time limit of the tests in seconds."""


class AgentHandler(ABC):
    """The hooks of one data source. Only `name` and `eval` are required.

    A hook may be called again after a worker dies, so it must be safe to repeat. Its errors name
    the handler and the hook, and Temporal retries them a few times.
    """

    name: str
    """The `data_source` of its rows."""

    @property
    def sandbox(self) -> Sandbox:
        """Inside a hook: the agent's sandbox, or in `eval` a fresh one."""
        return _sandbox.get()

    def to_instance(self, row: Row, dataset: str) -> Instance:
        """Read a row. The default expects the fields of a SWE-bench row.

        Raises: InstanceError, which names the row, the field and the fix.
        """
        return swebench.to_instance(row, dataset)

    def validate(self, instance: Instance) -> None:  # noqa: B027  # optional, unlike `eval`
        """Refuse a row that `eval` cannot grade, before anything boots. Raises: InstanceError."""

    async def init(
        self,
        instance: Instance,
        llm_config: LLMConfig | None = None,
        sid: str | None = None,
        max_iterations: int = 1,
    ) -> tuple[Any, Any, Any]:
        """Prepare the sandbox before the agent starts. Returns `(runtime, metadata, config)`.

        `runtime` and `config` are passed to `run`, `metadata` to `run` and `eval`. `metadata` is
        stored if it is JSON. If another process calls `run`, it calls `init` again. `llm_config` is
        None if the request's agent calls no model. `sid` is the rollout's workflow id.
        """
        return self.sandbox, None, None

    async def run(
        self, runtime: Any, metadata: Any, config: Any, instance: Instance
    ) -> Mapping[str, Any]:
        """Run your own agent, in the worker. Without this hook, the request's agent runs.

        It runs once per sandbox. If it fails or its worker dies, the next attempt runs it in a new
        sandbox. It returns an object that is stored as JSON for `eval`; values that JSON does not
        have become text. `git_patch` in it is the patch; without it, the patch is the diff of the
        sandbox's tree. If the runtime has a `close`, that is called afterwards.
        """
        raise NotImplementedError

    @abstractmethod
    async def eval(
        self, job_details: JobDetails, sid: str | None = None, allow_skip: bool = True
    ) -> Graded | Mapping[str, Any]:
        """Grade `job_details.run_results["git_patch"]`.

        Returns a `Graded`, or an object with `score` (0.0 to 1.0; 1.0 is resolved), `resolved` or
        `rewards`, numbers by name, of which `reward` (or else their mean) is the score.
        {"report": ...} is unwrapped. The instance's artifacts are already in the sandbox.
        `allow_skip`: the hook may skip the tests if the diff is empty.
        Raises: SandboxLost, RetryHere (graded again in a new sandbox); InstanceError.
        """


def runs_own_agent(handler: AgentHandler) -> bool:
    """Whether the handler has its own `run`, which replaces the request's agent."""
    return type(handler).run is not AgentHandler.run


class HookFailed(Exception):
    """An error in a handler's code. Temporal retries the stage, as after any unforeseen error.
    After an error in `run`, the next attempt starts in a new sandbox."""


@contextmanager
def wrap_hook_call(handler: AgentHandler, hook: str, sandbox: Sandbox) -> Iterator[None]:
    """Wraps the call of a hook. Raises: HookFailed, which names handler and hook."""
    token = _sandbox.set(sandbox)
    try:
        yield
    except PerdureError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # the host's disk is full
        said = f"{type(error).__name__}: {error}"
        raise HookFailed(f"`{hook}` of the handler {handler.name!r} failed: {said}") from error
    finally:
        _sandbox.reset(token)


def wrong_return_error(
    handler: AgentHandler, hook: str, wanted: str, answer: object
) -> ConfigurationError:
    return ConfigurationError(
        f"`{hook}` of the handler {handler.name!r} must return {wanted}, but returned "
        f"{type(answer).__name__}"
    )


class PublicDatasetHandler(AgentHandler):
    """The handler of the data sources in `variant_registry.ROWS`. `grading.protocol` names the grader."""

    def __init__(self, name: str) -> None:
        self.name = name

    def to_instance(self, row: Row, dataset: str) -> Instance:
        reader = variant_registry.load("row format", variant_registry.ROWS, self.name)
        return cast(Instance, reader(row, dataset))

    def validate(self, instance: Instance) -> None:
        self._grader(instance).validate(instance)

    async def eval(
        self, job_details: JobDetails, sid: str | None = None, allow_skip: bool = True
    ) -> Graded:
        return await self._grader(job_details.instance).grade(
            job_details.runtime,
            job_details.instance,
            job_details.run_results["git_patch"],
            timeout_s=job_details.timeout_s,
        )

    def _grader(self, instance: Instance) -> Grader:
        """Raises: ConfigurationError for an unknown protocol."""
        grader = variant_registry.load(
            "grader", variant_registry.GRADERS, instance.grading.protocol
        )
        return cast(Grader, grader())


def register_agent_handler(handler: AgentHandler) -> None:
    """Register the handler in this process under its `name`.

    Raises: ConfigurationError if the name is taken or missing.
    """
    name = getattr(handler, "name", None)
    if not isinstance(handler, AgentHandler) or not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"{handler!r} is not a handler: subclass perdure.data_source_handlers.AgentHandler and give it a `name`"
        )
    taken = variant_registry.HANDLERS.get(name)
    if name in variant_registry.ROWS or (taken is not None and type(taken) is not type(handler)):
        raise ConfigurationError(f"data_source {name!r} has a handler already: choose another name")
    variant_registry.HANDLERS[name] = handler


def handler_of(data_source: str) -> AgentHandler:
    """The handler that a row's or an instance's `data_source` names.

    Raises: ConfigurationError, which names the closest known data source.
    """
    known = variant_registry.data_source_named(data_source)
    if known in variant_registry.HANDLERS:
        return cast(AgentHandler, variant_registry.HANDLERS[known])
    if known is not None:
        return PublicDatasetHandler(known)
    if ":" in data_source:
        return cast(AgentHandler, variant_registry.load("handler", {}, data_source)())
    raise ConfigurationError(variant_registry.unknown_data_source(data_source))


def get_registered_functions(
    kind: Literal["init", "run", "eval"], data_source: str
) -> Callable[..., Any]:
    """One hook of a data source's handler.

    Raises: ConfigurationError for an unknown kind or data source.
    """
    if kind not in ("init", "run", "eval"):
        raise ConfigurationError(f"a handler has no {kind!r}: ask for init, run or eval")
    return cast(Callable[..., Any], getattr(handler_of(data_source), kind))


def import_handlers(modules: str) -> None:
    """Import the modules in the setting `handlers`. Each module registers its handlers.

    Raises: ConfigurationError, which names the module that cannot be imported.
    """
    for module in filter(None, map(str.strip, modules.split(","))):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigurationError(
                f"cannot import {module!r} of PERDURE_HANDLERS: {error}; PYTHONPATH must "
                "include it, also for the stack and the workers"
            ) from error


def parse_verdict(handler: AgentHandler, answer: Graded | Mapping[str, Any]) -> Graded:
    """The verdict in the answer of a handler's `eval`. Raises: InstanceError if it is malformed."""
    if isinstance(answer, Graded):
        return answer
    report = answer.get("report", answer) if isinstance(answer, Mapping) else {}
    named = _named_rewards(handler, report)
    found = report.get("score", report.get("resolved")) if isinstance(report, Mapping) else None
    found = main_reward(named) if found is None and named else found
    if not isinstance(found, (bool, int, float)) or not 0 <= found <= 1:
        raise InstanceError(
            f"`eval` of the handler {handler.name!r} must return a Graded, or an object with `score` "
            "from 0 to 1, `resolved` or `rewards`"
        )
    resolved = found == 1
    return Graded(
        Grade(
            outcome=Outcome.RESOLVED if resolved else Outcome.UNRESOLVED,
            reason="" if resolved else f"score {float(found):g}",
            rewards=Rewards(binary=float(resolved), partial=float(found)),
            reward_form="partial",
            named_rewards=named,
            grader=handler.name,
        ),
        b"",
    )


def _named_rewards(handler: AgentHandler, report: object) -> dict[str, float]:
    if not isinstance(report, Mapping) or "rewards" not in report:
        return {}
    try:
        return parse_named_rewards(report["rewards"])
    except ValueError as error:
        said = f"`eval` of the handler {handler.name!r} returned bad `rewards`: {error}"
        raise InstanceError(said) from error
