"""capture_diff: take the diff as bytes, then let sandbox A go."""

import hashlib
import signal

from activities import checkpoints
from activities.admission import Admission, grade_step
from activities.boot_sandbox import BootRecord, sandbox_of
from activities.grade import needs_tests
from activities.messages import AgentRun, Attempt, Captured
from activities.services import Services
from activities.shell import shell
from perdure.agents.base import EXEC_ID
from perdure.errors import NotFound, SandboxLost
from perdure.graders import patch
from perdure.sandboxes.base import Sandbox
from perdure.sandboxes.phases import Place
from perdure.storage import keys
from perdure.types import PatchRef


class CaptureDiff:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("capture_diff")
    async def capture(self, attempt: Attempt) -> Captured:
        folder = keys.attempt(attempt.request, attempt.attempt)
        found = await checkpoints.read(self.services.store, f"{folder}/patch.json", PatchRef)
        if found is None:
            found = await self._take(attempt, folder)
        # Released at once after the run: grading needs the room, and gets a fresh one.
        identity = await sandbox_of(self.services, attempt)
        place = await self.services.place(attempt.request, "agent")
        await self.services.provider(place.provider).kill(identity)
        await self.services.ready.forget(identity)
        return Captured(
            size=found.size,
            files=found.files,
            empty=found.empty,
            too_large=found.too_large,
            waits_for=await self._hand_over(attempt, place, found),
        )

    async def _hand_over(self, attempt: Attempt, place: Place, patch: PatchRef) -> str:
        """The agent's slot of the account goes to the grading, or back. Returns what to wait for."""
        request = attempt.request
        grading = await self.services.place(request, "grade")
        mine = Admission(self.services, place.provider, request)
        next_ = Admission(self.services, grading.provider, request)
        if not (mine.metered or next_.metered):
            return ""
        wanted = next_.metered and await self._will_be_tested(attempt, patch)
        if not wanted or next_.account != mine.account:
            await mine.release()
        if not wanted:
            return ""
        await next_.ask(grade_step(attempt))
        return grade_step(attempt)

    async def _will_be_tested(self, attempt: Attempt, patch: PatchRef) -> bool:
        folder = keys.attempt(attempt.request, attempt.attempt)
        run = await checkpoints.read(self.services.store, f"{folder}/agent.json", AgentRun)
        failed = run is None or run.end.is_error()
        return not failed and needs_tests(self.services, attempt.request, patch)

    async def _take(self, attempt: Attempt, folder: str) -> PatchRef:
        sandbox = await self._attach(attempt)
        # Nothing of the agent may race the capture.
        await sandbox.signal(EXEC_ID, signal.SIGKILL)
        boot = await checkpoints.read(self.services.store, f"{folder}/sandbox.json", BootRecord)
        captured = await patch.capture(sandbox, boot.base_git if boot else None)
        key = f"{folder}/patch.diff"
        if not await self.services.store.put_if_absent(key, captured.data):
            captured = captured.with_data((await self.services.store.get(key)).data)
        ref = PatchRef(
            key=key,
            sha256=hashlib.sha256(captured.data).hexdigest(),
            size=len(captured.data),
            empty=not captured.data,
            files=captured.files,
            ignored_files=captured.ignored_files,
            too_large=captured.too_large,
        )
        return await checkpoints.write(self.services.store, f"{folder}/patch.json", ref)

    async def _attach(self, attempt: Attempt) -> Sandbox:
        identity = await sandbox_of(self.services, attempt)
        try:
            place = await self.services.place(attempt.request, "agent")
            return await self.services.provider(place.provider).attach(identity)
        except NotFound as error:
            raise SandboxLost(f"sandbox {identity} is gone before its diff was taken") from error
