"""The inputs of workflows, as `temporal workflow start --input` takes them."""

import fnmatch
import hashlib
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal, Self, get_args

from pydantic import Field, JsonValue, field_validator, model_validator

from perdure.errors import ConfigurationError
from perdure.types.base import Request
from perdure.types.identifier_patterns import InstanceRef, Slug
from perdure.types.mcp_servers import McpServers
from perdure.types.resource_limits import Limits, Phases
from perdure.types.results import EpisodeRef, Outcome, RewardForm, RolloutStatus, TokenCounts
from perdure.types.reward_models import RewardModel
from perdure.types.simulated_users import SimulatedUser

DEFAULT_MODEL = "policy"
"""Stands for the model that the engine settings name, in a request that names none."""
GIVEN_PATCHES = "predictions"
"""The agent of rollouts whose patches come from another tool: it applies them."""
GIVEN_PATCHES_OPTION = "predictions_sha256"
"""Its option: the digest of all patches of the run, which `perdure grade` has stored."""

StartAt = Literal["boot", "grade"]
WithheldReward = Literal["exposed", "signals"]
TooStale = Literal["refuse", "finish"]
FailureType = Literal[
    "SandboxLost",
    "CallUnanswered",
    "AgentError",
    "EngineRefused",
    "InstanceError",
    "TokenizerChanged",
    "ActivityTimeout",
    "UnexpectedError",
]
"""Failure types that a new attempt may avoid. `CallUnanswered`: the agent ended after the gateway
could not answer a model call, or an MCP server could not answer a call. `AgentError`: the agent
ended before any model call was answered. `TokenizerChanged`: the new attempt samples everything again."""


class Sampling(Request):
    """Sampling parameters of the policy. Engines with token ids get exactly these values: the
    agent's own values count only with `decided_by: agent`. A hosted API gets the values that differ
    from the defaults, and a request with a parameter that the API does not have is refused.

    Example:
        {"temperature": 0.8, "top_k": 50, "seed": 7}
    """

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    """-1 and 0 turn it off."""
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0)
    stop: tuple[str, ...] = ()
    """Stop strings. The agent receives them as part of the answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens in addition to the model's own (slime: --rollout-stop-token-ids)."""
    seed: int | None = Field(None, ge=0)
    """Each call's seed is derived from this seed, the instance, the sample and the call's position,
    so that samples differ and a repeated request repeats them. If absent, engines sample at
    random."""
    decided_by: Literal["rollout", "agent"] = "rollout"
    """`agent`: temperature, top_p, top_k, min_p, penalties, stop and seed in the agent's request
    override these fields."""
    max_tokens_per_turn: int = Field(8192, ge=1)
    """Per-turn cap (slime: --rollout-max-response-len)."""
    max_context_tokens: int = Field(96_000, ge=1)
    """Budget of prompt and response, enforced only in generation (slime:
    --rollout-max-context-len)."""


class Price(Request):
    """Dollars per million tokens."""

    input: float = Field(ge=0)
    output: float = Field(ge=0)
    cached: float | None = Field(None, ge=0)
    """Price of prompt tokens that the provider read from its cache. If absent, the input price."""

    def of(self, prompt: int, cached: int, sampled: int) -> float:
        """Cost in dollars of these token counts. `prompt` includes `cached`."""
        read = self.input if self.cached is None else self.cached
        return ((prompt - cached) * self.input + cached * read + sampled * self.output) / 1e6


def price_of(prices: Mapping[str, Price], *names: str) -> Price | None:
    """The first price whose glob matches one of these names of a model; None if none does."""
    for glob, price in prices.items():
        if any(name and fnmatch.fnmatchcase(name, glob) for name in names):
            return price
    return None


class SpendingLimits(Request):
    """Limits on tokens and dollars."""

    tokens: int | None = Field(None, ge=1)
    """Prompt and sampled tokens of all model calls."""
    dollars: float | None = Field(None, gt=0)
    price: Price | None = None

    @model_validator(mode="after")
    def _dollars_have_a_price(self) -> Self:
        if self.dollars is not None and self.price is None:
            raise ValueError("a limit in dollars needs the model's price: give 'price' too")
        return self

    def used_up(self, tokens: int, dollars: float) -> str:
        """Which limit is reached, with figures; empty if none is."""
        if self.tokens is not None and tokens >= self.tokens:
            return f"it has used {tokens:,} of {self.tokens:,} tokens"
        if self.dollars is not None and dollars >= self.dollars:
            return f"it has used {dollars:.2f} of {self.dollars:.2f} dollars"
        return ""


class Budget(SpendingLimits):
    """Limits on what a run may spend, with its judges and simulated users. Once one is reached, the
    run starts no more rollouts, stops running agents and grades their patches. A rollout's tokens
    count when it has ended.

    Example:
        {"dollars": 20, "price": {"input": 1.25, "cached": 0.125, "output": 10},
         "other_prices": {"judge-*": {"input": 0.25, "output": 2}}}
    """

    other_prices: dict[str, Price] = Field(default_factory=dict)
    """Prices of the models that judge or play users, by a glob of the name that the request or the row
    gives. The first match counts. A limit in dollars needs one for each of them."""

    def cost(self, agent: TokenCounts, others: Mapping[str, TokenCounts]) -> float:
        """Dollars; 0 without a price. `others`: of judges and users, by model."""
        if self.price is None:
            return 0.0
        paid = [(self.price, agent)]
        paid += [
            (price, counts)
            for model, counts in others.items()
            if (price := price_of(self.other_prices, model)) is not None
        ]
        return math.fsum(
            price.of(counts.prompt_tokens, counts.cached_tokens, counts.sampled_tokens)
            for price, counts in paid
        )

    def lacks_price_of(self, others: Iterable[str]) -> str:
        """What to do if it limits dollars and one of these models has no price; otherwise empty."""
        missing = [name for name in others if price_of(self.other_prices, name) is None]
        if self.dollars is None or not missing:
            return ""
        return (
            f"a limit in dollars needs the price of {' and '.join(missing)}: add it to the file of "
            "--prices (`budget.other_prices`)"
        )


class Caps(SpendingLimits):
    """Limits on the model calls of one attempt, replayed ones included. The gateway enforces them
    for every agent: once one is reached, it refuses the next call, and the agent ends as `limit`.
    Calls in flight still get their answers. `agent_budget_s` limits the time.

    Example:
        {"turns": 100, "dollars": 4, "price": {"input": 1.25, "cached": 0.125, "output": 10}}
    """

    turns: int | None = Field(None, ge=1)
    """Model calls, those of sub-agents included."""

    def reached(self, turns: int, tokens: int, dollars: float) -> str:
        """Which limit is reached, with figures; empty if none is."""
        if self.turns is not None and turns >= self.turns:
            return f"it has used {turns} of {self.turns} turns"
        return self.used_up(tokens, dollars)


class RolloutRequest(Request):
    """One sample of an agent's work on one instance: the input of `RolloutWorkflow`.

    Example:
        {"run_id": "try-1", "instance": "first-steps/click-8.1.3", "agent": "oracle"}
    """

    run_id: Slug
    instance: InstanceRef
    sample_index: int = Field(0, ge=0)
    group_id: str | None = None
    agent: str = "mini_swe_agent"
    """A name of the agent registry, or a dotted path `package.module:Class`."""
    agent_options: dict[str, JsonValue] = Field(default_factory=dict)
    sandbox: str = "bubblewrap"
    """A name of the sandbox registry, or a dotted path."""
    mcp_servers: McpServers = Field(default_factory=dict)
    """Servers whose tools the agent may call. One replaces the instance's server of the same name."""
    model: str = DEFAULT_MODEL
    """The model that answers the agent's calls, whatever name the agent asks for: one that an
    engine serves (`perdure engines list`)."""
    models: dict[str, str] = Field(default_factory=dict)
    """Other models for calls in which the agent asks for a name that matches a glob:
    `{"claude-haiku-*": "judge"}`. The first match counts. These calls are recorded and not
    trained."""
    policy_version: int | None = Field(None, ge=0)
    """The policy version that should sample the rollout, if the caller knows it."""
    max_staleness: int | None = Field(None, ge=0)
    """How many versions newer than `policy_version` may still sample the rollout. 0: only
    `policy_version` itself. If absent, any version.

    All samples of a group share these fields."""
    too_stale: TooStale = "refuse"
    """What happens to a rollout that only newer versions could continue. `refuse`: it fails without
    a verdict. `finish`: they continue it. It then gets its verdict and counts in its group's
    baseline, and none of its tokens is trained. With `finish`, `policy_version` may be absent:
    `max_staleness` then counts from the oldest version that sampled the rollout."""
    sampling: Sampling = Sampling()
    user: SimulatedUser | None = None
    """Who writes the messages after the task, for an agent that takes several (`acp`)."""
    limits: Limits = Limits()
    phases: Phases = Phases()
    """Settings of a phase's sandbox that override `sandbox`, `limits` and the instance's own
    phases."""
    agent_budget_s: float = Field(1800.0, gt=0)
    """Wall-clock budget of the agent (slime: SWE_TIME_BUDGET_SEC). Waits for engines and
    users do not count."""
    caps: Caps = Caps()
    """Limits of turns, tokens and dollars, enforced by the gateway."""
    grade_timeout_s: float | None = Field(None, gt=0)
    """Limit of one test run (slime: SWE_EVAL_TIMEOUT_SEC). If absent, the instance's own, but for a
    calibrated one at most 50 times its longest run there, or 300 if that is more."""
    max_attempts: int = Field(3, ge=1, le=10)
    """Maximum number of attempts. A new one follows a failure that `retry_on` names. Attempts that
    end in CallUnanswered do not count: they are limited to six hours."""
    retry_on: tuple[FailureType, ...] = ("SandboxLost", "CallUnanswered")
    """Failures after which a rollout gets a new attempt in a new sandbox."""
    heartbeat_timeout_s: float = Field(30.0, ge=2)
    """If a stage sends no heartbeat for this many seconds, another worker continues it. An agent may be
    silent for 85/30 of this time. The host reports a dead worker sooner."""
    verdict: Literal["verified", "official"] = "verified"
    """Which verdict decides the reward: the official one checked by twins, or the official one
    alone."""
    reward_form: RewardForm | None = None
    """Which form of the grade's rewards is the rollout's reward. If absent, `binary`, but `partial`
    if a verifier, a handler, or a reward model gives one number. Twins check only a success, so a
    forged share of the tests earns its part of a dense reward."""
    reward_model: RewardModel | None = None
    """A model that scores the patch, beside the tests or instead of them."""
    twin_pairs: int = Field(1, ge=0, le=8)
    """Pairs that must confirm a patch that looks resolved: each is a run of originals and, if
    calibration could divide the twins, two runs with twins. Code that forges results at random
    succeeds in at most 1/8 of such pairs, and in 1/3 if the runs of a pair tell each other what
    they see. 0 turns twins off."""
    tampered_reward: float = Field(0.0, ge=-10, le=0)
    """Reward, also in each dense form, of a rollout that ends as `tampered`. Below 0, forging
    results has a price."""
    reward_truncated: bool = False
    """Grade a rollout that the run's deadline or `stop_at` stopped as one that reached its own limit,
    with a reward, so that a trainer uses it. If false, it ends as `truncated`."""
    withheld_rewards: tuple[WithheldReward, ...] = ()
    """Rollouts that get a verdict and no reward, so that their group's baseline leaves them out.
    `exposed`: a twin passed, so the results were forged. `signals`: a success that is not
    `verified`, of a patch with signals."""
    grade_empty_patch: bool | None = None
    """Run the tests even if the agent changed nothing (OpenHands: allow_skip_eval=False). If
    absent, they run if the instance has artifacts or the agent's class asks for it. Of the built-in
    agents, `nop` and `base_suite` do, for the verdict on the base."""
    expires_at: float | None = None
    """Unix seconds after which a rollout that has not booted ends as `expired`."""
    round: int = Field(0, ge=0)
    """A rollout that was graded in an earlier round runs again. In the same round it is done."""
    start_at: StartAt = "boot"
    """`grade`: grade the patch of the last attempt, without running an agent."""
    adopted_sha256: str = ""
    """Digest of another program's results, which `perdure adopt` has stored for the run. A rollout
    with a patch among them applies it and starts no agent."""
    grading: Literal["now", "later"] = "now"
    """`later`: only generate. The rollout ends as `ungraded` once its patch is captured, and
    `perdure grade RUN` grades it."""
    schema_version: Literal[1] = 1

    @model_validator(mode="after")
    def _staleness_is_of_a_version(self) -> "RolloutRequest":
        counts_itself = self.policy_version is not None or self.too_stale == "finish"
        if self.max_staleness is not None and not counts_itself:
            raise ValueError(
                "max_staleness counts from policy_version: give that too, or too_stale 'finish', "
                "which counts from the oldest version that sampled the rollout"
            )
        if self.too_stale == "finish" and self.max_staleness is None:
            raise ValueError("too_stale 'finish' needs max_staleness: any version may sample now")
        return self

    @model_validator(mode="after")
    def _given_patches_are_stored(self) -> "RolloutRequest":
        has_patch = self.start_at == "grade" or GIVEN_PATCHES_OPTION in self.agent_options
        if self.agent == GIVEN_PATCHES and not has_patch:
            raise ValueError(
                f"agent {GIVEN_PATCHES!r} only applies stored patches: use "
                "`perdure grade SOURCE --predictions FILE`"
            )
        return self

    @property
    def other_models(self) -> tuple[str, ...]:
        """The models that judge or play the user, as far as the request names them."""
        judge, user = self.reward_model, self.user
        named = (judge.model if judge is not None else "", user.model if user is not None else "")
        return tuple(dict.fromkeys(filter(None, named)))

    @property
    def instance_id(self) -> str:
        return self.instance.split("/", 1)[1]

    @property
    def workflow_id(self) -> str:
        """Deterministic, so that a second start joins the first."""
        return f"rollout/{self.run_id}/{self.instance_id}/{self.sample_index}"

    @property
    def grades_now(self) -> bool:
        """Whether this start grades the patch."""
        return self.grading == "now" or self.start_at == "grade"


Straggler = Literal["cancel", "keep"]
REPLACEMENTS = 3
"""How often a member of a group is sampled again if it fails without a verdict."""


class Changeable(Request):
    """A request whose CHANGEABLE fields may change, while its workflow is open and after it has
    ended. The other fields are its identity."""

    CHANGEABLE: ClassVar[tuple[str, ...]]

    @property
    @abstractmethod
    def workflow_id(self) -> str: ...

    def changeable(self) -> dict[str, JsonValue]:
        """The fields that may change."""
        return self.model_dump(mode="json", include=set(self.CHANGEABLE))

    def changed(self, fields: Mapping[str, JsonValue]) -> Self:
        """A copy with other values of these fields. Raises: ConfigurationError."""
        if fixed := sorted(fields.keys() - {*self.CHANGEABLE, "asked_by"}):
            raise ConfigurationError(
                f"{', '.join(fixed)} cannot change in {self.workflow_id}: give another run_id"
            )
        return type(self)(**{**self.model_dump(), **fields})

    def changes_to(self, other: Self) -> dict[str, JsonValue]:
        """The changeable fields in which `other` differs, with its values."""
        old, new = self.changeable(), other.changeable()
        return {name: value for name, value in new.items() if value != old[name]}


class GroupRequest(Changeable):
    """n rollouts of one instance that share a baseline: the input of `RolloutGroupWorkflow`."""

    CHANGEABLE = ("quorum", "deadline_s")

    rollout: RolloutRequest
    """The template. The group sets `sample_index` and `group_id` of each sample."""
    n_samples: int = Field(8, ge=1, le=512)
    quorum: int | None = Field(None, ge=1)
    """Finish when this many rollouts have a reward. If absent, all of them."""
    deadline_s: float | None = Field(None, gt=0)
    stragglers: Straggler = "cancel"
    without_verdict: Literal["short", "replace"] = "short"
    """What happens if a member fails without a verdict. `short`: the group goes on without it.
    `replace`: the same sample is played again from its start, up to 3 times, if the failure is one
    that `retry_on` can name. The group has one episode for each sample, the newest."""
    schema_version: Literal[1] = 1

    @model_validator(mode="after")
    def _quorum_fits(self) -> "GroupRequest":
        if self.quorum is not None and self.quorum > self.n_samples:
            raise ValueError(f"quorum {self.quorum} exceeds n_samples {self.n_samples}")
        return self

    @model_validator(mode="after")
    def _samples_are_numbered_here(self) -> "GroupRequest":
        if self.rollout.sample_index:
            raise ValueError("'rollout.sample_index' is set by the group itself; remove it")
        return self

    @property
    def group_id(self) -> str:
        return self.rollout.group_id or f"{self.rollout.run_id}/{self.rollout.instance_id}"

    @property
    def workflow_id(self) -> str:
        return f"group/{self.rollout.run_id}/{self.rollout.instance_id}"

    def sample(self, index: int) -> RolloutRequest:
        """The request of one sample."""
        update = {"sample_index": index, "group_id": self.group_id}
        return self.rollout.model_copy(update=update)


def replacement(
    played: RolloutRequest, episode: EpisodeRef, first: int = 0
) -> RolloutRequest | None:
    """The request that plays a failed rollout again, as its next round; None if it stays as it is.

    It has the rollout's id, so that two callers start only one replacement, and there is one episode.
    `first`: the round of the first play. Cancelled and truncated rollouts are not replaced, nor are
    failures that would recur, such as a bad configuration.
    """
    failure = episode.failure
    may_pass = failure is not None and failure.type in get_args(FailureType)
    if episode.status is not RolloutStatus.FAILED or not may_pass:
        return None
    if played.round >= first + REPLACEMENTS:
        return None
    return played.model_copy(update={"round": played.round + 1})


MISSING = "missing"
"""Used instead of an outcome if a rollout has no episode, for example because its run was
cancelled."""
NO_VERDICT = (
    *(
        one.value
        for one in RolloutStatus
        if one not in (RolloutStatus.GRADED, RolloutStatus.ADOPTED)
    ),
    MISSING,
)


class PlayAgain(Request):
    """Which rollouts of an ended run to rerun, and from which stage.

    Example:
        {"round": 1, "outcomes": ["failed", "missing"]} reruns rollouts without a verdict;
        {"round": 2, "start_at": "grade"} grades every captured patch again.
    """

    round: int = Field(ge=1)
    """Number of this start of the run, counted after the first one. Each has its own list of
    rollouts."""
    start_at: StartAt = "boot"
    outcomes: tuple[str, ...] = ()
    """Outcomes, statuses of rollouts without an outcome, or `missing`. If empty, all."""
    include: tuple[str, ...] = ()
    """Globs of `<instance id>` or `<instance id>/<sample>`. If empty, all."""

    @field_validator("outcomes")
    @classmethod
    def _known(cls, outcomes: tuple[str, ...]) -> tuple[str, ...]:
        known = [*(outcome.value for outcome in Outcome), *NO_VERDICT, RolloutStatus.ADOPTED.value]
        for outcome in outcomes:
            if outcome not in known:
                raise ValueError(f"no outcome {outcome!r}: use one of {', '.join(known)}")
        return outcomes


class RunRequest(Changeable):
    """A set of instances x n samples under one config: the input of `RunWorkflow`.

    Give `instances` (a short list) or `dataset` (all of it, filtered by `include` / `exclude` globs
    and limited to the first `limit`). A later start may choose more instances, not fewer.
    """

    CHOICE: ClassVar = ("instances", "dataset", "include", "exclude", "limit")
    """The fields that choose the instances."""
    CHANGEABLE = (
        *("n_samples", "concurrency", "budget", "start_jitter_s", "deadline_s", "stop_at"),
        *("quorum", "group_deadline_s", "stragglers", *CHOICE),
    )

    run_id: Slug
    instances: tuple[InstanceRef, ...] = ()
    dataset: Slug | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    limit: int | None = Field(None, ge=1)
    n_samples: int = Field(1, ge=1, le=512)
    rollout: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields of RolloutRequest that all rollouts share (not run_id, instance, sample_index)."""
    concurrency: int = Field(8, ge=1, le=2000)
    """Maximum number of rollouts in flight. It can change while the run is open."""
    budget: Budget = Budget()
    start_jitter_s: float = Field(0.0, ge=0, le=3600)
    """Delay each start by a random time of up to this many seconds, to spread a burst."""
    priority: int | None = Field(None, ge=1, le=5)
    """Temporal's priority, from 1 (first) to 5 (last); 3 if absent. With `temporal workflow start`,
    also give `--priority-key`."""
    deadline_s: float | None = Field(None, gt=0)
    """The run ends at most a minute after this many seconds from its start. It starts no rollout
    that, judging by recorded times, cannot finish, and stops agents early enough to capture their
    patches. The same request, started again, continues it with a new deadline."""
    stop_at: float | None = Field(None, gt=0, le=1)
    """Once this share of the rollouts has ended, the others are stopped as at a deadline."""
    quorum: int | None = Field(None, ge=1)
    group_deadline_s: float | None = Field(None, gt=0)
    """`deadline_s` of each group."""
    stragglers: Straggler = "cancel"
    asked_by: str = ""
    """The user who changes the run, for its record."""
    asked_at: float = 0.0
    """Unix seconds of the start or the last change, for the run's record. The workflow sets it."""
    ends_at: float | None = None
    """Unix seconds of the deadline. The workflow sets it."""
    stopped: str = ""
    """Why the run ended before all its rollouts, for its manifest. The workflow sets it."""
    again: PlayAgain | None = None
    """Rerun only these rollouts of the run, which has ended. All other fields are those of its
    first start."""
    listed: bool = False
    """The store has a list of the run's rollouts, because its instances have different numbers of
    samples. `n_samples` is the largest."""
    schema_version: Literal[1] = 1

    @model_validator(mode="after")
    def _something_to_run(self) -> "RunRequest":
        if bool(self.instances) == (self.dataset is not None):
            raise ValueError("give exactly one of 'instances' and 'dataset'")
        for fixed in ("run_id", "instance", "sample_index", "round"):
            if fixed in self.rollout:
                raise ValueError(f"'rollout.{fixed}' is set by the run itself; remove it")
        return self

    @property
    def workflow_id(self) -> str:
        return f"run/{self.run_id}"

    @property
    def rollouts_each(self) -> int:
        """Rollouts per entry of the run's list, which names instances or single rollouts."""
        return 1 if self.again or self.listed else self.n_samples

    @property
    def choice(self) -> dict[str, JsonValue]:
        return self.model_dump(mode="json", include=set(self.CHOICE))

    def check_keeps_instances(self, after: Self) -> None:
        """Raises: ConfigurationError if the requests alone show that `after` leaves out an instance.
        Workers compare the instances themselves."""
        if lost := self._left_out(after):
            raise ConfigurationError(
                f"{self.workflow_id} keeps its instances, and this start leaves some out: {lost}; "
                "give another run_id"
            )

    def _left_out(self, after: Self) -> str:
        if self.listed and self.choice != after.choice:
            return "the store has its list"
        if gone := set(self.instances) - set(after.instances or self.instances):
            return ", ".join(sorted(gone)[:3])
        if self.dataset is None or after.dataset is None:
            return ""
        if self.dataset != after.dataset:
            return f"dataset: {self.dataset} -> {after.dataset}"
        if after.limit is not None and after.limit < (self.limit or math.inf):
            return f"limit: {self.limit or 'none'} -> {after.limit}"
        return ""

    def check_prices(self) -> None:
        """Raises: ConfigurationError if the budget lacks a price that its rollouts' request needs."""
        if problem := self.budget.lacks_price_of(self.rollout_request("any/instance").other_models):
            raise ConfigurationError(problem)

    def rollout_request(self, instance: str, sample_index: int = 0) -> RolloutRequest:
        """The request of one sample. Raises: pydantic.ValidationError for a bad `rollout` field."""
        fields = {"run_id": self.run_id, "instance": instance, "sample_index": sample_index}
        return RolloutRequest.model_validate({**self.rollout, **fields})


class CalibrationRequest(Request):
    """Prove the rows of a dataset in one kind of sandbox: the input of `CalibrationWorkflow`.

    Example:
        {"dataset": "swe-bench-verified", "include": ["django__*"], "rollout": {"sandbox": "podman"}}
    """

    dataset: Slug
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    limit: int | None = Field(None, ge=1)
    runs: int = Field(3, ge=1, le=20)
    """Rollouts of the gold patch per row, and the same number of the unpatched base."""
    twins: int = Field(5, ge=0, le=20)
    """Maximum number of twins per FAIL_TO_PASS test, of which a grading draws one. 0: none."""
    round: int = Field(0, ge=0)
    """A new number calibrates rows again that already have a record."""
    concurrency: int = Field(8, ge=1, le=2000)
    """Maximum number of rollouts in flight."""
    rollout: dict[str, JsonValue] = Field(default_factory=dict)
    """Fields of RolloutRequest: sandbox, limits, phases, grade_timeout_s, ..."""
    schema_version: Literal[1] = 1

    @property
    def workflow_id(self) -> str:
        """Depends on every field except `concurrency`, so that a second start joins the first."""
        asked = self.model_dump_json(exclude={"concurrency"}).encode()
        return f"calibration/{self.dataset}/{hashlib.sha256(asked).hexdigest()[:12]}"

    def run_request(self) -> RunRequest:
        """A run of the same instances, with an agent that needs no model."""
        return RunRequest(
            run_id="calibration",
            dataset=self.dataset,
            include=self.include,
            exclude=self.exclude,
            limit=self.limit,
            rollout={**self.rollout, "agent": "oracle"},
        )
