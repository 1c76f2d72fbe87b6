"""Whether any live worker may decode a request, with room for it or without; else the error."""

from __future__ import annotations

from collections.abc import Collection

import structlog

from services.scheduler.backlog import QueuedRequest
from services.scheduler.decode_starts import DecodeStarts
from services.scheduler.fleet import WorkerFleet
from services.scheduler.placement import RequestSize
from services.scheduler.request_queues import num_context_tokens
from shared.errors import NoCapableWorker, NoCapacity
from shared.messages import Request
from shared.packing import TOKEN_ID_BYTES

log = structlog.get_logger(__name__)

RETRY_AFTER_S = 2.0
# Many requests may be as long as the context, and end much sooner.
MAX_GROWTH_TOKENS = 1024


def size_of(ticket: QueuedRequest) -> RequestSize:
    request = ticket.request
    num_prompt_tokens = len(request.prompt_token_ids) // TOKEN_ID_BYTES
    num_output_tokens = sum(
        len(choice.output_token_ids) // TOKEN_ID_BYTES for choice in request.choices
    )
    return RequestSize(
        num_prompt_tokens,
        num_prompt_tokens + num_output_tokens,
        num_context_tokens=num_context_tokens(request),
        affinity_key=ticket.submit.affinity_key,
        allowed_regions=request.allowed_regions,
        features=request.needs,
        is_from_site=bool(request.origin_site),
        num_room_tokens=_num_room_tokens(request) if ticket.submit.is_move else 0,
    )


def _num_room_tokens(request: Request) -> int:
    """Returns the tokens for which another worker has free blocks if a request moves to it: all
    that it has, and those to come, as far as MAX_GROWTH_TOKENS of each choice.
    """
    most, outputs = request.sampling.max_tokens, (e.output_token_ids for e in request.choices)
    lengths = (len(each) // TOKEN_ID_BYTES for each in (request.prompt_token_ids, *outputs))
    num_prompt_tokens, *num_output_tokens = lengths
    ends = (min(each + MAX_GROWTH_TOKENS, most) for each in num_output_tokens)
    return num_prompt_tokens + sum(ends)


class Candidates:
    def __init__(self, workers: WorkerFleet, starts: DecodeStarts) -> None:
        self._workers = workers
        self._starts = starts

    def has_any(self, ticket: QueuedRequest, now: float) -> bool:
        """Whether a worker in the allowed regions, with what the request needs, can decode. Others
        are never tried.
        """
        excluded = self._starts.excluded(ticket, now)
        return self._has_worker(ticket, num_context_tokens(ticket.request), excluded)

    def has_local(self, ticket: QueuedRequest, now: float) -> bool:
        """Whether such a worker is one of this site."""
        excluded = self._starts.excluded(ticket, now)
        size = num_context_tokens(ticket.request)
        return self._has_worker(ticket, size, excluded, is_local=True)

    def is_left_to_sites(self, ticket: QueuedRequest, now: float) -> bool:
        """Whether workers of this site could serve it, but its gateway has excluded them all."""
        if not ticket.submit.excluded_workers or self.has_local(ticket, now):
            return False
        others = self._starts.closed(now) | ticket.unfit_workers
        size = num_context_tokens(ticket.request)
        return self._has_worker(ticket, size, others, is_local=True)

    def has_excluded(self, ticket: QueuedRequest) -> bool:
        """Whether a live worker could decode the request if none were excluded: for a request
        without a worker, such a worker is never tried for it.
        """
        return self._has_worker(ticket, num_context_tokens(ticket.request), excluded=())

    def is_too_long(self, ticket: QueuedRequest, now: float) -> bool:
        """Whether some worker could decode a shorter request, asked of a request without one."""
        return self._has_worker(ticket, 0, self._starts.excluded(ticket, now))

    def error(self, ticket: QueuedRequest, now: float) -> NoCapacity:
        """Returns the error of a request without a worker."""
        if not self.is_too_long(ticket, now):
            has_capable = self._has_worker(ticket, 0, excluded=())
            return _unserved(ticket.request, has_capable=has_capable)
        size = num_context_tokens(ticket.request)
        message = f"no live worker's context holds {size} tokens"
        return NoCapacity(message, retry_after_s=RETRY_AFTER_S)

    def _has_worker(
        self,
        ticket: QueuedRequest,
        num_tokens: int,
        excluded: Collection[str],
        *,
        is_local: bool = False,
    ) -> bool:
        queue = ticket.queue
        return self._workers.has_worker(
            queue.served,
            excluded,
            queue.regions,
            num_context_tokens=num_tokens,
            features=queue.needs,
            is_local=is_local or bool(ticket.request.origin_site),
        )


def _unserved(request: Request, *, has_capable: bool) -> NoCapacity:
    """Returns the error of a request that no live worker serves. With `has_capable` a worker has
    what the request needs, but is excluded.

    The log is the audit record of data residency: it names the rejected request, and no prompt.
    """
    where = ""
    if request.allowed_regions:
        of_class = f" of the class {request.region_class!r}" if request.region_class else ""
        where = f" in the allowed regions{of_class} ({', '.join(request.allowed_regions)})"
        log.warning(
            "no_worker_in_allowed_regions",
            request=request.request_id,
            tenant=request.tenant_id,
            model=request.model,
            regions=request.allowed_regions,
        )
    if not has_capable and request.needs:
        needs = ", ".join(request.needs)
        message = f"no live worker{where} of {request.model!r} has {needs}"
        return NoCapableWorker(message, retry_after_s=RETRY_AFTER_S)
    message = f"no worker{where} serves {request.model!r} now"
    return NoCapacity(message, retry_after_s=RETRY_AFTER_S)
