"""Checks of the processes of a cluster, as `hearth status` sees them: is one lost?"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from services.cli.doctor.check import Check
from services.cli.fleet.fleet_poll import open_poll
from services.cli.fleet.recent_faults import day_text, rejections_text, restarts_text
from services.cli.fleet.report import FleetReport
from services.cli.fleet.times import since
from services.local.processes.supervision_log import Restarts
from shared.clock import MonotonicClock
from shared.errors import HearthError
from shared.fleet.fleet_view import ProcessView
from shared.fleet.read_fleet import ServerView
from shared.lifecycle.health import HEARTBEAT_INTERVAL_S

FIRST_BEAT_TIMEOUT_S = 3.0
FIRST_POLL_S = 4 * HEARTBEAT_INTERVAL_S
RESTART = "end the process (kill -9): `hearth up` or its service manager starts it again."
ADVICE = {
    "silent": f"It is frozen, or its machine or network is away. If it is frozen, {RESTART}",
    "gone": "It has ended, or its connection was cut. If nothing starts it again, start it.",
    "stuck": f"Its engine makes no step. After a look at its log, {RESTART}",
    "doubled": "Two processes have this id: end one of them.",
}
REJECTED_ADVICE = (
    "`hearth status` shows the gateways; codes: services/gateway/dialects/API.md#errors-by-code."
)
RESTARTED_ADVICE = "`hearth logs up` shows how each ended, `hearth logs PROCESS` what it did."
MODEL_ADVICE = "Remove it (`hearth model remove`), or mend its source and add it again. Its host:"
SERVER_ADVICE = "The gateway cannot use it: see its log and the address that the gateway has."


async def processes_checks(nats_url: str, *, timeout_s: float, has_gateway: bool) -> list[Check]:
    """Returns the checks of all processes at a NATS. `has_gateway`: another check asks the gateway
    whether it is ready.
    """
    try:
        async with open_poll(nats_url, MonotonicClock(), timeout_s=timeout_s) as poll:
            report = await poll.first_report(FIRST_POLL_S, FIRST_BEAT_TIMEOUT_S)
    except HearthError as error:
        return [Check("processes", "fail", error.message, "Start a cluster: `hearth up`.")]
    return list(report_checks(report, time.time(), has_gateway=has_gateway))


def report_checks(report: FleetReport, wall_s: float, *, has_gateway: bool) -> Iterator[Check]:
    """Yields a check for each lost process, and one for the others."""
    lost = [each for each in report.rows if each.is_lost and not each.has_stopped]
    for row in lost:
        yield _lost_check(row, wall_s)
    if report.gateway_id is None:
        yield Check(
            "processes",
            "warn",
            "no gateway answers: processes lost before are unknown",
            "Run `hearth status`, and see the log of a gateway.",
        )
        return
    if not lost:
        yield Check("processes", "ok", f"{len(report.rows)}, none is lost")
    for model in (each for each in report.models if each.has_failed):
        text = f"{model.name} failed on {model.host_id}: {model.failure or 'no reason is known'}"
        yield Check("models", "fail", text, f"{MODEL_ADVICE} `hearth logs {model.host_id}`.")
    for name, server in (("Redis", report.redis), ("NATS", report.nats)):
        yield from _server_checks(report.gateway_id, name, server, wall_s)
    yield from _rejected_checks(report, wall_s)
    if report.unready and not has_gateway:
        text = f"{report.gateway_id} is not ready: {report.unready}"
        yield Check("gateway", "fail", text, f"`hearth logs {report.gateway_id}` shows more.")


def _lost_check(row: ProcessView, wall_s: float) -> Check:
    when = since(row.state_age_s, wall_s)
    text = f"{row.process_id} is lost ({row.state}){f' since {when}' if when else ''}"
    advice = ADVICE.get(row.state, RESTART.capitalize())
    return Check("processes", "fail", text, f"{advice} Its log: `hearth logs {row.process_id}`.")


def restarts_check(restarts: Sequence[Restarts], wall_s: float) -> Iterator[Check]:
    """Yields one check if processes of a local cluster were started again within the last hour."""
    if restarts:
        text = f"within the last hour: {restarts_text(restarts, wall_s)}"
        yield Check("restarts", "warn", text, RESTARTED_ADVICE)


def _rejected_checks(report: FleetReport, wall_s: float) -> Iterator[Check]:
    """Yields a warning for lately rejected requests; those of the day are past, and no fault."""
    if report.rejected:
        text = f"rejected within 15 minutes: {rejections_text(report.rejected)}"
        yield Check("requests", "warn", text, REJECTED_ADVICE)
    if report.rejected_day:
        text = f"rejected within 24 hours: {day_text(report.rejected_day, wall_s)}"
        yield Check("requests", "ok", text)


def _server_checks(
    gateway_id: str, name: str, server: ServerView, wall_s: float
) -> Iterator[Check]:
    if server.is_sound or server.state == "unknown":
        return
    when = since(server.for_s, wall_s)
    text = f"{server.state} for {gateway_id}{f' since {when}' if when else ''}"
    yield Check(name, "fail", text, SERVER_ADVICE)
