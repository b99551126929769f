"""Snapshots of the Daytona double: their builds, logs, and the object storage of build contexts.

Made from the service's own source (github.com/daytonaio/daytona): a name is unique in the account (409);
a failed build keeps its name and says why in `errorReason`; a sandbox of a snapshot that is missing or not
active is a 400. Assumed, and to be checked with an account:
- what a failed command says: "The command '...' returned a non-zero code: 7", as Docker does;
- a snapshot that is deleted is unknown at once, and its build ends;
- the stream of the log ends with the build.
A build runs the steps after the last FROM in a box, and each sandbox of the snapshot runs them again
(`image_steps`). Only `perdure-build-` snapshots must exist; all other names boot an empty sandbox. Sizes and
regions are recorded and have no effect. The SDK sends contexts over TLS only; tests let it use HTTP.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web
from e2b_dockerfile_utils import parse_dockerfile_ast

from perdure.sandboxes.base import Sandbox, SandboxSpec
from tests.doubles.fault_rules import met_rule
from tests.doubles.image_steps import ImageStep, StepContext, replay, run_step
from tests.doubles.service_double import LIMITS, Double, Records, Refusal, iso

MUST_EXIST = "perdure-build-"
BUCKET = "contexts"
ORGANIZATION = "local"


def refusal(status: int, message: str) -> Refusal:
    body = {"statusCode": status, "message": message, "error": message, "source": "DAYTONA_API"}
    return Refusal(status, body)


class DaytonaSnapshots(Double):
    """Records: `snapshots` by id. Build contexts are files of `contexts/`."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.snapshots = Records(state / "snapshots")
        self.contexts = state / "contexts"
        self.contexts.mkdir(parents=True, exist_ok=True)
        self._parts: dict[str, dict[int, bytes]] = {}
        self._building: dict[str, asyncio.Task[None]] = {}

    def snapshot_routes(self) -> Sequence[web.AbstractRouteDef]:
        one, stored = "/api/snapshots/{snapshot}", f"/s3/{BUCKET}/{{org}}/{{hash}}/context.tar"
        return [
            web.post("/api/snapshots", self._create_snapshot),
            web.get(one, self._get_snapshot, allow_head=False),
            web.delete(one, self._delete_snapshot),
            web.post(f"{one}/activate", self._activate),
            web.get(f"{one}/build-logs-url", self._log_url),
            web.get(f"{one}/build-logs", self._log),
            web.get("/api/object-storage/push-access", self._push_access),
            web.head(stored, self._head_context),
            web.post(stored, self._post_context),
            web.put(stored, self._put_context),
        ]

    async def end_builds(self) -> None:
        for task in self._building.values():
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)

    # -- snapshots --------------------------------------------------------------------------------

    async def _create_snapshot(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        asked = await request.json()
        most = self.settings["max_snapshots"]
        if most is not None and len(self.snapshots.all()) >= most:
            raise refusal(400, f"Snapshot quota exceeded. Maximum allowed: {most:.0f}")
        if self._snapshot(asked["name"]) is not None:
            raise refusal(
                409, f'Snapshot with name "{asked["name"]}" already exists for this organization'
            )
        now, rule = time.time(), met_rule.get()
        made = {
            "id": str(uuid4()), "name": asked["name"], "asked": asked, "state": "pending",
            "reason": None, "created": now, "updated": now, "log": [], "runs": 0,
        }  # fmt: skip
        if rule is not None and rule.kill:
            made |= {"state": "error", "reason": "Timeout while building snapshot on runner"}
        self.snapshots.write(made["id"], made)
        self._build_later(made)
        return web.json_response(_shown(made))

    def _build_later(self, snapshot: dict[str, Any]) -> None:
        """Start the build, unless it runs. A server that was killed starts it again."""
        identity = snapshot["id"]
        if snapshot["state"] in ("pending", "building") and identity not in self._building:
            self._building[identity] = asyncio.create_task(self._build(identity))
            self._building[identity].add_done_callback(lambda _: self._building.pop(identity))

    async def _build(self, identity: str) -> None:
        made = self.snapshots.read(identity)
        made |= {"state": "building", "log": [], "runs": made["runs"] + 1}
        self.snapshots.write(identity, made)
        info, name = made["asked"]["buildInfo"], f"build-{identity[:8]}"
        box = await self.guests.create(SandboxSpec("/root", limits=LIMITS, ttl_s=3600), name)
        state, reason, context = "active", "", StepContext()
        try:
            if "no-such-image" in info["dockerfileContent"]:
                state, reason = "error", "failed to solve: no-such-image: not found"
            for step in self._steps(info) if state == "active" else []:
                made["log"].append(f"Step : {step.kind} {' '.join(step.args)}")
                code = await run_step(box, step, context, made["log"].append)
                if code is None:
                    return  # the box was killed, and its killer decides what becomes of the build
                if code != 0:
                    state = "build_failed"
                    reason = (
                        f"The command '/bin/sh -c {step.args[0]}' returned a non-zero code: {code}"
                    )
                    break
                self.snapshots.write(identity, made)
        finally:
            await self.guests.kill(name)
        made |= {"state": state, "reason": reason or None, "updated": time.time()}
        if self.snapshots.read(identity) is not None:  # it was not deleted
            self.snapshots.write(identity, made)

    def _steps(self, info: dict[str, Any]) -> list[ImageStep]:
        hashes, steps = iter(info.get("contextHashes") or ()), list[ImageStep]()
        for one in parse_dockerfile_ast(info["dockerfileContent"]).instructions:
            if one.name == "FROM":
                steps = []
            elif one.name == "COPY" and not any("--from=" in flag for flag in one.flags):
                for source in one.args[:-1]:
                    tar = self.contexts / next(hashes)
                    steps.append(ImageStep("COPY", [source, one.args[-1]], tar))
            elif one.name == "ENV":
                pairs = zip(one.args[::3], one.args[1::3], strict=True)
                steps.append(ImageStep("ENV", [word for pair in pairs for word in pair]))
            elif one.name in ("RUN", "WORKDIR"):
                steps.append(ImageStep(one.name, list(one.args)))
        return steps

    async def _get_snapshot(self, request: web.Request) -> web.StreamResponse:
        snapshot = self._known_snapshot(request)
        self._build_later(snapshot)
        return web.json_response(_shown(snapshot))

    async def _delete_snapshot(self, request: web.Request) -> web.StreamResponse:
        snapshot = self._known_snapshot(request)
        self.snapshots.remove(snapshot["id"])
        if (task := self._building.get(snapshot["id"])) is not None:
            await self.guests.kill(f"build-{snapshot['id'][:8]}")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        return web.Response()

    async def _activate(self, request: web.Request) -> web.StreamResponse:
        snapshot = {**self._known_snapshot(request), "state": "active"}
        self.snapshots.write(snapshot["id"], snapshot)
        return web.json_response(_shown(snapshot))

    async def _log_url(self, request: web.Request) -> web.StreamResponse:
        snapshot = self._known_snapshot(request)
        url = request.url.origin() / "api" / "snapshots" / snapshot["id"] / "build-logs"
        return web.json_response({"url": str(url)})

    async def _log(self, request: web.Request) -> web.StreamResponse:
        snapshot, at = self._known_snapshot(request), 0
        response = web.StreamResponse()
        await response.prepare(request)
        while snapshot is not None:
            for line in snapshot["log"][at:]:
                at += 1
                await response.write(f"{line}\n".encode())
            if snapshot["state"] not in ("pending", "building"):
                break
            await asyncio.sleep(0.02)
            snapshot = self.snapshots.read(snapshot["id"])
        return response

    def check_snapshot(self, name: str) -> None:
        """Raises: Refusal if a sandbox cannot boot it."""
        if not name.startswith(MUST_EXIST):
            return
        if (snapshot := self._snapshot(name)) is None:
            raise refusal(400, f"Snapshot {name} not found. Did you add it?")
        if snapshot["state"] != "active":
            raise refusal(400, f"Snapshot {name} is {snapshot['state']}")

    async def fill(self, box: Sandbox, name: str) -> None:
        """Give a new sandbox the snapshot's files."""
        if (snapshot := self._snapshot(name)) is not None:
            await replay(box, self._steps(snapshot["asked"]["buildInfo"]))

    def _snapshot(self, id_or_name: str) -> dict[str, Any] | None:
        found = (one for one in self.snapshots.all() if id_or_name in (one["id"], one["name"]))
        return next(found, None)

    def _known_snapshot(self, request: web.Request) -> dict[str, Any]:
        self._check_key(request)
        snapshot = self._snapshot(request.match_info["snapshot"])
        if snapshot is None:
            raise refusal(404, f"Snapshot {request.match_info['snapshot']} not found")
        return snapshot

    def _check_key(self, request: web.Request) -> None:
        if not request.headers.get("Authorization", "").removeprefix("Bearer").strip():
            raise refusal(401, "Invalid credentials")

    # -- build contexts ---------------------------------------------------------------------------

    async def _push_access(self, request: web.Request) -> web.StreamResponse:
        self._check_key(request)
        return web.json_response({
            "accessKey": "k", "secret": "s", "sessionToken": "t", "bucket": BUCKET,
            "storageUrl": str(request.url.origin() / "s3"), "organizationId": ORGANIZATION,
            "region": "local",
        })  # fmt: skip

    async def _head_context(self, request: web.Request) -> web.StreamResponse:
        path = self.contexts / request.match_info["hash"]
        if not path.exists():
            return web.Response(status=404)
        headers = {"ETag": '"e"', "Last-Modified": "Sun, 01 Nov 2026 00:00:00 GMT"}
        return web.Response(headers={**headers, "Content-Length": str(path.stat().st_size)})

    async def _post_context(self, request: web.Request) -> web.StreamResponse:
        """Begin or complete an upload in parts."""
        if "uploads" in request.query:
            upload = uuid4().hex
            self._parts[upload] = {}
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        parts = self._parts.pop(request.query["uploadId"])
        data = b"".join(parts[number] for number in sorted(parts))
        self._keep_context(request.match_info["hash"], data)
        return _xml("CompleteMultipartUploadResult", '<Location>l</Location><ETag>"e"</ETag>')

    async def _put_context(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        if "partNumber" in request.query:
            self._parts[request.query["uploadId"]][int(request.query["partNumber"])] = data
        else:
            self._keep_context(request.match_info["hash"], data)
        return web.Response(headers={"ETag": '"e"'})

    def _keep_context(self, name: str, data: bytes) -> None:
        draft = self.contexts / f".{uuid4().hex}"
        draft.write_bytes(data)
        draft.replace(self.contexts / name)


def _xml(name: str, inside: str) -> web.Response:
    text = f'<?xml version="1.0"?><{name}><Bucket>{BUCKET}</Bucket><Key>k</Key>{inside}</{name}>'
    return web.Response(text=text, content_type="application/xml")


def _shown(snapshot: dict[str, Any]) -> dict[str, Any]:
    asked = snapshot["asked"]
    return {
        "id": snapshot["id"], "organizationId": ORGANIZATION, "general": False,
        "name": snapshot["name"], "imageName": asked.get("imageName"), "state": snapshot["state"],
        "size": None, "entrypoint": None, "cpu": asked.get("cpu") or 1, "gpu": 0,
        "mem": asked.get("memory") or 1, "disk": asked.get("disk") or 3,
        "errorReason": snapshot["reason"], "createdAt": iso(snapshot["created"]),
        "updatedAt": iso(snapshot["updated"]), "lastUsedAt": None, "sourceSandboxId": None,
    }  # fmt: skip
