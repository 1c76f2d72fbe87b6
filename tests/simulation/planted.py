"""Plants bugs into the real code, to check that the simulation finds them.

`python -m tests.simulation.planted` searches from seed 0 for the first seed that shows each bug,
and prints it: a seed's meaning changes with the code that draws from it. Parts of names select
bugs; `--jobs N` searches for N concurrently. The exit status is 1 if a bug is not found.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any
from unittest.mock import patch

import msgspec

from services.decode.active_handoffs import ActiveHandoffs
from services.decode.handoff import Handoff
from services.gateway.streams import streams
from services.gateway.streams.actions import Actions
from services.gateway.streams.choice_tokens import ChoiceTokens
from services.gateway.streams.stream import Stream
from services.gateway.streams.streams import Streams
from services.kv_index.index import PrefixIndex
from services.kv_index.registry import PrefixRegistry
from services.prefill.service import PrefillService
from services.scheduler.placement import Decision
from services.scheduler.request_queues import RequestQueues
from services.scheduler.worker_table import WorkerTable
from shared import block_hash
from shared.engine.batching.batcher import Batcher
from shared.engine.engine import Engine
from shared.engine.executors.rank_state import RankState
from shared.engine.loop import EngineLoop
from shared.engine.step import PoolingInputs
from shared.errors import HearthError, StepFailed
from shared.kv_wire.expected_pushes import ExpectedPushes
from shared.lifecycle.health import Fleet
from shared.lifecycle.heartbeat import HealthMonitor
from shared.numerics import Numerics
from shared.transport.round_trips import RoundTrips
from tests.simulation.drawing import plan_of
from tests.simulation.planted_hosted import HOSTED_BUGS
from tests.simulation.planted_sites import SITE_BUGS
from tests.simulation.simulation import run_plan
from tests.simulation.sites.simulation import simulate_sites
from tests.simulation.variants import VARIANTS

MAX_SEEDS = 20_000  # within which a search must find a bug


def wrongs_of(variant: str, seed: int) -> list[str]:
    if variant == "sites":
        return simulate_sites(seed).wrongs
    return run_plan(VARIANTS[variant](plan_of(seed))).wrongs


@dataclass(frozen=True)
class Bug:
    name: str
    owner: Any
    attribute: str
    make: Callable[[Any], Any]  # right code -> wrong code
    found_by: int = 0  # the first seed, from 0, that shows it in a second or less
    variant: str = "drawn"

    def wrongs(self, seed: int) -> list[str]:
        return wrongs_of(self.variant, seed)

    @contextmanager
    def planted(self) -> Iterator[None]:
        right = getattr(self.owner, self.attribute)
        with patch.object(self.owner, self.attribute, self.make(right)):
            yield

    @property
    def search(self) -> str:
        """The command that finds the first seed which shows this bug."""
        return f".venv/bin/python -m tests.simulation.planted {shlex.quote(self.name)}"


def _nothing(right: Any) -> Any:
    return lambda *args, **kwargs: None


def _late_tokens_accepted(right: Any) -> Any:
    """Accepts tokens of given-up placements while the request is open."""
    owners: dict[tuple[Streams, bytes], Any] = {}

    def on_token_batch(self: Streams, batch: Any, now: float) -> None:
        for entry in batch.entries:
            stream = self._by_placement.get(entry.placement_id)
            if stream is not None:
                owners[self, entry.placement_id] = stream
            else:
                stream = owners.get((self, entry.placement_id))
                if stream is not None and stream.placement is not None:
                    self._accept(stream, entry, now)
        right(self, batch, now)

    return on_token_batch


def _blocks_freed_in_step(right: Any) -> Any:
    def abort(self: Engine, sequence: Any) -> None:
        sequence.is_in_step = False
        right(self, sequence)

    return abort


def _one_id_for_all_tries(right: Any) -> Any:
    """A late frame of an earlier try is accepted as one of the current try."""

    async def attempt(self: Handoff, worker_id: str, num_held_tokens: int) -> Any:
        class Repeating:
            def bytes(self, num_bytes: int) -> bytes:
                return first

        first = self.__dict__.setdefault("_first_id", self._randomness.bytes(16))
        self._randomness = Repeating()  # type: ignore[assignment]
        return await right(self, worker_id, num_held_tokens)

    return attempt


def _acknowledged_at_once(right: Any) -> Any:
    def accept(self: Streams, stream: Any, entry: Any, now: float) -> None:
        if stream.placement is not None:
            self._actions.acknowledge(stream.placement.worker_id, entry.placement_id)
        right(self, stream, entry, now)

    return accept


def _gaps_overlooked(right: Any) -> Any:
    def accept(self: ChoiceTokens, entry: Any) -> Any:
        if entry.first_position > len(self.token_ids):
            self.token_ids += [0] * (entry.first_position - len(self.token_ids))
        return right(self, entry)

    return accept


def _checksum_not_compared(right: Any) -> Any:
    async def hand_over(
        self: ExpectedPushes, sink: Any, header: Any, payload: Any, sum: int
    ) -> Any:
        return await right(self, sink, header, payload, header.checksum)

    return hand_over


def _root_without_tenant(right: Any) -> Any:
    return lambda tenant_id, digest, **kwargs: right("", digest, **kwargs)


def _bus_always_trusted(right: Any) -> Any:
    return lambda self, now: True


def _exclusion_ignored(right: Any) -> Any:
    return lambda self, excluded: right(self, ())


def _push_never_released(right: Any) -> Any:
    async def deliver(self: PrefillService, request: Any, sequence: Any, push: Any) -> None:
        release = self._worker.loop.engine.release
        self._worker.loop.engine.release = lambda sequence: None  # type: ignore[method-assign]
        try:
            await right(self, request, sequence, push)
        finally:
            self._worker.loop.engine.release = release  # type: ignore[method-assign]

    return deliver


def _shared_block_written(right: Any) -> Any:
    return lambda self, sequence: []


def _impatient(right: Any) -> Any:
    """A hanging scheduler receives its share of the tries for longer than this window."""
    return 2.0


def _pooled_anew(right: Any) -> Any:
    def pooling(self: RankState, *args: Any) -> Any:
        found = right(self, *args)
        return {row: PoolingInputs(each.how, None) for row, each in found.items()}

    return pooling


def _queue_without_bound(right: Any) -> Any:
    return lambda self, ticket, queue: None


def _ended_by_a_step(right: Any) -> Any:
    def end(self: Streams, stream: Any, worker_id: str | None, now: float) -> None:
        self._end(stream, HearthError("a step failed"), "failed", now)

    return end


def _blamed_together(right: Any) -> Any:
    """All rows of a step fail with the one that raises."""

    async def compute(self: EngineLoop, steps: Any) -> Any:
        return self.engine.fail([*chain(*steps)], StepFailed("the step raised"))

    return compute


def _contexts_unlimited(right: Any) -> Any:
    def put(self: WorkerTable, worker: Any) -> None:
        most = 2**31 - 1
        right(self, replace(worker, max_context_tokens=most, num_total_blocks=most))

    return put


def _fixed_timeout(right: Any) -> Any:
    return lambda self, peer, base_s, now, **options: 0.1


def _any_kv(right: Any) -> Any:
    return "any"


def _always_equal(right: Any) -> Any:
    return lambda self, other: isinstance(other, Numerics)


def needs_forgotten(right: Any) -> Any:
    def remaining_request(self: Stream, now: float) -> Any:
        request = right(self, now)
        needs = () if self.is_recovering else request.needs
        return msgspec.structs.replace(request, needs=needs)

    return remaining_request


def candidates_unfiltered(right: Any) -> Any:
    """Prefill workers are chosen whatever they lack."""

    def decide(self: Decision, needs: Any, *args: Any) -> None:
        right(self, needs, *args)
        unfiltered = self._prefills.side(
            args[1], needs.num_prompt_tokens - 1, needs.allowed_regions
        )
        self._prefill_side = unfiltered

    return decide


BUGS = (
    Bug("the gateway's fence is gone", Streams, "on_token_batch", _late_tokens_accepted, 44),
    Bug("decode renews no prefill lease", ActiveHandoffs, "renew_leases", _nothing, 344),
    Bug("blocks are freed while a step writes them", Engine, "abort", _blocks_freed_in_step, 4),
    Bug("a late KV frame is accepted", Handoff, "_try", _one_id_for_all_tries, 70),
    Bug("acknowledged before the end", Streams, "_accept", _acknowledged_at_once, 0),
    Bug("nothing is sent again", Streams, "_request_again", _nothing, 4),
    Bug("a gap in the tokens is overlooked", ChoiceTokens, "accept", _gaps_overlooked, 22),
    Bug("the gateway aborts nothing", Actions, "abort", _nothing, 0),
    Bug("an excluded worker is chosen", Decision, "target", _exclusion_ignored, 20),
    Bug("the checksum is not compared", ExpectedPushes, "_hand_over", _checksum_not_compared, 70),
    Bug("tenants share one hash root", block_hash, "root_hash", _root_without_tenant, 1),
    Bug("a silent bus is taken for dead peers", Fleet, "can_judge", _bus_always_trusted, 4),
    Bug("a prefill keeps its blocks", PrefillService, "_deliver", _push_never_released, 0),
    Bug("a shared block is written", Batcher, "_shared_groups", _shared_block_written, 1),
    Bug("a request looks too short for a scheduler", streams, "SUBMIT_WINDOW_S", _impatient, 25),
    Bug("who was away with the bus is asked", Fleet, "bus_was_away", _nothing, 22),
    Bug("nobody misses a last KV event", PrefixIndex, "announce", _nothing, 47),
    Bug("an embedding begins anew at each chunk", RankState, "_pooling", _pooled_anew, 4),
    Bug("what Redis missed is not written again", PrefixRegistry, "_restore", _nothing, 122),
    Bug("Redis keeps what a resync did not find", PrefixRegistry, "checked", _nothing, 18),
    Bug("the queue has no bound", RequestQueues, "_check_room", _queue_without_bound, 127),
    Bug("a failed step ends its request", Streams, "_move_after_failed_step", _ended_by_a_step, 20),
    Bug("poison fails its whole step", EngineLoop, "_compute_in_parts", _blamed_together, 533),
    Bug("a replaced epoch is not noticed", Fleet, "_on_replaced_epoch", _nothing, 78),
    Bug("nobody leaves a name to another", HealthMonitor, "_on_same_name", _nothing, 14),
    Bug("a worker's context is ignored", WorkerTable, "put", _contexts_unlimited, 2998),
    Bug("timeouts ignore distance", RoundTrips, "wait_s", _fixed_timeout, 44),
    Bug("unlike workers share KV", Numerics, "kv_key", _any_kv, 23),
    Bug("unlike numerics count as equal", Numerics, "__eq__", _always_equal, 552),
    Bug("a resubmission forgets its needs", Stream, "remaining_request", needs_forgotten, 46),
    Bug("prefill workers lack what is needed", Decision, "__init__", candidates_unfiltered, 37),
    *(Bug(*each, variant="models") for each in HOSTED_BUGS),
    *(Bug(*each, variant="sites") for each in SITE_BUGS),
)


def first_seed_of(number: int) -> int | None:
    """The first seed that shows `BUGS[number]`, or `None` if `MAX_SEEDS` seeds do not."""
    gc.freeze()
    bug = BUGS[number]
    with bug.planted():
        return next((seed for seed in range(MAX_SEEDS) if bug.wrongs(seed)), None)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the bugs' names (default: all bugs)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args(argv)
    numbers = [
        number
        for number, bug in enumerate(BUGS)
        if not given.names or any(name in bug.name for name in given.names)
    ]
    is_missed = not numbers
    with ProcessPoolExecutor(given.jobs) as pool:
        for number, seed in zip(numbers, pool.map(first_seed_of, numbers), strict=True):
            bug = BUGS[number]
            stale = "" if seed == bug.found_by else f"  (stored: {bug.found_by})"
            print(f"{'none' if seed is None else seed:>6} {bug.name}{stale}", flush=True)
            is_missed |= seed is None
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
