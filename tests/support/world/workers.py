"""Workers on the simulated network, and a peer that replaces gateway and scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from services.worker.role_and_standby import RoleAndStandby
from shared.block_hash import extend_chain, root_hash
from shared.clock import Clock
from shared.engine.engine import Engine
from shared.engine.executors.timing_executor import StepCost
from shared.engine.kv.local_ports import LocalPushPort, LocalReceivePort
from shared.engine.loop import EngineLoop
from shared.engine.step import KvRun, StepInputs, StepOutput
from shared.engine.token_masks.worker_grammars import WorkerGrammars
from shared.engine.worker import EngineModel, EngineWorker
from shared.kv_layout import Reach
from shared.lifecycle.heartbeat import HealthMonitor
from shared.lifecycle.worker_roles import WorkerRoles
from shared.messages import (
    AbortRequest,
    AckFinished,
    Choice,
    DecodeStarted,
    Finish,
    ModelCard,
    Request,
    ResendTokens,
    Role,
    SamplingParams,
    StartDecode,
    TokenBatch,
    TokenLogprobs,
)
from shared.messages import (
    Served as ServedBy,
)
from shared.numerics import Mode
from shared.packing import pack_hashes, pack_token_ids
from shared.regions.region_check import RegionCheck
from shared.regions.region_classes import NO_CLASSES, RegionClasses
from shared.subjects import control, resend, start_decode, tokens
from tests.support.world import leaks
from tests.support.world.bus import SimulatedNetwork
from tests.support.world.clock import VirtualClock
from tests.support.world.kv_link import DataPlane, SimulatedDialer, SimulatedReceiver
from tests.support.world.process import ProcessClock, SimulatedProcess
from tests.support.world.randomness import SeededRandomness
from tests.support.world.ranks import SimulatedGroup

MODEL, REVISION, BLOCK_SIZE, EOS = "timing", "r1", 16, 2


class CopyingExecutor(SimulatedGroup):
    """Copies take time, so that blocks freed during a copy are detected. Its device may fail: steps
    raise after they have written KV.
    """

    def __init__(self, clock: Clock, *, copy_s: float, **options: Any) -> None:
        super().__init__(clock, **options)
        self.step_raises: Callable[[], bool] = lambda: False
        self.poison: frozenset[int] = frozenset()  # tokens for which each step raises
        self.check_raises = False
        self._copy_s = copy_s

    async def run(self, inputs: StepInputs) -> StepOutput:
        output = await super().run(inputs)
        if self.step_raises() or not self.poison.isdisjoint(inputs.input_ids.tolist()):
            raise RuntimeError("the device says no")
        return output

    async def check(self) -> None:
        await super().check()
        if self.check_raises:
            raise RuntimeError("the device says no")

    async def read_kv(self, run: KvRun, out: memoryview) -> None:
        if self._copy_s:
            await self._clock.sleep(self._copy_s)
        await super().read_kv(run, out)

    async def write_kv(self, run: KvRun, payload: memoryview) -> None:
        table = list(run.block_table)  # fixes the destination when the copy starts
        if self._copy_s:
            await self._clock.sleep(self._copy_s)
        await super().write_kv(replace(run, block_table=table), payload)

    async def zero_blocks(self, block_ids: list[int]) -> None:
        if self._copy_s:
            await self._clock.sleep(self._copy_s)
        await super().zero_blocks(block_ids)


class SimulatedWorker:
    """A full worker process: real handlers, real engine core, timing executor."""

    def __init__(
        self,
        network: SimulatedNetwork,
        data_plane: DataPlane,
        worker_id: str,
        roles: tuple[Role, ...],
        *,
        num_blocks: int = 256,
        block_size: int = BLOCK_SIZE,
        reaches: tuple[Reach, ...] = (None,),
        max_batch_tokens: int = 64,
        max_sequences: int = 32,
        cost: StepCost | None = None,
        copy_s: float = 0.0,
        seed: int | None = None,
        zeroes_freed_blocks: bool = False,
        executor_type: type[CopyingExecutor] = CopyingExecutor,
        mode: Mode = "exact",
        variant: int = 0,
        features: tuple[str, ...] = (),
        is_older: bool = False,
        grammars: WorkerGrammars | None = None,
        group: tuple[int, int] | None = None,
        announced: tuple[Role, ...] = (),
        model: str = MODEL,
        region: str = "",
        classes: RegionClasses = NO_CLASSES,
        max_blocks: int | None = None,
        num_floor_blocks: int | None = None,
    ) -> None:
        """`copy_s` is the time to read or write the KV of a frame, or to zero blocks. For
        `variant`, see `TimingExecutor`; for `group`, `FleetPlan.groups`. A worker that `is_older`
        does not check what a request needs. `grammars` have a vocabulary of 32,000 tokens whose end
        is `EOS`. `max_blocks` is that of a worker that a host resizes, parks and wakes.
        """
        self.process = SimulatedProcess(worker_id)
        clock = ProcessClock(self.process)
        randomness = SeededRandomness(sum(worker_id.encode()) if seed is None else seed)
        self.worker_id, self.variant = worker_id, variant
        self.bus = network.bus(worker_id, self.process, RegionCheck(region, classes))
        depth, num_stages = group or (1, 1)
        self.executor = executor_type(
            ProcessClock(self.process, is_engine=True),
            copy_s=copy_s,
            num_blocks=num_blocks,
            block_size=block_size,
            reaches=reaches,
            cost=cost,
            mode=mode,
            variant=variant,
            max_blocks=max_blocks,
            group=None if group is None else self.process,
            depth=depth,
            num_stages=num_stages,
        )
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_context_tokens=self.executor.max_context_tokens,
            max_batch_tokens=max_batch_tokens,
            max_sequences=max_sequences,
            reaches=reaches,
            zeroes_freed_blocks=zeroes_freed_blocks,
            num_floor_blocks=num_floor_blocks,
        )
        self.receiver = SimulatedReceiver(data_plane, randomness.bytes(16), self.process, region)
        self.dialer = SimulatedDialer(data_plane, self.process, region)
        receive_port = LocalReceivePort(self.receiver, self.executor)
        card = ModelCard(
            name=model,
            revision=REVISION,
            kv_reaches=reaches,
            kv_format=self.executor.kv_layout.key,
            block_size=block_size,
            max_context_tokens=self.engine.max_context_tokens,
            vocab_size=self.executor.vocab_size,
            model_context_tokens=self.engine.model_context_tokens,
            numerics=self.executor.numerics,
            features=features,
        )
        self.worker = EngineWorker(
            bus=self.bus,
            clock=clock,
            randomness=randomness,
            loop=EngineLoop(self.engine, self.executor, clock),
            served=EngineModel(card=card, eos_token_ids=frozenset({EOS})),
            roles=WorkerRoles(roles, announced),
            region=region,
            kv_targets=receive_port.targets,
            on_device_lost=self._exit,
        )
        if is_older:
            self.worker.check_needs = lambda needs: None  # type: ignore[method-assign]
        self.prefill: PrefillService | None = None
        if "prefill" in roles:
            push_port = LocalPushPort(self.dialer, self.executor, clock)
            self.prefill = PrefillService(self.worker, push_port)
        self.decode: DecodeService | None = None
        if "decode" in roles:
            self.decode = DecodeService(self.worker, receive_port, grammars)
        self.parking = RoleAndStandby(self.worker, self.handlers)

    @property
    def handlers(self) -> list[PrefillService | DecodeService]:
        return [each for each in (self.prefill, self.decode) if each is not None]

    def leaks(self) -> list[str]:
        return leaks.of_worker(self)

    @property
    def is_empty(self) -> bool:
        pool = self.engine.pool
        pool.check()
        return self.engine.is_idle and pool.num_free_blocks == pool.num_blocks

    async def start(self) -> None:
        await self.process.start(self._start())

    async def _start(self) -> None:
        await self.worker.start()
        for handler in self.handlers:
            await handler.start()
        await self.parking.start()

    async def drain(self) -> None:
        await self.parking.leave()
        await asyncio.gather(*(handler.drain() for handler in self.handlers))

    async def stop(self) -> None:
        for handler in self.handlers:
            await handler.stop()
        await self.worker.stop()
        await self.bus.close()

    async def kill(self) -> None:
        """SIGKILL: sends nothing, the links end, the subscriptions vanish."""
        self.process.die()
        self.drop_links()
        await self.bus.close()
        await self.process.gone()

    def _exit(self) -> None:
        """Ends the process after the worker has left the fleet."""
        self.process.die()
        self.drop_links()

    def drop_links(self) -> None:
        self.receiver.drop_links()
        self.dialer.drop_links()


@dataclass
class Received:
    """The tokens, the finish and the log-probabilities that a peer received for one choice."""

    token_ids: dict[int, int] = field(default_factory=dict)
    served: ServedBy | None = None
    finish: Finish | None = None
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def output(self) -> list[int]:
        return [token_id for _, token_id in sorted(self.token_ids.items())]


class Peer:
    """Places requests and receives tokens, like gateway and scheduler together."""

    def __init__(
        self,
        network: SimulatedNetwork,
        gateway_id: str = "gateway-1",
        regions: RegionCheck | None = None,
    ) -> None:
        self.bus = network.bus(gateway_id, regions=regions)
        self.health_monitor = HealthMonitor(
            self.bus, VirtualClock(), SeededRandomness(7), roles=("gateway",)
        )
        self.received: dict[tuple[bytes, int], Received] = {}
        self._num_placements = 0

    async def start(self) -> None:
        await self.bus.subscribe(tokens(self.bus.process_id), TokenBatch, self.take)
        await self.health_monitor.start()
        await self.health_monitor.transition_to("ready")

    async def stop(self) -> None:
        await self.health_monitor.stop()
        await self.bus.close()

    def take(self, batch: TokenBatch) -> None:
        for entry in batch.entries:
            received = self.of(entry.placement_id, entry.choice_index)
            received.token_ids |= dict(enumerate(entry.token_ids, entry.first_position))
            received.logprobs |= dict(enumerate(entry.logprobs, entry.first_position))
            received.prompt_logprobs = entry.prompt_logprobs or received.prompt_logprobs
            received.served = entry.served or received.served
            received.finish = entry.finish or received.finish
            received.changed.set()

    async def place(
        self, worker_id: str, request: Request, candidates: tuple[str, ...] = ()
    ) -> bytes:
        self._num_placements += 1
        placement_id = self._num_placements.to_bytes(16, "big")
        command = StartDecode(
            placement_id=placement_id, request=request, prefill_candidates=candidates
        )
        await self.bus.request(start_decode(worker_id), command, DecodeStarted, timeout_s=0.1)
        return placement_id

    def of(self, placement_id: bytes, choice_index: int = 0) -> Received:
        return self.received.setdefault((placement_id, choice_index), Received())

    async def finished(self, placement_id: bytes, choice_index: int = 0) -> Received:
        received = self.of(placement_id, choice_index)
        return await self._until(received, lambda: received.finish is not None)

    async def has_tokens(self, placement_id: bytes, count: int, choice_index: int = 0) -> Received:
        received = self.of(placement_id, choice_index)
        return await self._until(received, lambda: len(received.token_ids) >= count)

    async def resend(
        self,
        worker_id: str,
        placement_id: bytes,
        from_position: int,
        choice_index: int = 0,
        region_class: str = "",
    ) -> None:
        command = ResendTokens(
            placement_id=placement_id,
            choice_index=choice_index,
            from_position=from_position,
            region_class=region_class,
        )
        self.take(await self.bus.request(resend(worker_id), command, TokenBatch, timeout_s=0.2))

    async def abort(
        self, worker_id: str, placement_id: bytes, choice_index: int | None = None
    ) -> None:
        message = AbortRequest(
            placement_id=placement_id, reason="client_gone", choice_index=choice_index
        )
        await self.bus.publish(control("decode", worker_id), message)

    async def acknowledge(self, worker_id: str, placement_id: bytes) -> None:
        message = AckFinished(placement_ids=(placement_id,))
        await self.bus.publish(control("decode", worker_id), message)

    async def _until(self, received: Received, condition: Callable[[], bool]) -> Received:
        async with asyncio.timeout(120):
            while not condition():
                received.changed.clear()
                await received.changed.wait()
        return received


def request_of(
    prompt: list[int],
    *,
    max_tokens: int = 20,
    output: list[int] = [],  # noqa: B006
    outputs: dict[int, list[int]] | None = None,
    seed: int = 5,
    temperature: float = 0.0,
    tenant_id: str = "tenant-a",
    cache_salt: str = "",
    kv_quota_tokens: int = 0,
    deadline_s: float = 600.0,
    gateway_id: str = "gateway-1",
    **sampling: object,
) -> Request:
    """Returns a request of one choice that received `output`, or of those in `outputs`
    by choice_index.
    """
    root = root_hash(tenant_id, REVISION, cache_salt=cache_salt)
    return Request(
        request_id="r",
        tenant_id=tenant_id,
        gateway_id=gateway_id,
        model=MODEL,
        revision=REVISION,
        cache_root=root,
        prompt_token_ids=pack_token_ids(prompt),
        block_hashes=pack_hashes(extend_chain(root, prompt, BLOCK_SIZE)),
        sampling=SamplingParams(
            seed=seed, max_tokens=max_tokens, temperature=temperature, **sampling
        ),
        choices=tuple(
            Choice(choice_index=index, output_token_ids=pack_token_ids(received))
            for index, received in ({0: output} if outputs is None else outputs).items()
        ),
        deadline_s=deadline_s,
        kv_quota_tokens=kv_quota_tokens,
    )
