"""The other ends of the gateway's wires: a scheduler and decode workers that speak the protocol.

They place at once and "generate" the tokens of a given answer, over the real bus with the real
messages. A worker can be held at a position, made silent, or told to lose messages.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from shared import subjects
from shared.bus import Bus
from shared.clock import MonotonicClock
from shared.errors import HearthError, NoCapacity, UnknownPlacement
from shared.heartbeat import Heart
from shared.messages import (
    AbortRequest,
    AckFinished,
    CancelQueued,
    Finish,
    ModelCard,
    Placed,
    Queued,
    QueueKeepalive,
    Request,
    ResendTokens,
    Served,
    SubmitRequest,
    TokenBatch,
    TokenEntry,
    WorkerLoad,
)
from shared.packing import unpack_token_ids
from shared.randomness import SystemRandomness
from tests.services.gateway.model_dir import EOS_TOKEN_ID

CARD = ModelCard(
    name="tiny",
    revision="r1",
    kv_format="float32/b16/l2/h2/d8",
    block_size=16,
    max_context_tokens=512,
    vocab_size=400,
)


@dataclass
class Run:
    request: Request
    token_ids: list[int]
    first_position: int
    finish: Finish | None = None


@dataclass
class PeerDecode:
    bus: Bus
    answer: list[int]
    hold_at: int | None = None  # stops producing at this position until released
    num_free_blocks: int = 100
    loses: Callable[[TokenEntry], bool] = lambda entry: False
    finish: Finish = field(
        default_factory=lambda: Finish(
            reason="stop",
            served=Served(num_cached_tokens=4, prefill_worker_id="prefill-1", num_pushed_tokens=7),
            stop_token_id=EOS_TOKEN_ID,
        )
    )

    def __post_init__(self) -> None:
        self.runs: dict[bytes, Run] = {}
        self.aborts: asyncio.Queue[AbortRequest] = asyncio.Queue()
        self.acks: asyncio.Queue[bytes] = asyncio.Queue()
        self.emitted: asyncio.Queue[TokenEntry] = asyncio.Queue()
        self.released = asyncio.Event()
        self.step = 0
        self.is_hung = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.heart = Heart(
            self.bus,
            MonotonicClock(),
            SystemRandomness(),
            roles=("decode",),
            load=self._load,
            model=CARD,
        )

    @property
    def worker_id(self) -> str:
        return self.bus.process_id

    async def start(self) -> None:
        await self.bus.serve(subjects.resend(self.worker_id), ResendTokens, self._resend)
        await self.bus.subscribe(
            subjects.control("decode", self.worker_id), AbortRequest | AckFinished, self._control
        )
        await self.heart.start()
        await self.heart.become("ready")

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await self.heart.stop()
        await self.bus.close()

    async def die(self) -> None:
        """As killed: no farewell, nothing more is sent."""
        for task in self.tasks:
            task.cancel()
        await self.bus.close()

    def run(self, placement_id: bytes, request: Request) -> None:
        received = unpack_token_ids(request.choices[0].output_token_ids)
        self.runs[placement_id] = Run(request, received, len(received))
        task = asyncio.create_task(self._produce(placement_id))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _produce(self, placement_id: bytes) -> None:
        run = self.runs[placement_id]
        max_tokens = run.request.sampling.max_tokens
        while placement_id in self.runs and run.finish is None:
            position = len(run.token_ids)
            if position == self.hold_at:
                await self.released.wait()
            if position >= len(self.answer):
                run.finish, fresh = self.finish, ()
            else:
                fresh = (self.answer[position],)
                run.token_ids += fresh
                if len(run.token_ids) == max_tokens:
                    run.finish = Finish(reason="length", served=self.finish.served)
            served = self.finish.served if position == run.first_position else None
            entry = TokenEntry(placement_id, 0, position, fresh, run.finish, served)
            await self._emit(run.request.gateway_id, entry)
            await asyncio.sleep(0)

    async def _emit(self, gateway_id: str, entry: TokenEntry) -> None:
        self.step += 1
        if not self.loses(entry):
            batch = TokenBatch(worker_id=self.worker_id, entries=(entry,))
            await self.bus.publish(subjects.tokens(gateway_id), batch)
        self.emitted.put_nowait(entry)

    def _resend(self, command: ResendTokens) -> TokenBatch:
        run = self.runs.get(command.placement_id)
        if run is None:
            raise UnknownPlacement("no such placement")
        fresh = tuple(run.token_ids[command.from_position :])
        entry = TokenEntry(command.placement_id, 0, command.from_position, fresh, run.finish)
        return TokenBatch(worker_id=self.worker_id, entries=(entry,))

    def _control(self, message: AbortRequest | AckFinished) -> None:
        if isinstance(message, AbortRequest):
            self.runs.pop(message.placement_id, None)
            self.aborts.put_nowait(message)
        else:
            for placement_id in message.placement_ids:
                self.acks.put_nowait(placement_id)

    def _load(self) -> WorkerLoad:
        if not self.is_hung:
            self.step += 1
        return WorkerLoad(
            step=self.step,
            step_budget_s=0.2,
            num_free_blocks=self.num_free_blocks,
            num_total_blocks=100,
        )


@dataclass
class PeerScheduler:
    bus: Bus
    workers: list[PeerDecode]
    refusal: HearthError | None = None
    is_holding: bool = False  # queued requests stay queued
    sends_keepalives: bool = True

    def __post_init__(self) -> None:
        self.submits: asyncio.Queue[SubmitRequest] = asyncio.Queue()
        self.cancels: asyncio.Queue[str] = asyncio.Queue()
        self.queued: dict[str, SubmitRequest] = {}
        self.task: asyncio.Task[None] | None = None
        self.heart = Heart(self.bus, MonotonicClock(), SystemRandomness(), roles=("scheduler",))

    async def start(self) -> None:
        await self.bus.serve(
            subjects.SUBMIT, SubmitRequest, self._submit, queue=subjects.SCHEDULER_GROUP
        )
        await self.bus.subscribe(
            subjects.cancel(self.bus.process_id),
            CancelQueued,
            lambda message: self.cancels.put_nowait(message.request_id),
        )
        self.task = asyncio.create_task(self._serve_queue())
        await self.heart.start()
        await self.heart.become("ready")

    async def stop(self) -> None:
        assert self.task is not None
        self.task.cancel()
        await self.heart.stop()
        await self.bus.close()

    def _submit(self, message: SubmitRequest) -> Queued:
        self.submits.put_nowait(message)
        if self.refusal is not None:
            raise self.refusal
        if not self._candidates(message):
            raise NoCapacity("no decode worker", retry_after_s=3.0)
        self.queued[message.request.request_id] = message
        return Queued(scheduler_id=self.bus.process_id, num_ahead=0)

    def _candidates(self, message: SubmitRequest) -> list[PeerDecode]:
        excluded = message.excluded_workers
        return [worker for worker in self.workers if worker.worker_id not in excluded]

    async def _serve_queue(self) -> None:
        while True:
            await asyncio.sleep(0.005)
            for request_id, message in list(self.queued.items()):
                if self.is_holding:
                    await self._keep_alive(message.request)
                else:
                    del self.queued[request_id]
                    await self.place(message.request, self._candidates(message)[0])

    async def place(self, request: Request, worker: PeerDecode) -> bytes:
        placement_id = secrets.token_bytes(16)
        worker.run(placement_id, request)
        placed = Placed(
            request_id=request.request_id, placement_id=placement_id, worker_id=worker.worker_id
        )
        await self.bus.publish(subjects.placement(request.gateway_id), placed)
        return placement_id

    async def _keep_alive(self, request: Request) -> None:
        if self.sends_keepalives:
            message = QueueKeepalive(
                scheduler_id=self.bus.process_id, request_ids=(request.request_id,)
            )
            await self.bus.publish(subjects.placement(request.gateway_id), message)
