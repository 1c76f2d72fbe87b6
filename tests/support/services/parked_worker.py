"""A worker process of both roles on a real NATS server, with a model, commanded by messages."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from shared.background import Background
from shared.block_hash import extend_chain, root_hash
from shared.clock import MonotonicClock
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    AckFinished,
    Choice,
    DecodeStarted,
    Done,
    Finish,
    Heartbeat,
    KvEvents,
    KvResized,
    Message,
    ParkWorker,
    Request,
    ResizeKv,
    SamplingParams,
    StartDecode,
    TokenBatch,
    WakeWorker,
)
from shared.packing import pack_hashes, pack_token_ids
from shared.randomness import SystemRandomness
from shared.subjects import HEARTBEATS, KV_EVENTS, control, lifecycle, start_decode, tokens
from shared.transport.bus import NatsBus
from tests.support.cluster.process_template import ForkedProcess, template
from tests.support.cluster.service_processes import process_environ
from tests.support.servers import NatsServer
from tests.support.waiting import until_changed

M = TypeVar("M", bound=Message)

WORKER, GATEWAY = "worker-1", "gateway-1"
TIMEOUT_S = 240.0  # a first start compiles kernels


@contextmanager
def worker_process(
    folder: Path, nats: NatsServer, model_dir: Path, *options: str, process_id: str = WORKER
) -> Iterator[ForkedProcess]:
    """Ends with SIGTERM, in whatever state the worker is. Its log is in `folder`."""
    credential, _, instance = process_id.partition(".")
    command = [str(folder), "worker", "--process-id", credential, "--instance", instance or "-"]
    command += ["--model-dir", str(model_dir), "--device", "cpu", *options]
    environ = process_environ({"HEARTH_NATS_URL": nats.url(process_id)})
    process = template().start(command, environ, folder / f"{process_id}.log")
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(timeout=TIMEOUT_S)
    assert status == 0


def memory_bytes(pid: int, field: str) -> int:
    """Returns Rss, Pss, … of a process."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def mapped_pss_bytes(pid: int, suffix: str) -> int:
    """Returns the PSS of the mapped files with this suffix."""
    total, is_wanted = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            is_wanted = len(words) > 5 and words[5].endswith(suffix)
        elif is_wanted and words[0] == "Pss:":
            total += int(words[1]) * 1024
    return total


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of all threads since the start, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class WorkerClient:
    """The scheduler, gateway and index of one worker, as far as it needs them."""

    def __init__(self, worker_id: str, scheduler: NatsBus, gateway: NatsBus) -> None:
        self.worker_id = worker_id
        self.states: list[str] = []  # announced states without repetitions
        self.events: list[KvEvents] = []
        self.heartbeat: Heartbeat | None = None
        self._scheduler = scheduler
        self._gateway = gateway
        self._monitor = HealthMonitor(
            gateway, MonotonicClock(), SystemRandomness(), roles=("gateway",)
        )
        self._tokens: dict[bytes, dict[int, int]] = {}
        self._ended: dict[bytes, Finish] = {}
        self._changed = asyncio.Event()
        self._is_first = True
        self._background = Background()

    @classmethod
    async def connect(
        cls,
        nats: NatsServer,
        worker_id: str = WORKER,
        *,
        beside: WorkerClient | None = None,
        index: NatsBus | None = None,
    ) -> WorkerClient:
        """Connects a client, which shares the scheduler and gateway of `beside` if that is given.

        `beside` must be closed later than this client. `index` is a connection for cache events.
        """
        if beside is not None:
            scheduler, gateway = beside._scheduler, beside._gateway
        else:
            scheduler = await NatsBus.connect(nats.url("scheduler-1"), process_id="scheduler-1")
            gateway = await NatsBus.connect(nats.url(GATEWAY), process_id=GATEWAY)
        it = cls(worker_id, scheduler, gateway)
        if beside is None:
            await it._monitor.start()
            await it._monitor.transition_to("ready")
        it._is_first = beside is None
        await gateway.subscribe(tokens(GATEWAY), TokenBatch, it._on_tokens)
        await scheduler.subscribe(HEARTBEATS, Heartbeat, it._on_heartbeat)
        if index is not None:
            await index.subscribe(KV_EVENTS, KvEvents, it._on_events)
            await index.flush()
        await gateway.flush()
        return it

    async def close(self) -> None:
        await self._background.stop()
        if not self._is_first:
            return
        await self._monitor.stop()
        await self._gateway.close()
        await self._scheduler.close()

    async def until(self, condition: Callable[[], bool]) -> None:
        await until_changed(condition, self._changed, timeout_s=TIMEOUT_S, seen=lambda: self.states)

    async def until_state(self, *states: str) -> Heartbeat:
        await self.until(lambda: bool(self.states) and self.states[-1] in states)
        assert self.heartbeat is not None
        return self.heartbeat

    async def park(self, drain_s: float = TIMEOUT_S) -> None:
        await self._command(ParkWorker(drain_s=drain_s), Done)

    async def wake(self, kv_bytes: int) -> None:
        await self._command(WakeWorker(kv_bytes=kv_bytes), Done)

    async def resize(self, kv_bytes: int) -> int:
        return (await self._command(ResizeKv(kv_bytes=kv_bytes), KvResized)).kv_bytes

    async def _command(self, command: Message, reply_type: type[M]) -> M:
        subject = lifecycle("decode", self.worker_id)
        return await self._scheduler.request(subject, command, reply_type, timeout_s=TIMEOUT_S)

    async def place(self, prompt: list[int], max_tokens: int) -> bytes:
        """Starts a greedy request. Returns its placement."""
        heartbeat = await self.until_state("ready", "draining", "standby")
        assert heartbeat.model is not None
        root = root_hash("tenant-a", heartbeat.model.revision)
        block_size = heartbeat.model.block_size
        request = Request(
            request_id="r",
            tenant_id="tenant-a",
            gateway_id=self._gateway.process_id,
            model=heartbeat.model.name,
            revision=heartbeat.model.revision,
            cache_root=root,
            prompt_token_ids=pack_token_ids(prompt),
            block_hashes=pack_hashes(extend_chain(root, prompt, block_size)),
            sampling=SamplingParams(
                seed=1, max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            ),
            choices=(Choice(choice_index=0),),
            deadline_s=TIMEOUT_S,
            block_size=block_size,
        )
        placement_id = os.urandom(16)  # another client may have used this worker
        command = StartDecode(placement_id=placement_id, request=request, prefill_candidates=())
        await self._scheduler.request(
            start_decode(self.worker_id), command, DecodeStarted, timeout_s=TIMEOUT_S
        )
        return placement_id

    def tokens_of(self, placement_id: bytes) -> list[int]:
        found = self._tokens.get(placement_id, {})
        return [found[position] for position in sorted(found)]

    async def finished(self, placement_id: bytes) -> list[int]:
        """Returns all tokens, once they have ended as asked for."""
        await self.until(lambda: placement_id in self._ended)
        assert self._ended[placement_id].reason in ("length", "stop")
        return self.tokens_of(placement_id)

    def num_cached_tokens(self, placement_id: bytes) -> int:
        served = self._ended[placement_id].served
        assert served is not None
        return served.num_cached_tokens

    async def complete(self, prompt: list[int], max_tokens: int = 16) -> list[int]:
        return await self.finished(await self.place(prompt, max_tokens))

    def _on_heartbeat(self, heartbeat: Heartbeat) -> None:
        if heartbeat.process_id != self.worker_id:
            return
        self.heartbeat = heartbeat
        if not self.states or self.states[-1] != heartbeat.state:
            self.states.append(heartbeat.state)
        self._changed.set()

    def _on_events(self, events: KvEvents) -> None:
        self.events.append(events)
        self._changed.set()

    def _on_tokens(self, batch: TokenBatch) -> None:
        for entry in batch.entries:
            known = self._tokens.setdefault(entry.placement_id, {})
            known.update(enumerate(entry.token_ids, entry.first_position))
            if entry.finish is not None and entry.placement_id not in self._ended:
                self._ended[entry.placement_id] = entry.finish
                self._background.start_own(self._acknowledge(entry.placement_id))
        self._changed.set()

    async def _acknowledge(self, placement_id: bytes) -> None:
        message = AckFinished(placement_ids=(placement_id,))
        await self._gateway.publish(control("decode", self.worker_id), message)
