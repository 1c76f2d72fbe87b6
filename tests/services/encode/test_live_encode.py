"""Encode workers beside workers of a model, on a real NATS server with its permissions: pixels,
vectors and KV go over real links, and this test is the gateway.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from services.gateway.images.pixel_access import check_fetch
from services.worker.encode_worker import EncodeWorker, build_encode_worker
from services.worker.worker import WorkerProcess, build_worker
from shared.block_hash import image_extras, prompt_chain, root_hash
from shared.clock import MonotonicClock
from shared.config import EncodeConfig, WorkerConfig
from shared.engine.vision import remote_vectors
from shared.kv_wire.dialer import Dialer
from shared.lifecycle.heartbeat import HealthMonitor
from shared.messages import (
    Choice,
    DecodeStarted,
    Request,
    SamplingParams,
    StartDecode,
    TokenBatch,
)
from shared.packing import pack_hashes, pack_token_ids
from shared.pixels.pixel_holder import PixelHolder
from shared.randomness import SystemRandomness
from shared.subjects import start_decode, tokens
from shared.transport.bus import NatsBus
from shared.transport.server_config import NatsUser
from tests.support.engine.vision.vision_models import Picture, picture, prompt_with, write_smolvlm
from tests.support.servers import PASSWORD, NatsServer
from tests.support.waiting import LIMIT_S, until

MODEL, GATEWAY = "eyes", "gateway-1"
ENCODERS, PREFILLS = ("encode-1", "encode-2"), ("prefill-1", "prefill-2")
NAMES = {
    **dict.fromkeys(ENCODERS, "encode"),
    **dict.fromkeys(PREFILLS, "prefill"),
    "decode-1": "decode",
    GATEWAY: "gateway",
    "scheduler-1": "scheduler",
}
NUM_NEW, START_S = 3, 60.0


@dataclass
class Live:
    gateway: NatsBus
    scheduler: NatsBus
    holder: PixelHolder
    encoders: dict[str, EncodeWorker]
    workers: dict[str, WorkerProcess]
    received: dict[bytes, dict[int, int]] = field(default_factory=dict)
    ended: dict[bytes, str] = field(default_factory=dict)
    num_requests: int = 0

    @property
    def card(self):
        return self.workers["decode-1"]._worker.served.card

    def take(self, batch: TokenBatch) -> None:
        for entry in batch.entries:
            output = self.received.setdefault(entry.placement_id, {})
            output.update(enumerate(entry.token_ids, entry.first_position))
            if entry.finish is not None:
                self.ended[entry.placement_id] = entry.finish.reason

    async def ask(
        self, *images: Picture, text: int = 7, tenant: str = "a", is_zero_retention: bool = False
    ) -> list[int]:
        """Returns the answer to a prompt that begins with the token `text`."""
        self.num_requests += 1
        number = self.num_requests
        prompt, parts = prompt_with([text, 3, 4], *images, [5, 6, 8])
        root, size = root_hash(tenant, self.card.revision), self.card.block_size
        packed = pack_token_ids(prompt)
        chain = prompt_chain(
            packed[: len(prompt) // size * size * 4],
            size,
            cache_root=root,
            public_root=None,
            num_public_blocks=0,
            extras=image_extras(parts, size),
        )
        request = Request(
            request_id=f"request-{number}",
            tenant_id=tenant,
            gateway_id=GATEWAY,
            model=MODEL,
            revision=self.card.revision,
            cache_root=root,
            prompt_token_ids=packed,
            block_hashes=pack_hashes(chain),
            sampling=SamplingParams(seed=1, max_tokens=NUM_NEW, temperature=0.0),
            choices=(Choice(choice_index=0),),
            deadline_s=240.0,
            images=parts,
            is_zero_retention=is_zero_retention,
        )
        for each in images:
            pixels = bytearray(each.pixels.tobytes())
            shape = each.pixels.shape
            self.holder.put(request.request_id, tenant, each.image_hash, pixels, shape)
        placement_id = number.to_bytes(16, "big")
        command = StartDecode(
            placement_id=placement_id,
            request=request,
            prefill_candidates=(PREFILLS[number % 2], PREFILLS[1 - number % 2]),
        )
        subject = start_decode("decode-1")
        await self.scheduler.request(subject, command, DecodeStarted, timeout_s=30.0)
        await until(lambda: placement_id in self.ended, timeout_s=240)
        self.holder.forget(request.request_id)
        assert self.ended[placement_id] == "length", self.ended
        output = self.received[placement_id]
        return [output[position] for position in sorted(output)]

    def is_asked(self, name: str) -> bool:
        """Whether any worker may still ask this one."""
        monitors = [each._worker.health_monitor for each in self.workers.values()]
        live = (beat for each in monitors for beat in each.fleet.live("encode"))
        return any(beat.process_id == name for beat in live)

    def counts(self, field_name: str) -> Counter[str]:
        found = Counter[str]()
        for name, each in self.encoders.items():
            found[NAMES[name]] += getattr(each._jobs.counts, field_name)
        for name, worker in self.workers.items():
            assert worker._worker.images is not None
            found[NAMES[name]] += getattr(worker._worker.images._jobs.counts, field_name)
        return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    users = [NatsUser(role, name, PASSWORD) for name, role in NAMES.items()]  # type: ignore[arg-type]
    server = NatsServer(tmp_path_factory.mktemp("nats"), users)
    yield server
    server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def live(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Live]:
    folder: Path = tmp_path_factory.mktemp("model")
    write_smolvlm(folder)
    clock, randomness = MonotonicClock(), SystemRandomness()
    async with AsyncExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(remote_vectors, "PATIENCE_S", 240.0)  # a busy machine is no slow worker

        async def connected(name: str) -> NatsBus:
            bus = await NatsBus.connect(server.url(name), process_id=name)
            stack.push_async_callback(bus.close)
            return bus

        gateway, scheduler = await connected(GATEWAY), await connected("scheduler-1")
        monitor = HealthMonitor(gateway, clock, randomness, roles=("gateway",))
        check = partial(check_fetch, monitor.fleet, monitor.refusals)
        holder = PixelHolder(gateway, Dialer(5.0), check)
        it = Live(gateway, scheduler, holder, {}, {})
        await gateway.subscribe(tokens(GATEWAY), TokenBatch, it.take)
        await monitor.start()
        stack.push_async_callback(monitor.stop)
        await holder.start()
        stack.push_async_callback(holder.close)
        await monitor.transition_to("ready")
        for name, role in NAMES.items():
            given = {"nats_url": server.url(name), "process_id": name, "model_dir": folder}
            given |= {"model_name": MODEL, "device": "cpu", "dtype": "float32", "num_threads": 1}
            if role == "encode":
                it.encoders[name] = encoder = await build_encode_worker(EncodeConfig(**given))
                await encoder.start()
                stack.push_async_callback(encoder.stop)
            elif role in ("prefill", "decode"):
                config = WorkerConfig(**given, kv_cache_bytes=16 << 20)
                it.workers[name] = worker = await build_worker(config, (role,))
                await worker.start()
                stack.push_async_callback(worker.stop)
        known = (*ENCODERS, *PREFILLS, "decode-1", GATEWAY)
        monitors = [each._worker.health_monitor for each in it.workers.values()]
        monitors += [each._monitor for each in it.encoders.values()]

        def know_each_other() -> bool:
            return all(
                each.fleet.is_live(name) or name == each.fleet.own_process_id
                for each in (*monitors, monitor)
                for name in known
                if name != each.fleet.own_process_id
            ) and all(len(list(each.fleet.live("encode"))) >= 1 for each in monitors[:3])

        await until(know_each_other, timeout_s=START_S)
        yield it


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_one_image_of_64_prompts_is_encoded_once_and_64_images_once_each(live: Live) -> None:
    before = live.counts("num_encoded")
    shared = picture(1)
    await asyncio.gather(*(live.ask(shared, text=20 + number) for number in range(64)))
    assert live.counts("num_encoded") - before == {"encode": 1}
    before = live.counts("num_encoded")
    of_two = [picture(50 + number) for number in range(8)]  # one at each prefill worker
    await asyncio.gather(*(live.ask(each, text=92 + n) for each in of_two for n in range(2)))
    assert live.counts("num_encoded") - before == {"encode": 8}
    before = live.counts("num_encoded")
    each_own = [picture(100 + number) for number in range(64)]
    await asyncio.gather(*(live.ask(each, text=90) for each in each_own))
    assert live.counts("num_encoded") - before == {"encode": 64}
    shares = [each._jobs.counts.num_encoded for each in live.encoders.values()]
    assert min(shares) >= 10, shares
    assert all(each.report().heartbeat.load for each in live.encoders.values())


async def test_another_tenants_image_is_encoded_for_it(live: Live) -> None:
    before = live.counts("num_encoded")
    of_a = await live.ask(picture(2))
    assert await live.ask(picture(2), tenant="b") == of_a
    assert live.counts("num_encoded") - before == {"encode": 2}


async def test_nothing_of_zero_retention_stays_with_an_encode_worker(live: Live) -> None:
    caches = [each._jobs._cache for each in live.encoders.values()]
    before = [each.num_bytes for each in caches]
    await live.ask(picture(3), tenant="z", is_zero_retention=True)
    await until(lambda: not any(each._service.num_unfinished for each in live.encoders.values()))
    assert [each.num_bytes for each in caches] == before


async def test_answers_are_the_same_while_encode_workers_leave(live: Live) -> None:
    """With both, with one, and with none of them, when each worker encodes itself."""
    images = picture(4, (1, 2)), picture(5)
    answers = [await live.ask(*images, tenant="both")]
    for name, encoder in live.encoders.items():
        await encoder.drain()
        await until(lambda name=name: not live.is_asked(name))
        before = live.counts("num_encoded")
        answers.append(await live.ask(*images, tenant=name))
    assert len({tuple(each) for each in answers}) == 1 and len(answers[0]) == NUM_NEW
    assert (live.counts("num_encoded") - before)["encode"] == 0
    assert sum((live.counts("num_encoded") - before).values()) == 2


async def test_workers_whose_encoder_has_lost_its_device_leave(live: Live) -> None:
    engine = live.workers["prefill-1"]._worker
    assert engine.images is not None
    for worker, jobs in (
        (live.encoders["encode-1"], live.encoders["encode-1"]._jobs),
        (engine, engine.images._jobs),
    ):
        gone = asyncio.Event()
        worker._on_device_lost = gone.set  # type: ignore[method-assign]
        jobs._on_device_lost("a kernel failed")
        await asyncio.wait_for(gone.wait(), LIMIT_S)
