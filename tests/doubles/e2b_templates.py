"""Templates of the E2B double: their builds, tags and names.

Made from the service's own source (github.com/e2b-dev/infra): a request for a build ends those of the same
template that were not started; the start of a build ends the one in progress; tags name the newest
build even if it failed; a sandbox boots the newest build that is ready; at most 100 log entries come at
once. Assumed, and to be checked with an account:
- what the builder says of a command that failed: "failed to run command '...': exit status 7";
- a template that was deleted is unknown at once, and its build ends.
A build runs the steps in a box, and each sandbox of the template runs them again (`image_steps`). Only
`perdure-build-` templates must exist; all other names boot an empty sandbox. Users, caches of layers,
start commands and the sizes of CPUs, memory and disk are recorded and have no effect.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from perdure.sandboxes.base import Sandbox, SandboxSpec
from tests.doubles.fault_rules import met_rule
from tests.doubles.image_steps import ImageStep, StepContext, replay, run_step
from tests.doubles.service_double import LIMITS, Double, Records, Refusal, iso

MUST_EXIST = "perdure-build-"
LOG_ENTRIES = 100
SUPERSEDED = "The build was canceled because it was superseded by a newer one."
INTERNAL = "An internal error occurred. Please try again or contact support with the build ID."


def refusal(status: int, message: str) -> Refusal:
    return Refusal(status, {"code": status, "message": message})


class E2BTemplates(Double):
    """Records: `templates` by id, `builds` by id. Uploads are files of `uploads/`."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.templates = Records(state / "templates")
        self.builds = Records(state / "builds")
        self.uploads = state / "uploads"
        self.uploads.mkdir(parents=True, exist_ok=True)
        self._building: dict[str, asyncio.Task[None]] = {}

    def template_routes(self) -> Sequence[web.AbstractRouteDef]:
        build = "/templates/{template}/builds/{build}"
        return [
            web.post("/v3/templates", self._request_build),
            web.get("/templates/{template}/files/{hash}", self._upload_link),
            web.put("/uploads/{hash}", self._upload),
            web.post(f"/v2{build}", self._start_build),
            web.get(f"{build}/status", self._build_status),
            web.get("/templates/aliases/{template}", self._alias),
            web.get("/templates/{template}/tags", self._tags),
            web.delete("/templates/{template}", self._delete_template),
        ]

    async def end_builds(self) -> None:
        for task in self._building.values():
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)

    # -- builds -----------------------------------------------------------------------------------

    async def _request_build(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        asked = await request.json()
        most = self.settings["max_builds"]
        running = [one for one in self.builds.all() if one["status"] in ("waiting", "building")]
        if most is not None and len(running) >= most:
            raise refusal(
                429,
                f"you have reached the maximum number of concurrent template builds ({most:.0f})",
            )
        template = self._template(asked["name"]) or {"id": uuid4().hex[:20], "name": asked["name"]}
        self.templates.write(template["id"], template)
        for one in self._builds_of(template["id"]):
            if one["status"] == "waiting":
                self._end_build(one, "error", SUPERSEDED)
        build = {
            "id": str(uuid4()), "template": template["id"], "status": "waiting", "asked": asked,
            "created": time.time(), "log": [], "reason": None, "steps": [],
        }  # fmt: skip
        self.builds.write(build["id"], build)
        answer = {"templateID": template["id"], "buildID": build["id"], "public": False}
        names = {"names": [template["name"]], "aliases": [template["name"]], "tags": ["default"]}
        return web.json_response({**answer, **names}, status=202)

    async def _upload_link(self, request: web.Request) -> web.StreamResponse:
        self._known(request)
        name = request.match_info["hash"]
        url = str(request.url.origin() / "uploads" / name)
        present = (self.uploads / name).exists()
        return web.json_response({"present": present, "url": url}, status=201)

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        draft = self.uploads / f".{uuid4().hex}"
        draft.write_bytes(await request.read())
        draft.replace(self.uploads / request.match_info["hash"])
        return web.Response()

    async def _start_build(self, request: web.Request) -> web.StreamResponse:
        template, body = self._known(request), await request.json()
        build = self._build_of(request)
        for one in self._builds_of(template["id"]):
            if one["status"] == "building":
                await self._cancel(one)
        if build["status"] != "waiting":
            raise refusal(400, "build is not in waiting state")
        rule = met_rule.get()
        build |= {"status": "building", "steps": body["steps"], "from": body["fromImage"]}
        build["start_cmd"] = body.get("startCmd")
        if rule is not None and rule.kill:
            self._end_build(build, "error", INTERNAL)
        else:
            self.builds.write(build["id"], build)
            self._build_later(build["id"])
        return web.Response(status=202)

    def _build_later(self, identity: str) -> None:
        """Start the build, unless it runs. A server that was killed starts it again."""
        if identity not in self._building:
            self._building[identity] = asyncio.create_task(self._build(identity))
            self._building[identity].add_done_callback(lambda _: self._building.pop(identity))

    async def _cancel(self, build: dict[str, Any]) -> None:
        if (task := self._building.get(build["id"])) is not None:
            await self.guests.kill(f"build-{build['id'][:8]}")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._end_build(build, "error", "build was cancelled")

    def _end_build(
        self, build: dict[str, Any], status: str, reason: str = "", step: str = ""
    ) -> None:
        told = {"message": reason, "step": step} if step else {"message": reason}
        self.builds.write(build["id"], {**build, "status": status, "reason": told})

    async def _build(self, identity: str) -> None:
        build = self.builds.read(identity)
        build["log"] = []

        def said(line: str) -> None:
            build["log"].append({"timestamp": iso(time.time()), "level": "info", "message": line})

        name, context = f"build-{identity[:8]}", StepContext()
        box = await self.guests.create(SandboxSpec("/root", limits=LIMITS, ttl_s=3600), name)
        try:
            if "no-such-image" in build["from"]:
                self._end_build(
                    build, "error", f"failed to pull {build['from']}: not found", "base"
                )
                return
            for number, step in enumerate(self._steps(build), 1):
                said(f"[{number}] {step.kind} {' '.join(step.args)}")
                code = await run_step(box, step, context, said)
                if code is None:
                    return  # the box was killed, and its killer decides what becomes of the build
                if code != 0:
                    reason = f"failed to run command '{step.args[0]}': exit status {code}"
                    self._end_build(build, "error", reason, str(number))
                    return
                self.builds.write(identity, build)
            self._end_build(build, "ready")
        finally:
            await self.guests.kill(name)

    def _steps(self, build: dict[str, Any]) -> list[ImageStep]:
        steps = (one for one in build["steps"] if one["type"] != "USER")
        return [
            ImageStep(
                one["type"],
                one["args"],
                self.uploads / one["filesHash"] if one["type"] == "COPY" else None,
            )
            for one in steps
        ]

    async def _build_status(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        build = self._build_of(request)
        if build["status"] == "building":
            self._build_later(build["id"])
        at = int(request.query.get("logsOffset", 0))
        answer = {
            "templateID": build["template"], "buildID": build["id"], "status": build["status"],
            "logs": [], "logEntries": build["log"][at : at + LOG_ENTRIES],
        }  # fmt: skip
        if build["reason"] is not None and build["reason"]["message"]:
            answer["reason"] = build["reason"]
        return web.json_response(answer)

    # -- templates --------------------------------------------------------------------------------

    async def _alias(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"templateID": self._known(request)["id"], "public": False})

    async def _tags(self, request: web.Request) -> web.StreamResponse:
        builds = self._builds_of(self._known(request)["id"])
        newest = max(builds, key=lambda one: one["created"])
        tag = {"tag": "default", "buildID": newest["id"], "createdAt": iso(newest["created"])}
        return web.json_response([tag])

    async def _delete_template(self, request: web.Request) -> web.StreamResponse:
        template = self._known(request)
        if any(one["template"] == template["name"] for one in self.sandboxes.all()):
            raise refusal(
                400,
                f"cannot delete template '{template['id']}' because there are running sandboxes "
                "using it",
            )
        self.templates.remove(template["id"])
        for one in self._builds_of(template["id"]):
            if one["status"] == "building":
                await self._cancel(one)
            self.builds.remove(one["id"])
        return web.Response(status=204)

    def check_template(self, name: str) -> None:
        """Raises: Refusal if a sandbox cannot boot it."""
        if name.startswith(MUST_EXIST) and self._ready_build(name) is None:
            raise refusal(404, f"template '{name}' not found")

    async def fill(self, box: Sandbox, name: str) -> None:
        """Give a new sandbox the template's files."""
        if (build := self._ready_build(name)) is not None:
            await replay(box, self._steps(build))

    def _ready_build(self, name: str) -> dict[str, Any] | None:
        template = self._template(name)
        builds = self._builds_of(template["id"]) if template is not None else []
        ready = [one for one in builds if one["status"] == "ready"]
        return max(ready, key=lambda one: one["created"], default=None)

    def _template(self, id_or_name: str) -> dict[str, Any] | None:
        found = (one for one in self.templates.all() if id_or_name in (one["id"], one["name"]))
        return next(found, None)

    def _builds_of(self, template: str) -> list[dict[str, Any]]:
        return [one for one in self.builds.all() if one["template"] == template]

    def _known(self, request: web.Request) -> dict[str, Any]:
        self._check_key(request)
        template = self._template(request.match_info["template"])
        if template is None:
            raise refusal(404, f"template '{request.match_info['template']}' not found")
        return template

    def _build_of(self, request: web.Request) -> dict[str, Any]:
        """The service looks up a build by the template's id, so a name finds none."""
        build: dict[str, Any] | None = self.builds.read(request.match_info["build"])
        if build is None or build["template"] != request.match_info["template"]:
            raise refusal(400, f"Build '{request.match_info['build']}' not found")
        return build

    def _check_key(self, request: web.Request) -> None:
        if not request.headers.get("X-API-KEY"):
            raise refusal(401, "no API key")
