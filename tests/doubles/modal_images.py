"""Images of the Modal double: pulled, built from Dockerfiles, and the files of build contexts.

Nobody observed the service for this. Assumed, and to be checked with an account:
- an image's id depends on its definition alone: an equal one joins the build or gets its image;
- a build that failed is started again by the next ImageGetOrCreate;
- a build goes on when its caller is gone, and nothing can end it;
- a failed command is GENERIC_STATUS_FAILURE without an exception, and its output is in the log of the
  task that `ImageBuildChainGet` names, one entry for each line;
- a build that Modal ends is GENERIC_STATUS_TERMINATED;
- an image that cannot be pulled is a failed result of ImageGetOrCreate, an unknown `im-` NOT_FOUND;
- builds are not counted among the creates, and have the internet.
A build runs the `RUN` lines of a Dockerfile in one box, which has neither the base image nor the
context. Its sandboxes do not have what the lines wrote.
"""

import asyncio
import hashlib
import re
import time
from pathlib import Path
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from grpclib import GRPCError, Status
from grpclib.server import Stream
from modal_proto import api_pb2

from perdure.sandboxes.base import SandboxSpec
from tests.doubles.fault_rules import met_rule
from tests.doubles.service_double import Double, Records

RESULT = api_pb2.GenericResult
RUN = re.compile(r"^RUN\s+(.*)", re.IGNORECASE)

Request = Any
"""A message of the service's protocol."""


class ModalImages(Double):
    """The calls about images. Records: `images` by id, `files` by digest, `mounts` by id."""

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self.images = Records(state / "images")
        self.files = Records(state / "files")
        self.mounts = Records(state / "mounts")
        self._building: dict[str, asyncio.Task[None]] = {}

    async def end_builds(self) -> None:
        for task in self._building.values():
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)

    # -- build contexts ---------------------------------------------------------------------------

    async def _mount_batched_check_existence(self, request: Request) -> Any:
        missing = [one for one in request.sha256_hex_hashes if self.files.read(one) is None]
        return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    async def _mount_put_file(self, request: Request) -> Any:
        if hashlib.sha256(request.data).hexdigest() != request.sha256_hex:
            raise GRPCError(Status.INVALID_ARGUMENT, "wrong digest")
        self.files.write(request.sha256_hex, len(request.data))
        return api_pb2.MountPutFileResponse(exists=True)

    async def _mount_get_or_create(self, request: Request) -> Any:
        found = {one.filename: one.sha256_hex for one in request.files}
        digest = hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()
        self.mounts.write(f"mo-{digest[:22]}", found)
        shown = api_pb2.MountHandleMetadata(content_checksum_sha256_hex=digest)
        return api_pb2.MountGetOrCreateResponse(mount_id=f"mo-{digest[:22]}", handle_metadata=shown)

    # -- builds -----------------------------------------------------------------------------------

    async def _image_get_or_create(self, request: Request) -> Any:
        asked = request.image
        digest = hashlib.sha256(asked.SerializeToString(deterministic=True)).hexdigest()
        identity = f"im-{digest[:22]}"
        found = self.images.read(identity)
        if found is None or found["status"] > RESULT.GENERIC_STATUS_SUCCESS:
            lines = list(asked.dockerfile_commands)
            runs = 0 if found is None else found["runs"]
            found = {"lines": lines, "runs": runs, "exception": "", "log": []}
            found |= {"status": RESULT.GENERIC_STATUS_UNSPECIFIED, "started": time.time()}
            if any("no-such-image" in line for line in lines):
                found |= {"status": RESULT.GENERIC_STATUS_FAILURE, "exception": "image not found"}
            elif not any(RUN.match(line) for line in lines):
                found |= {"status": RESULT.GENERIC_STATUS_SUCCESS}
            self.images.write(identity, found)
        return api_pb2.ImageGetOrCreateResponse(
            image_id=identity, result=_result(found), metadata=api_pb2.ImageMetadata()
        )

    async def _image_from_id(self, request: Request) -> Any:
        self._image(request.image_id)
        return api_pb2.ImageFromIdResponse(
            image_id=request.image_id, metadata=api_pb2.ImageMetadata()
        )

    async def _image_join_streaming(self, request: Request, stream: Stream[Any, Any]) -> None:
        """Send the log from the entry that was read last. The last message has the result."""
        end, rule = time.monotonic() + request.timeout, met_rule.get()
        at = int(request.last_entry_id or 0)
        self._build_later(request.image_id)
        while True:
            image = self._image(request.image_id)
            for line in image["log"][at:]:
                at += 1
                logs = [api_pb2.TaskLogs(data=line)]
                sent = api_pb2.ImageJoinStreamingResponse(task_logs=logs, entry_id=str(at))
                await stream.send_message(sent)
                if rule is not None and rule.stream == "cut":
                    stream._stream.connection._transport.abort()
                    raise asyncio.CancelledError
            if image["status"] or time.monotonic() > end:
                break
            await asyncio.sleep(0.01)
        if image["status"]:
            await stream.send_message(api_pb2.ImageJoinStreamingResponse(result=_result(image)))

    def _image(self, identity: str) -> dict[str, Any]:
        found: dict[str, Any] | None = self.images.read(identity)
        if found is None:
            raise GRPCError(Status.NOT_FOUND, f"Image {identity} not found")
        return found

    def _build_later(self, identity: str) -> None:
        """Start the build, unless it runs or is over. A server that was killed starts it again."""
        if identity not in self._building and not self._image(identity)["status"]:
            self._building[identity] = asyncio.create_task(self._build(identity))
            self._building[identity].add_done_callback(lambda _: self._building.pop(identity))

    async def _build(self, identity: str) -> None:
        image = self._image(identity)
        image |= {"log": [], "runs": image["runs"] + 1}
        self.images.write(identity, image)
        rule = met_rule.get()
        if rule is not None and rule.kill:
            self.images.write(identity, {**image, "status": RESULT.GENERIC_STATUS_TERMINATED})
            return
        name, status = f"build-{identity[3:]}", RESULT.GENERIC_STATUS_SUCCESS
        box = await self.guests.create(SandboxSpec("/root", ttl_s=3600), name)
        try:
            for line in image["lines"]:
                if (run := RUN.match(line)) is None:
                    image["log"].append(f"=> {line}\n")
                    continue
                done = await box.exec(["sh", "-c", f"exec 2>&1\n{run[1]}"])
                image["log"] += done.stdout.decode().splitlines(keepends=True)
                if not done.status.ok:
                    status = RESULT.GENERIC_STATUS_FAILURE
                    image["log"].append(f"exit code {done.status.code}\n")
                    break
                self.images.write(identity, image)
        finally:
            await self.guests.kill(name)
        self.images.write(identity, {**image, "status": status, "finished": time.time()})

    # -- logs -------------------------------------------------------------------------------------

    async def _image_build_chain_get(self, request: Request) -> Any:
        image = self._image(request.image_id)
        step = api_pb2.ImageBuildStep(
            image_id=request.image_id,
            started_at=_timestamp(image["started"]),
            finished_at=_timestamp(image.get("finished", time.time())),
            builder_app_id="ap-builder",
            builder_task_id=f"ta-{request.image_id}",
        )
        return api_pb2.ImageBuildChainGetResponse(build_steps=[step])

    async def _app_fetch_logs(self, request: Request) -> Any:
        image = self._image(request.task_id.removeprefix("ta-"))
        items = [api_pb2.TaskLogs(data=line) for line in image["log"][-request.limit :]]
        batch = api_pb2.TaskLogsBatch(task_id=request.task_id, items=items)
        return api_pb2.AppFetchLogsResponse(batches=[batch])


def _result(image: dict[str, Any]) -> Any:
    return RESULT(status=image["status"], exception=image["exception"])


def _timestamp(seconds: float) -> Timestamp:
    shown = Timestamp()
    shown.FromNanoseconds(int(seconds * 1e9))
    return shown
