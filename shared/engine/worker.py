"""The common part of prefill and decode workers: an engine on the bus.

Owns the health monitor, the engine loop and the outbox, and sends cache events to the index.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import msgspec

from shared.background import Background, failing_alone
from shared.block_hash import image_extras, prompt_chain
from shared.clock import Clock
from shared.engine.announced_blocks import WITHHELD, AnnouncedBlocks
from shared.engine.batching.block_lists import BlockList, BlockLists
from shared.engine.batching.block_pool import KvEvent
from shared.engine.batching.cached_block import runs_of
from shared.engine.batching.sequence import Sequence
from shared.engine.loop import EngineLoop
from shared.engine.pinned_prefixes import PinnedPrefixes, sequence_of
from shared.engine.tenant_kv import TenantKv
from shared.engine.vision.sequence_images import WantedImages
from shared.engine.vision.worker_images import WorkerImages
from shared.errors import InvalidRequest, WorkerBusy, WorkerUnfit
from shared.kv_wire.expected_pushes import ReceiverCounts
from shared.lifecycle.heartbeat import HealthMonitor, Loads
from shared.lifecycle.heartbeat_numbers import HeartbeatNumbers
from shared.lifecycle.worker_roles import WorkerRoles
from shared.messages import (
    BlockPage,
    ChangeRoles,
    CountTenantKv,
    DropTenantKv,
    KeepPins,
    KvEvents,
    KvTargets,
    ListBlocks,
    ModelCard,
    PinPrefix,
    PinsKept,
    PrefixPinned,
    Request,
    Role,
    RunPrefill,
    TenantKvCounted,
    TenantKvDropped,
    WorkerLoad,
)
from shared.numerics import Numerics
from shared.packing import BLOCK_HASH_BYTES, TOKEN_ID_BYTES, pack_hashes
from shared.randomness import Randomness
from shared.sites.kv_targets import check_targets_of_site
from shared.subjects import kv_events, list_blocks, pins, tenant_kv
from shared.tenancy.refusals import Refusals
from shared.transport.bus import Bus
from shared.transport.outbox import Outbox

EXPIRE_PINS_S = 1.0
KV_EVENTS_INTERVAL_S = 0.05  # interval of messages


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """The model that the engine serves. Without `has_head` it gives embeddings only."""

    card: ModelCard
    eos_token_ids: frozenset[int]
    has_head: bool = True


class EngineWorker:
    def __init__(
        self,
        *,
        bus: Bus,
        clock: Clock,
        randomness: Randomness,
        loop: EngineLoop,
        served: EngineModel,
        roles: WorkerRoles,
        region: str = "",
        kv_targets: KvTargets = (),
        frame_counts: ReceiverCounts | None = None,
        on_device_lost: Callable[[], None],
        max_pinned_share: float = 0.25,
        numbers: HeartbeatNumbers | None = None,
    ) -> None:
        """Runs an engine as a member of the fleet. `on_device_lost` ends the process, after the
        worker has left the fleet. `numbers` are those of heartbeats sent before.
        """
        self.bus = bus
        self.clock = clock
        self.randomness = randomness
        self.loop = loop
        self.served = served
        self.roles = roles
        self.kv_targets = kv_targets
        self.outbox = Outbox(bus)
        self.health_monitor = HealthMonitor(
            bus,
            clock,
            randomness,
            roles=roles.current,
            possible_roles=roles.possible,
            region=region,
            model=served.card,
            kv_targets=kv_targets,
            numbers=numbers,
            loads=Loads(worker=self._load),
        )
        self.images: WorkerImages | None = None  # None: the model takes no images
        self.announced = AnnouncedBlocks(self.health_monitor.fleet)
        self._on_device_lost = on_device_lost
        self._counters: list[Callable[[WorkerLoad], WorkerLoad]] = []
        self._releases: list[Callable[[], None]] = []
        self._forgets: list[Callable[[str], None]] = []
        self._frame_counts = ReceiverCounts() if frame_counts is None else frame_counts
        self._num_kv_mismatches = 0
        self._event_numbers = Counter[str]()  # by region class
        self._has_kv_events = asyncio.Event()
        loop.engine.pool.on_event = self._has_kv_events.set
        self._block_lists = BlockLists()
        self.pins = PinnedPrefixes(loop.engine, clock, max_share=max_pinned_share)
        self.tenant_kv = TenantKv(loop.engine, self.pins, clock)
        self._background = Background()

    @property
    def worker_id(self) -> str:
        return self.bus.process_id

    @property
    def refusals(self) -> Refusals:
        return self.health_monitor.refusals

    def region_of(self, worker_id: str) -> str | None:
        """Returns the region of a worker of this site, by its credential; None: not known."""
        if worker_id == self.worker_id:
            return self.refusals.region
        heartbeat = self.health_monitor.fleet.heartbeat_of(worker_id)
        return None if heartbeat is None else heartbeat.region

    def is_gateway(self, process_id: str) -> bool:
        heartbeat = self.health_monitor.fleet.heartbeat_of(process_id)
        return heartbeat is not None and "gateway" in heartbeat.roles

    def check_accepting(self, role: Role | None = None) -> None:
        """Raises WorkerBusy in a state without new requests, or for one in another role."""
        state = self.health_monitor.state
        if state in ("standby", "draining", "stopped"):
            raise WorkerBusy(f"{self.worker_id} is {state}")
        if role is not None:
            self.roles.check_accepts(role)

    def count(self, counter: Callable[[WorkerLoad], WorkerLoad]) -> None:
        """Registers `counter`, which adds its values to the load in each heartbeat."""
        self._counters.append(counter)

    def check_model(self, model: str, revision: str) -> None:
        """Raises WorkerUnfit if this worker serves another model or revision."""
        card = self.served.card
        if (model, revision) != (card.name, card.revision):
            raise WorkerUnfit(f"{self.worker_id} serves {card.name} at {card.revision}")

    def check_block_size(self, block_size: int) -> None:
        """Raises WorkerUnfit if the size differs from this worker's: block hashes depend on it."""
        own = self.served.card.block_size
        if block_size != own:
            raise WorkerUnfit(f"block size {block_size} differs from this worker's {own}")

    def check_needs(self, needs: Collection[str]) -> None:
        """Raises WorkerUnfit for a feature that this worker lacks: schedulers know its last
        heartbeat, which may be of an earlier process.
        """
        missing = sorted(set(needs).difference(self.served.card.features))
        if missing:
            raise WorkerUnfit(f"{self.worker_id} does not have {', '.join(missing)}")

    def check_kv(self, kv_format: str, numerics: Numerics) -> None:
        """Raises WorkerUnfit if a worker with these may not hold KV of this one, and counts it."""
        own = self.served.card
        if kv_format != own.kv_format:
            self._num_kv_mismatches += 1
            raise WorkerUnfit(f"kv_format {kv_format} differs from this worker's {own.kv_format}")
        if not own.numerics.may_share_kv(numerics):
            self._num_kv_mismatches += 1
            raise WorkerUnfit(f"numerics {numerics} differ from this worker's {own.numerics}")

    def check_kv_targets(self, request: RunPrefill) -> None:
        """Raises InvalidRequest unless the targets are those of the decode worker's last heartbeat,
        and WorkerBusy before the first one: only the credential's owner can announce an address.

        A gateway sends targets of another site, which it has checked: their KV is sealed.
        """
        worker_id, announced = request.decode_worker_id, self.kv_targets
        if worker_id != self.worker_id:
            heartbeat = self.health_monitor.fleet.heartbeat_of(worker_id)
            if heartbeat is None:
                raise WorkerBusy(f"{self.worker_id} has received no heartbeat of {worker_id} yet")
            announced = heartbeat.kv_targets
            if self.is_gateway(worker_id):
                check_targets_of_site(request)
                return
        if not request.targets or request.targets != announced:
            raise InvalidRequest(f"targets are not those of {worker_id}", param="targets")

    def check_tokens(self, sequence: Sequence, *others: Sequence) -> None:
        """Raises InvalidRequest for a token id that would fail the complete batch.

        `others` are choices of the same request: prompt and parameters are checked once.
        """
        vocab_size = self.served.card.vocab_size
        named = list(sequence.stop_token_ids)
        if sequence.sampling is not None:
            named += chain.from_iterable(sequence.sampling.bad_words)
            named += (token_id for token_id, _ in sequence.sampling.logit_bias)
            if sequence.sampling.thinking is not None:
                named += chain.from_iterable(sequence.sampling.thinking.closes)
        outputs = (other.token_ids[other.num_prompt_tokens :] for other in others)
        largest = max(chain(sequence.token_ids, *outputs, named), default=0)
        if largest >= vocab_size or min(named, default=0) < 0:
            raise InvalidRequest(f"a token id is outside this model's vocabulary of {vocab_size}")

    def check_hashes(self, message: Request | RunPrefill, packed_token_ids: bytes) -> None:
        """Raises InvalidRequest unless the block hashes are those of these tokens: with others, the
        KV would later be found by requests with another prompt.
        """
        block_size = self.served.card.block_size
        num_blocks = len(packed_token_ids) // (block_size * TOKEN_ID_BYTES)
        given = message.block_hashes[: num_blocks * BLOCK_HASH_BYTES]
        num_hashes = len(given) // BLOCK_HASH_BYTES
        num_public = min(message.num_public_blocks, num_blocks)
        if num_public > num_hashes or (num_public and message.public_root is None):
            raise InvalidRequest("a public block has no hash or no root", param="block_hashes")
        expected = prompt_chain(
            packed_token_ids[: num_hashes * block_size * TOKEN_ID_BYTES],
            block_size,
            cache_root=message.cache_root,
            public_root=message.public_root,
            num_public_blocks=num_public,
            extras=image_extras(message.images, block_size),
        )
        if pack_hashes(expected) != given:
            raise InvalidRequest("block_hashes are not those of the tokens", param="block_hashes")

    def attach_images(
        self,
        message: Request | RunPrefill | PinPrefix,
        packed_ids: bytes,
        sequences: Iterable[Sequence],
    ) -> tuple[WantedImages, ...]:
        """Gives a request's images to its sequences; the caller closes what is returned. Raises
        WorkerUnfit if this worker encodes no images, and InvalidRequest if they are not those of
        the tokens.
        """
        if not message.images:
            return ()
        if self.images is None:
            raise WorkerUnfit(f"{self.worker_id} takes no images")
        return self.images.attach(message, packed_ids, sequences)

    def use_images(self, images: WorkerImages) -> None:
        """Encodes the images of requests from now on."""
        self.images = images
        self.count(images.counted)
        self.on_dropped(images.drop_tenant)
        self.on_parked(images.clear_cache)

    async def start(self) -> None:
        self.outbox.start()
        self.loop.start()
        await self.health_monitor.start()
        if self.images is not None:
            await self.images.start()
        self.loop.listen(self.pins.on_step)
        self.loop.on_device_lost(self._start_leaving)
        for role in self.roles.handled:  # peers use the first role of the last heartbeat
            await self._serve(role)
        self._background.start_own(self._send_kv_events())
        self._background.start_own(self._expire_pins())

    async def _serve(self, role: Role) -> None:
        worker_id, serve = self.worker_id, self.bus.serve
        await serve(list_blocks(role, worker_id), ListBlocks, self._block_page)
        await serve(pins(role, worker_id), PinPrefix | KeepPins, self._on_pins)
        kinds = DropTenantKv | CountTenantKv
        await serve(tenant_kv(role, worker_id), kinds, self._on_tenant_kv)

    async def change_roles(self, command: ChangeRoles) -> None:
        """Changes the roles. Raises InvalidRequest, WorkerBusy."""
        if self.roles.change(command, self.clock.now()):
            await self.health_monitor.announce_roles(self.roles.current)

    async def stop(self) -> None:
        await self._background.stop()
        self.pins.stop()
        await self.loop.stop()
        if self.images is not None:
            await self.images.close()
        await self.outbox.stop()
        await self.health_monitor.stop()

    def _start_leaving(self) -> None:
        self._background.start_own(self._leave())

    async def _leave(self) -> None:
        """Requests of a worker that announces its stop are moved at once."""
        await self.outbox.stop()
        await self.health_monitor.stop()
        await self.bus.close()
        self._on_device_lost()

    def _load(self) -> WorkerLoad:
        counts = self._frame_counts
        load = msgspec.structs.replace(
            self.loop.load(),
            num_kv_events=self._event_numbers[""],
            num_class_kv_events=tuple(sorted(filter(itemgetter(0), self._event_numbers.items()))),
            num_kv_frames=counts.num_frames,
            num_corrupt_kv_frames=counts.num_corrupt,
            num_unknown_kv_frames=counts.num_unknown,
            num_refused_kv_frames=counts.num_rejected,
            num_bad_kv_peers=counts.num_bad_peers,
            num_kv_mismatches=self._num_kv_mismatches + counts.num_mismatched,
        )
        for counter in self._counters:
            load = counter(load)
        return load

    def _on_pins(self, command: PinPrefix | KeepPins) -> PrefixPinned | PinsKept:
        if isinstance(command, KeepPins):
            return self.pins.renew(command)
        self.check_accepting()
        if command.tenant_id in self.tenant_kv.unretained:  # the index has not heard of it
            raise WorkerUnfit(f"{self.worker_id} had to drop the KV of {command.tenant_id!r}")
        self.refusals.require("pin", command)
        self.check_model(command.model, command.revision)
        sequence = sequence_of(command, self.served.card.block_size)
        sequence.region_class = self.announced.class_of(command)
        self.check_tokens(sequence)
        self.attach_images(command, command.token_ids, (sequence,))
        reply = self.pins.pin(command, sequence)
        self.loop.wake()
        return reply

    async def _on_tenant_kv(
        self, command: DropTenantKv | CountTenantKv
    ) -> TenantKvDropped | TenantKvCounted:
        """Replies once what was only cached holds zeros, and its removal is announced."""
        if isinstance(command, CountTenantKv):
            return self.tenant_kv.count(command)
        reply = self.tenant_kv.drop(command)
        for tenant_id in command.tenant_ids:
            for forget in self._forgets:
                forget(tenant_id)
        self._post_kv_events()
        await self.loop.zero_freed_blocks()
        return reply

    def on_dropped(self, forget: Callable[[str], None]) -> None:
        """Registers `forget`, which forgets what else is retained of a tenant's requests."""
        self._forgets.append(forget)

    def on_parked(self, release: Callable[[], None]) -> None:
        """Registers `release`, which frees memory that a worker without requests does not need."""
        self._releases.append(release)

    async def drop_cache(self) -> None:
        """Releases all pins and gives the KV cache back; the index is informed. Raises ValueError
        while sequences are left.
        """
        self.pins.clear()
        for release in self._releases:
            release()
        gc.collect()
        await self.loop.kv.resize(0)
        self._post_kv_events()

    async def _expire_pins(self) -> None:
        while True:
            await self.clock.sleep(EXPIRE_PINS_S)
            with failing_alone("pins_not_expired"):
                self.pins.expire()

    async def _send_kv_events(self) -> None:
        while True:
            await self._has_kv_events.wait()
            self._post_kv_events()
            await self.clock.sleep(KV_EVENTS_INTERVAL_S)

    def _post_kv_events(self) -> None:
        self._has_kv_events.clear()
        pool = self.loop.engine.pool
        for region_class in pool.event_classes:
            events = pool.take_events(region_class)
            if events and region_class != WITHHELD:
                # the index asks for all blocks once it sees the gap of the numbers
                with failing_alone("kv_events_not_sent", region_class=region_class):
                    self._post_events_of(region_class, events)

    def _post_events_of(self, region_class: str, events: list[KvEvent]) -> None:
        self._event_numbers[region_class] += 1
        card = self.served.card
        message = KvEvents(
            worker_id=self.worker_id,
            epoch=self.health_monitor.epoch,
            sequence_number=self._event_numbers[region_class],
            model=card.name,
            revision=card.revision,
            kv_format=card.kv_format,
            events=tuple(events),
            region_class=region_class,
        )
        self.outbox.post(kv_events(self.roles.handled[0], self.worker_id), message)

    def _block_page(self, request: ListBlocks) -> BlockPage:
        """All pages show the state at the first request. Pending events are sent before it, so that
        its sequence number covers its content.
        """
        cursor = request.cursor or self._block_lists.add(self._listed(request.region_class))
        page, next_cursor = self._block_lists.page(cursor)
        card = self.served.card
        return BlockPage(
            worker_id=self.worker_id,
            epoch=self.health_monitor.epoch,
            sequence_number=page.sequence_number,
            model=card.name,
            revision=card.revision,
            kv_format=card.kv_format,
            stored=tuple(runs_of(page.blocks)),
            next_cursor=next_cursor,
        )

    def _listed(self, region_class: str) -> BlockList:
        self._post_kv_events()
        cached = self.loop.engine.pool.cached_blocks(region_class)
        unlisted = frozenset[str]() if region_class else self.announced.unlisted()
        return BlockList(
            self._event_numbers[region_class],
            [each for each in cached if each.tenant_id not in unlisted],
        )
