"""prepare_calibration, load_calibration_rows, conclude_calibration, choose_twins,
report_calibration: the activities of `perdure.rollouts.calibration`."""

from temporalio import activity

from activities.activity_context import RunningActivityAttempt
from activities.activity_decorator import shell
from perdure.rollouts.activity_messages import (
    CalibrationPage,
    CalibrationPart,
    CalibrationSummary,
    Conclusion,
    PreparedRun,
    RowToConclude,
    RowTwins,
)
from perdure.rollouts.calibration import calibration_stages
from perdure.rollouts.calibration.twin_calibration import choose
from perdure.rollouts.stage_services import Services
from perdure.types import CalibrationRequest


class Calibrations:
    def __init__(self, services: Services) -> None:
        self.services = services

    @shell("prepare_calibration")
    async def prepare(self, request: CalibrationRequest) -> PreparedRun:
        return await calibration_stages.prepare(self.services, request)

    @shell("load_calibration_rows")
    async def load(self, part: CalibrationPart) -> CalibrationPage:
        return await calibration_stages.load_part(self.services.store, part)

    @shell("conclude_calibration")
    async def conclude(self, row: RowToConclude) -> Conclusion:
        return await calibration_stages.conclude(self.services.store, row)

    @shell("choose_twins")
    async def twins(self, row: RowToConclude) -> RowTwins:
        owner = activity.info().workflow_id or ""
        return await choose(self.services, row, RunningActivityAttempt(), owner)

    @shell("report_calibration")
    async def report(self, request: CalibrationRequest) -> CalibrationSummary:
        return await calibration_stages.report(self.services.store, request)
