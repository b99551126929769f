"""One health check of one engine: does it answer, is it the same process, does it still sample?

Health routes prove nothing, because they answer while the scheduler hangs. A sampled token and the step
counter do. The gateway's pool records the finding and acts on it.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from perdure.engines.clients.vllm_control import (
    PROBE_PROMPT,
    EngineControl,
    EngineRefused,
    EngineSilent,
    Vitals,
    WrongWeightLabel,
)
from perdure.engines.engine_roster import Roster
from perdure.engines.engine_state import (
    ANY_START,
    EngineRecord,
    EngineState,
    ServedModel,
    is_fenced,
)
from perdure.errors import ControlPlaneError

SUSPECT_PROBE_S = 10.0
"""Seconds in which a suspect or dead engine must sample one token."""
HELD_S = 3600.0
"""Seconds after which an update that still holds an engine counts as dead. The engine is then condemned."""


SETTINGS_HINT = ". Check PERDURE_ENGINE__URL, PERDURE_ENGINE__MODEL and the engine's key"
JOINING = frozenset({EngineState.STARTING, EngineState.DEAD})
"""States in which an engine may be a new process with other flags."""
CERTAIN: Mapping[str, float] = {"temperature": 0.05, "top_p": 1e-6}
"""Sampling that leaves only one token. Its logprob is 0 if taken after top_p (vLLM). If taken after
temperature (SGLang), it is near 0, or at least far from the model's own."""
CANARY_PROMPTS = (PROBE_PROMPT, (5, 8, 13, 21), (7, 7, 2))
SURE, EQUAL = -0.01, 0.1
"""A logprob above SURE proves that sampling was applied, unless the model is as certain after each
prompt. Two logprobs that differ by at most EQUAL are equal, apart from rounding."""


class Finding(NamedTuple):
    """The state in which an engine was found. `start_id`, `version`, `model`: as the engine reports them."""

    state: EngineState
    reason: str = ""
    start_id: str = ""
    version: int | None = None
    model: ServedModel = ServedModel()


class OtherTokenizer(EngineRefused):
    """The engine's tokenizer gives different ids from the one that encodes its prompts."""


class TokenizerCanary(NamedTuple):
    """Shows whether an engine has the tokenizer that encodes its prompts."""

    text: str
    """`TOKENIZED`, then each control token that neither begins nor ends with white space."""
    digest: str
    """Of the ids of the text."""


class Rendering(NamedTuple):
    """The tokenizer with which this process encodes a model's prompts."""

    tokenizer: str
    """As in the setting: `qwen3`, or a folder."""
    canary: TokenizerCanary
    is_default: bool
    """Whether it is the tokenizer of the settings, and not one that the roster names."""


@dataclass
class Load:
    """This process's calls on the engine. `progress`: `time.monotonic()` of the newest token or of the
    oldest call's start, whichever is later."""

    in_flight: int = 0
    progress: float = 0.0


class HealthCheck:
    """Checks one engine repeatedly, and keeps what this process has seen of it."""

    def __init__(self, control: EngineControl, *, hang_s: float) -> None:
        self._control = control
        self._hang_s = hang_s
        self.vitals = Vitals()
        self.refused = ""
        """Why it cannot serve as configured (a wrong model name, key or tokenizer), and the fix."""
        self.rendering: Rendering | None = None
        """None: engines' tokenizers are not checked."""
        self._read: tuple[int, str] | None = None
        """The generation whose tokenizer this process has checked, and the digest that it wanted."""
        self.has_other_tokenizer = False
        """Whether the engine has had another tokenizer for as long as this process has known it."""
        self._moved_at = time.monotonic()
        self._period: object = None
        self._period_began = 0.0

    def waited(self, record: EngineRecord) -> float:
        """Seconds since this process first saw it in its current state. (Hosts' clocks may differ.)"""
        if self._period != _period(record):
            self._period, self._period_began = _period(record), time.monotonic()
        return time.monotonic() - self._period_began

    async def look(self, record: EngineRecord, load: Load) -> Finding | None:
        """The state to which it should change; None if it keeps its state."""
        waited = self.waited(record)
        match record.state:
            case EngineState.READY:
                self.refused = ""  # another process may have proven it
                if not self.reads_prompts(record):
                    try:
                        await self._check_tokenizer(record, record.wire_model, record.served.root)
                    except OtherTokenizer as other:
                        self.refused = str(other)
                        return Finding(EngineState.DEAD, str(other))
                return await self._check(record, load)
            case EngineState.STARTING | EngineState.SUSPECT:
                return await self._prove(record)
            case EngineState.DEAD if not record.removed and waited >= record.backoff_s:
                return await self._prove(record)
            case EngineState.PAUSED:
                return await self._paused(record)
            case _:
                return None

    def reads_prompts(self, record: EngineRecord) -> bool:
        """Whether this process has found that the engine's tokenizer is that of the prompts."""
        wanted = self.rendering
        return wanted is None or self._read == (record.generation, wanted.canary.digest)

    async def _check_tokenizer(self, record: EngineRecord, served: str, root: str) -> None:
        """An engine that does not tell its tokenizer passes.

        `served`: the model's name in requests. Raises: OtherTokenizer.
        """
        if (wanted := self.rendering) is None:
            return
        found = await self._control.tokenizer(served, wanted.canary.text)
        if found not in ("", wanted.canary.digest):
            self.has_other_tokenizer = self._read is None
            raise OtherTokenizer(_other_tokenizer(record, root, found, wanted))
        self._read, self.has_other_tokenizer = (record.generation, wanted.canary.digest), False

    async def _check(self, record: EngineRecord, load: Load) -> Finding | None:
        try:
            vitals = await self._control.vitals()
        except EngineSilent as silent:
            return Finding(EngineState.DEAD if silent.gone else EngineState.SUSPECT, str(silent))
        except ControlPlaneError:
            vitals = self.vitals  # without metrics, only its tokens show a hang
        now = time.monotonic()
        restarted = self._note(vitals)
        if restarted or _another_process(record, vitals):
            return Finding(EngineState.DEAD, "another process answers at its address")
        sampled = self._moved_at >= now  # since the last check; the next check finds a pause
        if not sampled and await self._is_paused():
            return Finding(EngineState.PAUSED, "paused from outside")
        if load.in_flight and now - max(load.progress, self._moved_at) > self._hang_s:
            return Finding(
                EngineState.SUSPECT,
                f"no token for {self._hang_s:.0f} s while {load.in_flight} calls wait",
            )
        return None

    def _note(self, vitals: Vitals) -> bool:
        """Note when its counters last moved. True if they fell, which means a restart."""
        before, self.vitals = self.vitals, vitals
        if (vitals.steps, vitals.tokens) != (before.steps, before.tokens):
            self._moved_at = time.monotonic()
        if before.tokens is None or vitals.tokens is None:
            return False
        return vitals.tokens < before.tokens

    async def _prove(self, record: EngineRecord) -> Finding | None:
        try:
            return await self._proven(record)
        except EngineRefused as refused:
            hint = "" if isinstance(refused, OtherTokenizer) else SETTINGS_HINT
            self.refused = f"{refused}{hint}"
            return _unchanged(record, refused)
        except EngineSilent as silent:
            lost = silent.gone or self.waited(record) > self._hang_s
            if record.state is EngineState.SUSPECT and lost:
                return Finding(EngineState.DEAD, str(silent))
            return _unchanged(record, silent)
        except ControlPlaneError as error:
            return _unchanged(record, error)

    async def _proven(self, record: EngineRecord) -> Finding | None:
        try:
            vitals = await self._control.vitals()
        except EngineRefused:
            vitals = Vitals()
        start_id, root = await self._control.served(record.model, vitals)
        if not record.may_return(start_id):
            return None
        served = start_id if is_fenced(record.model, start_id) else record.model
        tokenizer = await self._control.tokenizer(served)
        model = ServedModel(root=root, tokenizer=tokenizer)
        await self._check_tokenizer(record, served, root)
        if await self._is_paused():
            return Finding(EngineState.PAUSED, "paused from outside", start_id, model=model)
        timeout_s = min(SUSPECT_PROBE_S, self._hang_s)
        if record.state is EngineState.STARTING:
            timeout_s = self._hang_s
        await self._control.round_trip(served, timeout_s=timeout_s)
        if record.state in JOINING:
            await check_logprobs(self._control, served, timeout_s)
        self.refused, self.vitals = "", vitals
        self._moved_at = time.monotonic()
        return Finding(EngineState.READY, "", start_id, await self._version(), model)

    async def _paused(self, record: EngineRecord) -> Finding | None:
        if record.held_by:
            held = self.waited(record) > HELD_S
            return Finding(EngineState.DEAD, f"{record.held_by} never ended") if held else None
        return None if await self._is_paused() else await self._prove(record)

    async def _is_paused(self) -> bool:
        try:
            return await self._control.is_paused() is True
        except ControlPlaneError:
            return False  # the token probe or a lack of progress will show a pause

    async def _version(self) -> int | None:
        try:
            return await self._control.version()
        except WrongWeightLabel:
            raise
        except ControlPlaneError:
            return None


async def check_logprobs(control: EngineControl, model: str, timeout_s: float) -> None:
    """Prove that the engine reports logprobs of the distribution that it samples from, as episodes claim.

    Raises: EngineRefused, which names the flag to set, if the logprobs are the model's own;
    ControlPlaneError.
    """
    for prompt in CANARY_PROMPTS:
        certain = await control.score(model, prompt, sampling=CERTAIN, timeout_s=timeout_s)
        if certain.logprob > SURE:
            continue
        greedy = await control.score(model, prompt, timeout_s=timeout_s)
        same = greedy.token_id == certain.token_id
        if same and abs(greedy.logprob - certain.logprob) <= EQUAL:
            raise EngineRefused(
                f"engine {control.url} reports logprobs before temperature and top_p "
                f"({certain.logprob:.3f} for a token that was certain): {control.processed_by}"
            )


def _other_tokenizer(record: EngineRecord, root: str, found: str, wanted: Rendering) -> str:
    """The message to the user about an engine with another tokenizer."""
    name, model = wanted.tokenizer, record.model
    of_root = f"{root}, " if root else ""
    added = f"`perdure engines add {record.url} --model {model} --tokenizer FOLDER`"
    fix = (
        "set PERDURE_ENGINE__TOKENIZER to the folder of the engine's model"
        if wanted.is_default
        else f"name the folder of the engine's model with {added} (and another --model if other "
        f"engines have {model})"
    )
    return (
        f"the engine {record.url} cannot sample for the model {model}: its tokenizer ({of_root}digest "
        f"{found}) gives different ids from {name!r} (digest {wanted.canary.digest}), which encodes the prompts. "
        f"Start it with a model that has the tokenizer {name!r}, or {fix}"
    )


def _unchanged(record: EngineRecord, error: Exception) -> Finding | None:
    """The same state with a new reason; None if the reason is already recorded."""
    return None if record.reason == str(error) else Finding(record.state, str(error))


def _another_process(record: EngineRecord, vitals: Vitals) -> bool:
    if is_fenced(record.model, record.start_id):
        return False  # requests carry the fenced name, to which another start answers 404
    return bool(record.start_id and vitals.started) and record.start_id != vitals.started


def apply(roster: Roster, seen: EngineRecord, finding: Finding) -> Roster:
    """The roster after a finding about `seen`; unchanged if the engine has changed state since."""
    now = roster.get(seen.name)
    if now is None or _period(now) != _period(seen):
        return roster
    if finding.state in (EngineState.READY, EngineState.PAUSED):
        return _came_back(roster, now, finding)
    if now.of_trainer and finding.state is EngineState.DEAD:
        return roster.without(now.name)  # if the process is alive after all, it registers again
    condemned = now.start_id or ANY_START
    held = finding.state is EngineState.DEAD and now.held_by
    changes = {"condemned": condemned, "held_by": ""} if held else {}
    return roster.having(now.to(finding.state, finding.reason, **changes))


def _period(record: EngineRecord) -> tuple[int, EngineState, float]:
    """Identifies one period in one state. An engine that is ready again after an update is in a new
    period, so an older check says nothing about it."""
    return record.generation, record.state, record.since


def _came_back(roster: Roster, now: EngineRecord, finding: Finding) -> Roster:
    """A dead engine that answers, or a restarted one, gets a new generation."""
    another = now.served.replaced_by(finding.model, now.version, finding.version)
    if another:
        accept = f"accept this one with `perdure engines add {now.url}`"
        reason = f"{another}: start the earlier one again, or {accept}"
        return roster.having(now.to(EngineState.DEAD, reason, held_by=""))
    differs = bool(now.start_id and finding.start_id and now.start_id != finding.start_id)
    if now.state is EngineState.DEAD or differs:
        now = now.reborn(roster.next_generation, finding.start_id)
    version = now.version if finding.version is None else finding.version
    changes = {
        "start_id": finding.start_id or now.start_id,
        "version": version,
        "served": now.served.updated(finding.model),
    }
    return roster.having(now.to(finding.state, finding.reason, **changes))
