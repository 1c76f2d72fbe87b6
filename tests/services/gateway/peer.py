"""Peers of the gateway: a scheduler and decode workers that implement the wire protocol.

The scheduler places requests at once; a worker "generates" the tokens of a given answer. Both use
the real bus and the real messages. A worker can pause at a position, hang, or lose messages. All
choices have the same answer, except those in `answers`; logprobs depend on choice and position.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields

import msgspec

from shared import subjects
from shared.clock import MonotonicClock
from shared.errors import HearthError, NoCapacity, UnknownPlacement
from shared.lifecycle.heartbeat import HealthMonitor, Loads
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
    TokenLogprobs,
    WorkerLoad,
)
from shared.packing import unpack_token_ids
from shared.randomness import SystemRandomness
from shared.transport.bus import Bus
from tests.support.records import model_card
from tests.support.services.model_dir import EOS_TOKEN_ID

CARD = model_card(
    name="tiny", kv_format="float32/b16/l2/h2/d8", max_context_tokens=512, vocab_size=400
)


EMBEDDING = (3.0, 0.0, -4.0, 0.0)


def logprobs_at(choice_index: int, position: int, token_id: int, num_top: int) -> TokenLogprobs:
    """Choice 0 is the least likely. The top tokens are the sampled token and the ids after it."""
    own = -1.0 - position / 64 + choice_index / 4
    tops = range(num_top)
    return TokenLogprobs(
        own,
        tuple((token_id + rank) % CARD.vocab_size for rank in tops),
        tuple(own if rank == 0 else float("-inf") for rank in tops),
    )


@dataclass
class Run:
    """One choice of a placement."""

    request: Request
    placement_id: bytes
    choice_index: int
    answer: list[int]
    token_ids: list[int]
    first_position: int
    finish: Finish | None = None
    is_aborted: bool = False
    tells_logprobs: bool = True

    def entry_from(self, position: int, served: Served | None) -> TokenEntry:
        fresh = tuple(self.token_ids[position:])
        is_first = position == self.first_position
        return TokenEntry(
            self.placement_id,
            self.choice_index,
            position,
            fresh,
            self.finish,
            served if is_first else None,
            self._logprobs(position, fresh),
            self._prompt_logprobs() if is_first else (),
        )

    def _logprobs(self, position: int, fresh: tuple[int, ...]) -> tuple[TokenLogprobs, ...]:
        num_top = self.request.sampling.num_logprobs
        if num_top is None or not self.tells_logprobs:
            return ()
        return tuple(
            logprobs_at(self.choice_index, place, token_id, num_top)
            for place, token_id in enumerate(fresh, position)
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        num_top = self.request.sampling.num_prompt_logprobs
        is_last = self.choice_index == self.request.choices[-1].choice_index
        if num_top is None or not is_last:  # once per placement
            return ()
        prompt = unpack_token_ids(self.request.prompt_token_ids)
        return tuple(
            logprobs_at(0, place, token_id, num_top) for place, token_id in enumerate(prompt[1:], 1)
        )


@dataclass
class PeerDecode:
    bus: Bus
    answer: list[int]
    card: ModelCard = field(default_factory=lambda: CARD)
    answers: dict[int, list[int]] = field(default_factory=dict)  # by choice; default: `answer`
    hold_at: int | None = None  # stops producing at this position until released
    num_free_blocks: int = 100
    tells_logprobs: bool = True
    embedding: bytes | None = array("f", EMBEDDING).tobytes()
    loses: Callable[[TokenEntry], bool] = lambda entry: False
    finish: Finish = field(
        default_factory=lambda: Finish(
            reason="stop",
            served=Served(num_cached_tokens=4, prefill_worker_id="prefill-1", num_pushed_tokens=7),
            stop_token_id=EOS_TOKEN_ID,
        )
    )

    finishes: dict[int, Finish] = field(default_factory=dict)  # by choice; default: `finish`

    def __post_init__(self) -> None:
        self.step = 0
        self.is_hung = False
        self.has_ended = False
        self.tasks: set[asyncio.Task[None]] = set()
        self.placed: set[bytes] = set()
        self.earlier: set[bytes] = set()  # placements before the last `forget`
        self.runs: dict[bytes, dict[int, Run]] = {}  # by placement and choice
        self.forget()
        self.health_monitor = HealthMonitor(
            self.bus,
            MonotonicClock(),
            SystemRandomness(),
            roles=("decode",),
            model=self.card,
            loads=Loads(worker=self._load),
        )

    def forget(self) -> None:
        """Ends all runs. Ignores later messages about them."""
        for task in self.tasks:
            task.cancel()
        self.earlier |= self.placed
        self.runs = {}
        self.aborts: asyncio.Queue[AbortRequest] = asyncio.Queue()
        self.acks: asyncio.Queue[bytes] = asyncio.Queue()
        self.emitted: asyncio.Queue[TokenEntry] = asyncio.Queue()
        self.released = asyncio.Event()

    def reset(self, answer: list[int]) -> None:
        """Sets every field to its default; paused runs continue to their end."""
        for each in fields(self):
            if each.default is not MISSING:
                setattr(self, each.name, each.default)
            elif each.default_factory is not MISSING:
                setattr(self, each.name, each.default_factory())
        self.answer, self.is_hung = list(answer), False
        self.released.set()

    @property
    def worker_id(self) -> str:
        return self.bus.process_id

    async def start(self) -> None:
        await self.bus.serve(subjects.resend(self.worker_id), ResendTokens, self._resend)
        await self.bus.subscribe(
            subjects.control("decode", self.worker_id), AbortRequest | AckFinished, self._control
        )
        await self.health_monitor.start()
        await self.health_monitor.transition_to("ready")

    async def stop(self) -> None:
        self.has_ended = True
        for task in self.tasks:
            task.cancel()
        await self.health_monitor.stop()
        await self.bus.close()

    async def die(self) -> None:
        """Stops like a killed process: sends nothing more, not even a last heartbeat."""
        self.has_ended = True
        for task in self.tasks:
            task.cancel()
        await self.bus.close()

    def run(self, placement_id: bytes, request: Request) -> None:
        self.runs[placement_id] = {}
        self.placed.add(placement_id)
        for choice in request.choices:
            index, received = choice.choice_index, unpack_token_ids(choice.output_token_ids)
            answer = self.answers.get(index, self.answer)
            run = Run(request, placement_id, index, answer, received, len(received))
            run.tells_logprobs = self.tells_logprobs
            self.runs[placement_id][index] = run
            task = asyncio.create_task(self._produce(run))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)

    async def _produce(self, run: Run) -> None:
        while run.finish is None and run.placement_id in self.runs and not run.is_aborted:
            position = len(run.token_ids)
            if position == self.hold_at:
                await self.released.wait()
            if run.request.pooling is not None:
                embedding = self.embedding_for(run.request)
                run.finish = msgspec.structs.replace(self.finish, embedding=embedding)
            elif position >= len(run.answer):
                run.finish = self.finishes.get(run.choice_index, self.finish)
            else:
                run.token_ids.append(run.answer[position])
                if len(run.token_ids) == run.request.sampling.max_tokens:
                    run.finish = Finish(reason="length", served=self.finish.served)
            entry = run.entry_from(position, self.finish.served)
            await self._emit(run.request.gateway_id, entry)
            await asyncio.sleep(0)

    def embedding_for(self, request: Request) -> bytes | None:
        return self.embedding

    async def _emit(self, gateway_id: str, entry: TokenEntry) -> None:
        self.step += 1
        if not self.loses(entry):
            batch = TokenBatch(worker_id=self.worker_id, entries=(entry,))
            await self.bus.publish(subjects.tokens(gateway_id), batch)
        self.emitted.put_nowait(entry)

    def _resend(self, command: ResendTokens) -> TokenBatch:
        run = self.runs.get(command.placement_id, {}).get(command.choice_index)
        if run is None or run.is_aborted:
            raise UnknownPlacement("no such placement")
        entry = run.entry_from(command.from_position, self.finish.served)
        return TokenBatch(worker_id=self.worker_id, entries=(entry,))

    def _control(self, message: AbortRequest | AckFinished) -> None:
        if isinstance(message, AckFinished):
            for placement_id in message.placement_ids:
                self.acks.put_nowait(placement_id)
            return
        if message.placement_id in self.earlier:
            return
        self.aborts.put_nowait(message)
        if message.choice_index is None:
            self.runs.pop(message.placement_id, None)
        elif message.placement_id in self.runs:
            self.runs[message.placement_id][message.choice_index].is_aborted = True

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
    has_unlike_prefill: bool = False  # of the next placements

    def __post_init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.has_ended = False
        self.forget()
        self.health_monitor = HealthMonitor(
            self.bus, MonotonicClock(), SystemRandomness(), roles=("scheduler",)
        )

    def forget(self) -> None:
        """Forgets all messages received."""
        self.submits: asyncio.Queue[SubmitRequest] = asyncio.Queue()
        self.cancels: asyncio.Queue[str] = asyncio.Queue()
        self.queued: dict[str, SubmitRequest] = {}
        self.submitted: list[SubmitRequest] = []

    def reset(self, workers: list[PeerDecode]) -> None:
        """Sets every field to its default; queued requests are then placed."""
        self.workers, self.refusal = list(workers), None
        self.is_holding, self.sends_keepalives = False, True
        self.has_unlike_prefill = False

    async def start(self) -> None:
        await self.bus.serve(
            subjects.SUBMIT, SubmitRequest, self._submit, queue=subjects.SCHEDULER_GROUP
        )
        own = subjects.submit_to(self.bus.process_id)
        await self.bus.serve(own, SubmitRequest, self._submit)
        await self.bus.subscribe(
            subjects.cancel(self.bus.process_id),
            CancelQueued,
            lambda message: self.cancels.put_nowait(message.request_id),
        )
        self.task = asyncio.create_task(self._serve_queue())
        await self.health_monitor.start()
        await self.health_monitor.transition_to("ready")

    async def stop(self) -> None:
        assert self.task is not None
        self.has_ended = True
        self.task.cancel()
        await self.health_monitor.stop()
        await self.bus.close()

    def _submit(self, message: SubmitRequest) -> Queued:
        self.submitted.append(message)
        self.submits.put_nowait(message)
        if self.refusal is not None:
            raise self.refusal
        if not self._candidates(message):
            raise NoCapacity("no decode worker", retry_after_s=3.0)
        self.queued[message.request.request_id] = message
        return Queued(scheduler_id=self.bus.process_id, num_ahead=0)

    def _candidates(self, message: SubmitRequest) -> list[PeerDecode]:
        excluded, request = message.excluded_workers, message.request
        return [
            worker
            for worker in self.workers
            if worker.worker_id not in excluded
            and (worker.card.name, worker.card.revision) == (request.model, request.revision)
        ]

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
            request_id=request.request_id,
            placement_id=placement_id,
            worker_id=worker.worker_id,
            needs=request.needs,
            has_unlike_prefill=self.has_unlike_prefill,
        )
        await self.bus.publish(subjects.placement(request.gateway_id), placed)
        return placement_id

    async def _keep_alive(self, request: Request) -> None:
        if self.sends_keepalives:
            message = QueueKeepalive(
                scheduler_id=self.bus.process_id, request_ids=(request.request_id,)
            )
            await self.bus.publish(subjects.placement(request.gateway_id), message)
