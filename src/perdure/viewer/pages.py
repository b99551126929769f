"""The pages: each method reads its data and fills one template.

Templates escape every value. `live` is the number of seconds until the browser reloads a page.
"""

import asyncio
import contextlib
import json
import re
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, get_args
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from perdure.errors import ConfigurationError, NotFound
from perdure.reports import readable_trajectory, stored_rollout
from perdure.reports.readable_trajectory import Trajectory
from perdure.reports.stored_rollout import RolloutName, StoredRollout
from perdure.settings.settings_tree import Settings
from perdure.storage.base import Store
from perdure.types.identifier_patterns import INSTANCE_REF, SLUG
from perdure.viewer import conversation_view, diff_colors, hidden_test_logs, page_links, token_view
from perdure.viewer.index_updates import RUNS, WAIT_S, Readings
from perdure.viewer.safe_text import finalize, folded, marked
from perdure.viewer.search_index import (
    BEGIN,
    END,
    PATCH,
    TESTS,
    Filters,
    Found,
    Index,
    Order,
    Row,
    RunTotals,
)
from perdure.viewer.token_view import Text
from perdure.viewer.trajectory_comparison import side_by_side

ROWS = 100
"""Rows on a page."""
GROUPS = 60
GROUP_S = 5.0
"""Seconds that a group's page waits for a run that was not read before."""
LIVE_S = 3
"""Seconds until the browser reloads the page of an open run or rollout."""
FILE_CHARS = 400_000
TONES = {
    "resolved": "good",
    "unresolved": "bad",
    "empty_patch": "bad",
    "apply_failed": "bad",
    "timeout": "bad",
    "": "open",
}
INSTANCE_ID = f"^{INSTANCE_REF.split('/')[1]}"
FILTERS = tuple(name for name in Filters.__dataclass_fields__ if name != "run")

Step = Callable[[str], Awaitable[str]]
"""Workflow id -> what the open rollout is doing; empty if unknown."""


class Pages:
    def __init__(self, settings: Settings, store: Store, index: Index, step: Step) -> None:
        self.settings = settings
        self.store = store
        self.index = index
        self.step = step
        self.readings = Readings(store, index)
        self.templates = Environment(
            loader=PackageLoader("perdure.viewer"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=finalize,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self.templates.globals.update(links=page_links, tone=tone, long_time=long_time, stamp=stamp)

    async def aclose(self) -> None:
        await self.readings.aclose()
        self.index.close()

    # -- lists ---------------------------------------------------------------------------------

    async def runs(self, request: Request) -> Response:
        state = await self.readings.bring(RUNS)
        found = await asyncio.to_thread(self.index.totals)
        return self._page("runs.html", title="Runs", runs=found, state=state, live=LIVE_S)

    async def run(self, request: Request) -> Response:
        run = _name(request, "run")
        state = await self.readings.bring(run)
        known = await asyncio.to_thread(self.index.totals, run)
        totals = known[0] if known else RunTotals(run)
        if not (totals.rollouts or totals.about.agent or state):
            raise NotFound(f"no run {run!r} in {self.store.url}")
        filters = _filters(request, run)
        by = "group" if request.query_params.get("by") == "group" else "rollout"
        planned = totals.about.instances * totals.about.samples
        open_ones = totals.ended < max(planned, totals.rollouts) and not totals.about.stopped
        goes_on = state == "reading" or open_ones
        shown = await asyncio.to_thread(self._listed, request, filters, by)
        values = {
            name: await asyncio.to_thread(self.index.values, run, name)
            for name in ("ending", "agent_end", "boundary")
        }
        return self._page(
            "run.html",
            title=run,
            run=run,
            totals=totals,
            planned=planned,
            state=state,
            by=by,
            values=values,
            live=LIVE_S if goes_on else 0,
            **shown,
        )

    async def search(self, request: Request) -> Response:
        filters = _filters(request, "")
        state = await self.readings.bring(RUNS)
        shown: dict[str, Any] = {"rows": [], "count": 0, "hits": {}, "pager": None}
        if filters.q:
            shown = await asyncio.to_thread(self._listed, request, filters, "rollout")
        totals = await asyncio.to_thread(self.index.totals)
        known = sum(one.searchable for one in totals), sum(one.ended for one in totals)
        title = f"Search: {filters.q}" if filters.q else "Search"
        kept = {"filters": filters, "order": "instance", "kept": {}}
        return self._page(
            "search.html", title=title, state=state, known=known, live=0, **{**kept, **shown}
        )

    def _listed(self, request: Request, filters: Filters, by: str) -> dict[str, Any]:
        """One page of a list, as values for its template."""
        order = request.query_params.get("order", "instance")
        chosen: Order = order if order in get_args(Order) else "instance"  # type: ignore[assignment]
        size = GROUPS if by == "group" else ROWS
        counted = self.index.count_groups if by == "group" else self.index.count
        count = counted(filters)
        number = min(_number(request, "page", 1), max(1, -(-count // size)))
        start = (number - 1) * size
        rows: list[Row] = []
        groups: list[list[Row]] = []
        if by == "group":
            groups = self.index.groups(filters, start, size)
        else:
            rows = self.index.rows(filters, chosen, start, size)
        hits = {
            key: [self._hit(one) for one in found]
            for key, found in self.index.snippets(rows, filters.q).items()
        }
        return {
            "rows": rows,
            "groups": groups,
            "count": count,
            "hits": hits,
            "filters": filters,
            "order": chosen,
            "kept": _kept(filters),
            "pager": _pager(request, number, count, size),
        }

    def _hit(self, found: Found) -> dict[str, Any]:
        where = {TESTS: "tests", PATCH: "patch"}.get(found.slot, "")
        return {"slot": found.slot, "part": where, "pieces": marked(found.snippet, BEGIN, END)}

    async def group(self, request: Request) -> Response:
        run, instance = _name(request, "run"), _name(request, "instance")
        mine = await self._group(run, instance) or await self._group(run, instance, wait=GROUP_S)
        if not mine:
            raise NotFound(f"run {run} has no rollout of {instance!r}")
        goes_on = any(not row.ending for row in mine)
        return self._page(
            "group.html", title=instance, run=run, instance=instance, rows=mine,
            named_rewards=_named_rewards(mine), live=LIVE_S if goes_on else 0,
        )  # fmt: skip

    async def _group(self, run: str, instance: str, wait: float = WAIT_S) -> list[Row]:
        await self.readings.bring(run, wait)
        found = await asyncio.to_thread(
            self.index.groups, Filters(run=run, instance=instance), 0, ROWS
        )
        return [row for rows in found for row in rows if row.instance == instance]

    # -- one rollout ---------------------------------------------------------------------------

    async def rollout(self, request: Request) -> Response:
        """A rollout's verdict, and one page of its trajectory."""
        shown = await self._rollout(request, "")
        found: StoredRollout = shown["found"]
        turns = await self._turns(request, found)
        if turns is None:
            return self._page("rollout.html", **shown, turns=None)
        document = await asyncio.to_thread(readable_trajectory.document, found, turns)
        reading = conversation_view.entries(document["turns"])
        chains = [entry.chain for entry in reading if entry.chain is not None]
        wanted = request.query_params.get("turn", "")
        page = conversation_view.page_of(reading, int(wanted)) if wanted.isdigit() else 1
        page = _number(request, "page", page)
        start = (page - 1) * conversation_view.TURNS
        lines = [
            (
                entry,
                conversation_view.view(entry.turn, document["segments"]) if entry.turn else None,
            )
            for entry in reading[start : start + conversation_view.TURNS]
        ]
        return self._page(
            "rollout.html",
            **shown,
            turns=turns,
            counts=document["counts"],
            segments=document["segments"],
            why_not=conversation_view.WHY_NOT,
            chains=chains,
            lines=lines,
            attempt=turns.attempt,
            pager=_pager(request, page, len(reading), conversation_view.TURNS),
        )

    async def tokens(self, request: Request) -> Response:
        """One segment, colored by mask, logprob or version."""
        shown = await self._rollout(request, "tokens")
        turns = await self._turns(request, shown["found"])
        segments = turns.segments if turns is not None else []
        if not segments:
            return self._page("tokens.html", **shown, segments=[])
        number = min(_number(request, "segment", segments[-1].index, least=0), len(segments) - 1)
        segment = segments[number]
        by = request.query_params.get("by", "mask")
        length = len(segment.prompt_ids) + len(segment.response_ids)
        first = 1 + max(0, len(segment.prompt_ids) - token_view.PAGE // 10) // token_view.PAGE
        page = min(_number(request, "page", first), -(-length // token_view.PAGE) or 1)
        text, known = await self._tokenizer(shown["found"])
        start = (page - 1) * token_view.PAGE
        return self._page(
            "tokens.html",
            **shown,
            segments=segments,
            segment=segment,
            by=by if by in ("mask", "logprob", "version") else "mask",
            tokens=await asyncio.to_thread(token_view.page, segment, start, text),
            versions=token_view.versions(segment),
            trained=sum(segment.loss_mask),
            tokenizer_known=known,
            pager=_pager(request, page, length, token_view.PAGE),
        )

    async def patch(self, request: Request) -> Response:
        shown = await self._rollout(request, "patch")
        last = shown["found"].last
        key = last.patch["key"] if last is not None and last.patch else ""
        data = (await self.store.get(key)).data if key else b""
        text = data[: 4 * FILE_CHARS].decode("utf-8", "replace")
        return self._page(
            "patch.html", **shown, patch=last and last.patch, diff=diff_colors.color_diff(text)
        )

    async def tests(self, request: Request) -> Response:
        """The test results, and the output around a failing test."""
        shown = await self._rollout(request, "tests")
        found: StoredRollout = shown["found"]
        grade = found.last.grade if found.last else None
        window, test = None, request.query_params.get("test", "")
        failing = found.failing_tests()
        if not test and failing:
            test = failing[0].partition(" ")[2]
        if grade is not None and grade.log_key:
            line = request.query_params.get("line", "")
            try:
                data = (await self.store.get(grade.log_key)).data
            except NotFound:
                data = b""
            log = data.decode("utf-8", "replace")
            start = max(1, int(line[:9])) if line.isdigit() else None
            window = await asyncio.to_thread(hidden_test_logs.window, log, test, start)
        return self._page(
            "tests.html", **shown, grade=grade, window=window, test=test,
            failing=[one.partition(" ") for one in failing],
        )  # fmt: skip

    async def files(self, request: Request) -> Response:
        """The names of the rollout's files, and one file as text."""
        shown = await self._rollout(request, "files")
        found: StoredRollout = shown["found"]
        names = [key for attempt in found.attempts for key in attempt.evidence]
        wanted, text, size = request.query_params.get("file", ""), None, 0
        if wanted in names:  # the viewer shows no other files of the store
            data = (await self.store.get(wanted)).data
            size = len(data)
            text = folded(data[:FILE_CHARS].decode("utf-8", "replace"), FILE_CHARS)
        prefix = f"{found.name.prefix}/"
        return self._page(
            "files.html", **shown, names=names, prefix=prefix, wanted=wanted, text=text, size=size
        )

    async def beside(self, request: Request) -> Response:
        """Two samples of a group side by side: their turns and patches."""
        shown = await self._rollout(request, "beside")
        left: StoredRollout = shown["found"]
        name = RolloutName(left.name.run_id, left.name.instance_id, request.path_params["other"])
        right = await stored_rollout.read(self.store, name)
        both = [await self._turns(request, one, attempt=0) for one in (left, right)]
        documents = [
            readable_trajectory.document(one, turns)["turns"] if turns is not None else []
            for one, turns in zip((left, right), both, strict=True)
        ]
        patches = [await self._patch_of(one) for one in (left, right)]
        row = await asyncio.to_thread(self._row_of, name)
        return self._page(
            "beside.html",
            **shown,
            other=name,
            other_row=row,
            pairs=side_by_side(*documents),
            patches=patches,
            same_patch=patches[0].lines == patches[1].lines,
        )

    async def _patch_of(self, found: StoredRollout) -> diff_colors.Diff:
        last = found.last
        if last is None or not last.patch:
            return diff_colors.Diff(())
        data = (await self.store.get(last.patch["key"])).data
        return diff_colors.color_diff(data[:FILE_CHARS].decode("utf-8", "replace"))

    async def _rollout(self, request: Request, part: str) -> dict[str, Any]:
        """Values that all pages of a rollout show. Raises: NotFound."""
        name = RolloutName(
            _name(request, "run"), _name(request, "instance"), request.path_params["sample"]
        )
        await self.readings.bring(name.run_id)
        found = await stored_rollout.read(self.store, name)
        row = await asyncio.to_thread(self._row_of, name)
        filters = _filters(request, name.run_id)
        before, after = await asyncio.to_thread(
            self.index.beside, filters, name.instance_id, name.sample_index
        )
        is_open = found.episode is None
        siblings = await asyncio.to_thread(
            self.index.groups, Filters(run=name.run_id, instance=name.instance_id), 0, ROWS
        )
        return {
            "title": f"{name.instance_id} #{name.sample_index}",
            "name": name,
            "found": found,
            "episode": found.episode or {},
            "row": row,
            "part": part,
            "kept": _kept(filters),
            "before": before,
            "after": after,
            "siblings": [r for rows in siblings for r in rows if r.instance == name.instance_id],
            "step": await self.step(name.workflow_id) if is_open else "",
            "is_open": is_open,
            "live": LIVE_S if is_open else 0,
        }

    def _row_of(self, name: RolloutName) -> Row | None:
        found = self.index.groups(Filters(run=name.run_id, instance=name.instance_id), 0, ROWS)
        rows = (row for rows in found for row in rows if row.instance == name.instance_id)
        return next((row for row in rows if row.sample == name.sample_index), None)

    async def _turns(
        self, request: Request, found: StoredRollout, attempt: int | None = None
    ) -> Trajectory | None:
        """The turns of an attempt; None if there are none yet."""
        number = _number(request, "attempt", 0, least=0) if attempt is None else attempt
        try:
            return await readable_trajectory.read(self.store, found, number or None)
        except NotFound:
            return None

    async def _tokenizer(self, found: StoredRollout) -> tuple[Text, bool]:
        """A function from ids to text, and whether it uses the model's tokenizer."""
        from perdure.gateway.rendering.tokenizers import load_tokenizer

        identity: dict[str, str] = {}
        with contextlib.suppress(NotFound, ValueError):
            identity = json.loads((await self.store.get(f"{found.name.prefix}/identity.json")).data)
        try:
            return load_tokenizer(
                identity.get("engine.tokenizer") or self.settings.engine.tokenizer
            ).decode, True
        except (ConfigurationError, ImportError, OSError, ValueError):
            return token_view.ids_only, False

    # -- answers -------------------------------------------------------------------------------

    def problem(self, message: str, status: int) -> Response:
        return self._page("problem.html", status=status, title="Error", message=message, live=0)

    def _page(self, template: str, *, status: int = 200, **values: Any) -> Response:
        return HTMLResponse(self.templates.get_template(template).render(values), status)


def tone(ending: str) -> str:
    """The CSS class for an ending's color."""
    return TONES.get(ending, "odd")


def long_time(seconds: float | None) -> str:
    """`12 s`, `3:20`, `1:03:20`."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def stamp(at: float | None) -> str:
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.gmtime(at))


class _NamedReward(NamedTuple):
    name: str
    samples: list[float | None]
    mean: float
    deviation: float | None
    """The sample standard deviation; None for one value."""


def _named_rewards(rows: Sequence[Row]) -> list[_NamedReward]:
    found = [json.loads(row.named_rewards) for row in rows]
    made = []
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one.get(name) for one in found]
        known = [value for value in values if value is not None]
        deviation = statistics.stdev(known) if len(known) > 1 else None
        made.append(_NamedReward(name, values, statistics.fmean(known), deviation))
    return made


def _name(request: Request, part: str) -> str:
    """A run or an instance in the URL. Raises: NotFound for a name that none can have."""
    found: str = request.path_params[part]
    if not re.fullmatch(SLUG if part == "run" else INSTANCE_ID, found):
        raise NotFound(f"no {part} {found[:80]!r}")
    return found


def _number(request: Request, name: str, default: int, *, least: int = 1) -> int:
    given = request.query_params.get(name, "")
    return max(least, int(given[:9])) if given.isascii() and given.isdigit() else default


def _filters(request: Request, run: str) -> Filters:
    given = request.query_params
    run = run or given.get("run", "")
    return Filters(run=run, **{name: given.get(name, "").strip()[:300] for name in FILTERS})


def _kept(filters: Filters) -> dict[str, str]:
    """The parameters of links to a rollout, so that next and previous follow the filters."""
    return {name: value for name in FILTERS if (value := getattr(filters, name))}


def _pager(request: Request, number: int, count: int, size: int) -> dict[str, Any] | None:
    """URLs of the previous and the next page; None if there is only one page."""
    last = max(1, -(-count // size))
    if last == 1:
        return None

    def address(page: int) -> str:
        rest = [(k, v) for k, v in request.query_params.multi_items() if k not in ("page", "turn")]
        return "?" + urlencode([*rest, ("page", str(page))])

    return {
        "number": number,
        "last": last,
        "before": address(number - 1) if number > 1 else "",
        "after": address(number + 1) if number < last else "",
    }
