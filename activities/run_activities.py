"""prepare_run, load_page, record_change, finish_run: the activities of `perdure.rollouts.run_pages` and
`run_record`."""

from activities.activity_decorator import shell
from perdure.rollouts.activity_messages import Page, PageRequest, PreparedRun
from perdure.rollouts.run_pages import finish_run, load_page, prepare_run
from perdure.rollouts.run_record import record
from perdure.rollouts.stage_services import Services
from perdure.types import RunRequest, RunSummary


class Runs:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("prepare_run")
    async def prepare(self, run: RunRequest) -> PreparedRun:
        return await prepare_run(self.services, run)

    @shell("load_page")
    async def page(self, request: PageRequest) -> Page:
        return await load_page(self.services.store, request)

    @shell("record_change")
    async def record(self, run: RunRequest) -> None:
        await record(self.services.store, run)

    @shell("finish_run")
    async def finish(self, run: RunRequest) -> RunSummary:
        return await finish_run(self.services.store, run)
