"""Waits until a local gateway knows every worker."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Collection, Mapping

import httpx
import msgspec

from shared.clock import Clock
from shared.transport.wire_errors import UNREADABLE

POLL_S = 0.1  # each poll takes 2.5 ms of CPU from processes that start
SHOWN_S = 30.0  # between two reports of what is missing
_ROLES = ("encode", "prefill", "decode")
Workers = Mapping[str, Collection[str]]  # process ids by role


async def wait_until_ready(
    url: str,
    operator_token: str,
    expected: Workers,
    clock: Clock,
    *,
    trust: ssl.SSLContext | None,
    on_ready: Callable[[str], None],
    on_missing: Callable[[Collection[str], bool], None],
) -> None:
    """Returns once the gateway is ready and has all `expected` workers. Calls `on_ready` with each
    worker as it joins, and `on_missing` every SHOWN_S with those that have not, and whether the
    gateway has answered. `trust`: of an HTTPS gateway.
    """
    waiting = {each for ids in expected.values() for each in ids}
    headers = {"authorization": f"Bearer {operator_token}"}  # shows names of processes
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=2.0, trust_env=False, verify=trust or True
    ) as client:
        shown = clock.now()
        while True:
            known = await _readiness(client)
            workers = known.workers
            missing = {
                each for role, ids in expected.items() for each in ids if each not in workers[role]
            }
            for process_id in sorted(waiting - missing):
                on_ready(process_id)
            waiting = missing
            if known.is_ready and not waiting:
                return
            if clock.now() - shown >= SHOWN_S:
                shown = clock.now()
                on_missing(waiting, known.has_answered)
            await clock.sleep(POLL_S)


class _Readiness(msgspec.Struct):
    has_answered: bool
    is_ready: bool
    workers: Mapping[str, Collection[str]]


async def _readiness(client: httpx.AsyncClient) -> _Readiness:
    """Returns whether the gateway is ready, and the workers that it knows, by role."""
    try:
        response = await client.get("/ready")
        workers = msgspec.json.decode(response.content).get("workers") or {}
    except (httpx.HTTPError, AttributeError, *UNREADABLE):
        return _Readiness(False, False, dict.fromkeys(_ROLES, ()))
    known = {role: set(workers.get(role) or ()) for role in _ROLES}
    return _Readiness(True, response.status_code == 200, known)
