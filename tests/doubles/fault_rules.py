"""Faults by rule, for servers that play a service: what to break, where, how often.

A rule either replaces the work (`before`) or loses its answer (`after`, which finds leaks and double
execution). Rules and their counts are on disk, so a restarted server keeps failing.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
About = Callable[[web.Request], Awaitable[str]]
Caller = Callable[[web.Request], tuple[str, str]]
CONTROL = "/__control/"
GOAWAY = "X-Perdure-Goaway"
BEHIND_HTTP2 = "X-Perdure-Http2"


@dataclass
class Rule:
    """One fault. `match` is a regular expression searched in `METHOD /path`.

    Example: Rule("POST /v2/sandboxes$", when="after", reset=True)
    """

    match: str
    about: str = ""
    """Only requests about a sandbox whose metadata, as JSON, matches this regular expression."""
    times: int | None = 1
    """How many requests it breaks; None: all."""
    skip: int = 0
    """Let this many matching requests pass first."""
    probability: float = 1.0
    when: Literal["before", "after"] = "before"
    """`before`: instead of the work. `after`: after the work, instead of the answer."""
    delay_s: float = 0.0
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    """An object is sent as JSON, a string as HTML; None makes an error body that fits the status."""
    reset: bool = False
    """Cut the connection without an answer."""
    goaway: bool = False
    """Behind `http2_proxy`: GOAWAY after (`after`) or before this request is handled. Else as `reset`."""
    hang: bool = False
    """Accept, and never answer."""
    refuse_for_s: float = 0.0
    """Seconds for which a status stays the answer to this caller: negative caching."""
    kill: bool = False
    """The sandbox that the request is about dies."""
    stream: Literal["", "cut", "no_end", "empty_end", "unavailable", "silent", "truncated"] = ""
    """How a command's stream ends. `cut` and `silent` (no data, for ever) take effect at once; the
    others let the command finish first. `truncated`: the second half of its output is missing."""
    twice: bool = False
    """As a replaying proxy: run the command twice and answer with the second run."""
    exit_code: Literal["", "empty", "absent", "unreadable"] = ""
    """How the end of a command is reported: as an empty string, not at all, or not readable yet."""
    state: str = ""
    """A sandbox made now is stuck in this state, or ends in it: `error`, `build_failed`."""
    state_s: float | None = None
    """How long it is stuck; None for ever."""
    upload: Literal["", "missing", "short"] = ""
    """Answer success, but leave no file, or only its first half."""
    seen: int = 0
    hits: int = 0

    def meets(self, line: str, about: str = "") -> bool:
        """Count the request. Whether it is one to break."""
        if not re.search(self.match, line) or not re.search(self.about, about):
            return False
        self.seen += 1
        if self.seen <= self.skip or (self.times is not None and self.hits >= self.times):
            return False
        if random.random() >= self.probability:
            return False
        self.hits += 1
        return True


met_rule: ContextVar[Rule | None] = ContextVar("met_rule", default=None)
"""The rule that the current request has met, for handlers with faults of their own."""


class Faults:
    """The rules of one server, and its log of requests."""

    def __init__(
        self, path: Path, about: About | None = None, caller: Caller | None = None
    ) -> None:
        """`about`: the metadata, as JSON, of the sandbox that a request is about; else empty.
        `caller`: its key and sandbox, by which refusals are cached."""
        self._path = path
        self._about = about
        self._caller = caller or _e2b_caller
        self.rules: list[Rule] = []
        self.log: list[dict[str, Any]] = []
        self._refused: dict[tuple[str, str], tuple[float, Rule]] = {}
        if path.exists():
            self.rules = [Rule(**fields) for fields in json.loads(path.read_text())]

    def add(self, rules: list[dict[str, Any]]) -> None:
        added = [Rule(**fields) for fields in rules]
        for rule in added:
            re.compile(rule.match)
        self.rules += added
        self._save()

    def clear(self) -> None:
        self.rules, self._refused = [], {}
        self.log.clear()
        self._save()

    def _save(self) -> None:
        draft = self._path.with_suffix(".tmp")
        draft.write_text(json.dumps([asdict(rule) for rule in self.rules]))
        draft.replace(self._path)

    def pick(self, line: str, caller: tuple[str, str], about: str = "") -> Rule | None:
        until, rule = self._refused.get(caller, (0.0, None))
        if time.monotonic() < until:
            return rule
        found = next((rule for rule in self.rules if rule.meets(line, about)), None)
        if found is not None:
            self._save()
            if found.refuse_for_s:
                self._refused[caller] = (time.monotonic() + found.refuse_for_s, found)
        return found

    async def apply(self, request: web.Request, rule: Rule) -> web.StreamResponse | None:
        """The answer that this rule gives; None if the rule defines none."""
        await asyncio.sleep(rule.delay_s)
        if rule.hang:
            await asyncio.Event().wait()
        if rule.goaway and BEHIND_HTTP2 in request.headers:
            return web.Response(status=503, headers={GOAWAY: rule.when})
        if rule.reset or rule.goaway:
            if request.transport is not None:
                request.transport.abort()
            raise asyncio.CancelledError
        if rule.status is None:
            return None
        if isinstance(rule.body, str):
            return web.Response(
                status=rule.status, text=rule.body, content_type="text/html", headers=rule.headers
            )
        body = rule.body or {"code": rule.status, "message": f"injected {rule.status}"}
        return web.json_response(body, status=rule.status, headers=rule.headers)

    async def around(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Middleware: break what a rule names, but never the control routes."""
        if request.path.startswith(CONTROL):
            return await handler(request)
        line = f"{request.method} {request.path}"
        self.log.append({"line": line, "headers": dict(request.headers), "at": time.time()})
        asked = self._about is not None and any(rule.about for rule in self.rules)
        about = await self._about(request) if asked and self._about is not None else ""
        rule = self.pick(line, self._caller(request), about)
        if rule is None:
            return await handler(request)
        met_rule.set(rule)
        if rule.when == "before":
            answer = await self.apply(request, rule)
            return answer if answer is not None else await handler(request)
        done = await handler(request)
        answer = await self.apply(request, rule)
        return answer if answer is not None else done

    def routes(self) -> list[web.RouteDef]:
        """`POST` adds a list of rules, `GET` shows them with their counts, `DELETE` removes all."""

        async def add(request: web.Request) -> web.Response:
            try:
                self.add(await request.json())
            except (TypeError, ValueError, re.error) as error:
                raise web.HTTPBadRequest(text=f"no list of rules: {error}\n") from error
            return web.json_response([asdict(rule) for rule in self.rules])

        async def show(request: web.Request) -> web.Response:
            return web.json_response([asdict(rule) for rule in self.rules])

        async def clear(request: web.Request) -> web.Response:
            self.clear()
            return web.json_response([])

        async def log(request: web.Request) -> web.Response:
            return web.json_response(self.log)

        path = f"{CONTROL}rules"
        return [
            web.post(path, add), web.get(path, show), web.delete(path, clear),
            web.get(f"{CONTROL}log", log),
        ]  # fmt: skip


def _e2b_caller(request: web.Request) -> tuple[str, str]:
    headers = request.headers
    return headers.get("X-API-KEY", ""), headers.get("E2b-Sandbox-Id", "")
