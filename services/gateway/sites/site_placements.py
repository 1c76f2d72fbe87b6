"""The requests of other sites that this gateway has taken over, as a worker has placements. No I/O.

    taken ──tokens──▶ taken ──last finish──▶ ended ──AckFinished──▶ forgotten
      └──AbortRequest, no state of the owner's gateway for ORPHAN_S──▶ forgotten

The tokens stay here until the gateway that owns the request has acknowledged the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from services.gateway.streams.receiver import StreamEnd
from shared.allowance import has_place
from shared.errors import HearthError, WorkerBusy
from shared.messages import (
    Finish,
    Request,
    Served,
    StartDecode,
    TokenBatch,
    TokenEntry,
    TokenLogprobs,
)
from shared.output.output_buffer import Output, OutputBuffer, apart
from shared.packing import TOKEN_ID_BYTES
from shared.subjects import site_in
from shared.telemetry.timeline import Move
from shared.transport.bus import failure_of

ORPHAN_S = 5.0  # the states of five seconds: a link that is cut for less costs a resend
UNACKNOWLEDGED_S = 30.0
RESEND_S = 2.0


@dataclass(eq=False, slots=True)
class SitePlacement:
    """A request here, `request_id`, for the gateway `gateway_id` of another site, which knows this
    gateway as `worker_id`.
    """

    placement_id: bytes
    gateway_id: str
    worker_id: str
    request_id: str
    sent_at: float
    outputs: dict[int, Output] = field(default_factory=dict)
    ended_at: float = inf


class SitePlacements:
    def __init__(
        self,
        on_update: Callable[[], None],
        max_held: int,
        is_waiting: Callable[[str], bool] = lambda request_id: False,
    ) -> None:
        """`on_update` is called when entries wait to be taken. `max_held` limits the requests,
        those included whose end is not acknowledged. `is_waiting` says whether a request waits for
        room here.
        """
        self._max_held = max_held
        self._is_waiting = is_waiting
        self._buffer = OutputBuffer()
        self._placements: dict[bytes, SitePlacement] = {}
        self._num_of_site = Counter[str]()
        self._on_update = on_update

    def __contains__(self, placement_id: bytes) -> bool:
        return placement_id in self._placements

    def __len__(self) -> int:
        """Returns the number of requests that have not ended."""
        return sum(each.ended_at == inf for each in self._placements.values())

    def open(
        self,
        command: StartDecode,
        request: Request,
        worker_id: str,
        now: float,
        *,
        on_computed: Callable[[], None] = lambda: None,
    ) -> SiteReceiver:
        """Opens the outputs of `command`, which `request` is here. Returns their receiver, which
        calls `on_computed` once a worker has computed the prompt. Raises as `check_room` does.
        """
        placement_id, owner = command.placement_id, command.request.gateway_id
        self.check_room(owner)
        placement = SitePlacement(placement_id, owner, worker_id, request.request_id, now)
        for choice in request.choices:
            first_position = len(choice.output_token_ids) // TOKEN_ID_BYTES
            placement.outputs[choice.choice_index] = self._buffer.open(
                placement_id,
                owner,
                choice.choice_index,
                first_position,
                region_class=request.region_class,
            )
        self._placements[placement_id] = placement
        self._num_of_site[_site_of(owner)] += 1
        return SiteReceiver(placement, self._buffer, self._on_update, on_computed)

    def check_room(self, gateway_id: str) -> None:
        """Raises WorkerBusy if there are as many requests of the gateway's site as may be."""
        num_own, num_all = self._num_of_site[_site_of(gateway_id)], len(self._placements)
        if not has_place(num_own, num_all, self._max_held):
            raise WorkerBusy("this gateway serves as many requests of other sites as it may")

    def close(self, placement_id: bytes) -> str | None:
        """Forgets a placement. Returns its request, or None if it is unknown."""
        self._buffer.drop(placement_id)
        placement = self._placements.pop(placement_id, None)
        if placement is None:
            return None
        self._num_of_site[_site_of(placement.gateway_id)] -= 1
        return placement.request_id

    def close_choice(self, placement_id: bytes, choice_index: int) -> str | None:
        """Drops one choice, whose next tokens end it. Returns the request to close if no other is
        left.
        """
        self._buffer.drop_choice(placement_id, choice_index)
        return None if placement_id in self._buffer else self.close(placement_id)

    def resend(
        self, placement_id: bytes, choice_index: int, from_position: int, region_class: str = ""
    ) -> tuple[str, TokenEntry]:
        """Returns the worker's name and the output from a position on. Raises UnknownPlacement."""
        placement = self._placements.get(placement_id)
        is_waiting = placement is not None and self._is_waiting(placement.request_id)
        entry = self._buffer.resend(
            placement_id, choice_index, from_position, region_class, is_waiting=is_waiting
        )
        return self._placements[placement_id].worker_id, entry

    def take(self, now: float) -> Iterator[tuple[str, TokenBatch]]:
        """Yields gateways, and new entries under the names that they have for this one."""
        for (gateway_id, region_class), entries in self._buffer.take().items():
            by_worker: dict[str, list[TokenEntry]] = {}
            for entry in entries:
                placement = self._placements[entry.placement_id]
                placement.sent_at = now
                if entry.finish is not None and _has_ended(placement):
                    placement.ended_at = min(placement.ended_at, now)
                by_worker.setdefault(placement.worker_id, []).append(entry)
            for worker_id, of_worker in by_worker.items():
                for each in apart(of_worker):
                    yield (
                        gateway_id,
                        TokenBatch(
                            worker_id=worker_id, entries=tuple(each), region_class=region_class
                        ),
                    )

    def overdue(self, heard_at: Callable[[str], float], now: float) -> list[bytes]:
        """Returns the placements whose gateway is silent, or does not acknowledge the end.
        `heard_at` returns when a gateway has last sent its state.
        """
        return [
            placement_id
            for placement_id, each in self._placements.items()
            if now - heard_at(each.gateway_id) > ORPHAN_S or now - each.ended_at > UNACKNOWLEDGED_S
        ]

    def gateways(self) -> set[str]:
        """Returns the gateways with placements here."""
        return {each.gateway_id for each in self._placements.values()}

    def resend_overdue(self, now: float) -> None:
        """Sends again what has had no update for RESEND_S: the message may have been lost."""
        for placement_id, each in self._placements.items():
            if now - each.sent_at >= RESEND_S:
                each.sent_at = now
                is_waiting = self._is_waiting(each.request_id)
                self._buffer.resend_overdue(placement_id, is_waiting=is_waiting)
                self._on_update()


class SiteReceiver:
    """A stream's `Receiver` that keeps the tokens for the gateway of another site."""

    def __init__(
        self,
        placement: SitePlacement,
        buffer: OutputBuffer,
        on_update: Callable[[], None],
        on_computed: Callable[[], None],
    ) -> None:
        self._placement = placement
        self._outputs = placement.outputs
        self._buffer = buffer
        self._on_update = on_update
        self._on_computed = on_computed

    def on_tokens(
        self, choice_index: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> bool:
        output = self._outputs[choice_index]
        self._buffer.add(output, tuple(token_ids), logprobs=tuple(logprobs))
        self._on_update()
        return not output.is_dropped

    def on_served(self, choice_index: int, served: Served) -> None:
        self._on_computed()
        output = self._outputs[choice_index]
        if output.served is None:
            output.served = served

    def on_moved(self, move: Move) -> None:
        pass

    def on_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Keeps them with the first choice alone, as a worker does: they may take 64 MB."""
        output = next(iter(self._outputs.values()))
        self._buffer.add(output, (), prompt_logprobs=tuple(logprobs))
        self._on_update()

    def on_finish(self, choice_index: int, finish: Finish) -> None:
        self._buffer.add(self._outputs[choice_index], (), finish)
        self._on_update()

    def on_end(self, end: StreamEnd) -> None:
        """Sends the error of a request that ended here to the owner, which may place it again."""
        if end.error is None:
            return
        error = end.error
        if type(error) is HearthError:
            error = WorkerBusy("the request failed at another site")
        for output in self._outputs.values():
            if output.finish is None:
                served = output.served or Served(num_cached_tokens=0, prefill_worker_id=None)
                finish = Finish(reason="failed", served=served, failure=failure_of(error))
                self._buffer.add(output, (), finish)
        self._on_update()


def _site_of(gateway_id: str) -> str:
    return site_in(gateway_id) or ""


def _has_ended(placement: SitePlacement) -> bool:
    outputs = placement.outputs.values()
    return all(each.finish is not None or each.is_dropped for each in outputs)
