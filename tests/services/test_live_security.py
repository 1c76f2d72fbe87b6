"""Workers on a real NATS server: what the path of KV shows, and commands that a worker forges."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from shared.block_hash import extend_chain, root_hash, root_key
from shared.errors import InvalidRequest, WorkerBusy
from shared.messages import PrefillAccepted
from shared.packing import pack_hashes
from shared.subjects import run_prefill
from shared.transport.bus import NatsBus
from tests.support.recording_relay import recording_relay
from tests.support.servers import NatsServer
from tests.support.services.live_workers import (
    BLOCK_SIZE,
    REVISION,
    live_workers,
    request_of,
    run_prefill_of,
)
from tests.support.waiting import LIMIT_S

OTHER_HOST = "127.0.0.2"  # also this machine, but workers do not listen there
PROMPT, OTHER_PROMPT = list(range(100, 149)), list(range(500, 549))


@pytest.mark.parametrize(("security", "is_readable"), [("aead", False), ("none", True)])
async def test_relay_between_workers_sees_no_kv_of_the_prompt(
    nats_server: NatsServer, tmp_path: Path, security: str, is_readable: bool
) -> None:
    async with live_workers(
        nats_server, tmp_path, advertised_host=OTHER_HOST, security=security
    ) as it:
        listens_on = OTHER_HOST, it.data_plane.port
        async with recording_relay(it.data_plane, listens_on=listens_on) as (relay, _):
            await it.place(request_of(PROMPT))
            finish = await it.finish()
        assert finish.served.num_pushed_tokens == len(PROMPT) - 1
        states = [bytes(row) for row in it.executors["prefill-1"]._kv if row.any()]
        assert len(states) == len(PROMPT) - 1
        keys_and_values = [half for state in states for half in (state[:8], state[8:])]
        assert any(each in relay.recorded for each in keys_and_values) is is_readable
        assert all(each in relay.recorded for each in keys_and_values) is is_readable


# ── forgeries with the credential of another decode worker ───────────────────────────────────────


async def test_prefill_refuses_tokens_under_the_hashes_of_others(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with live_workers(nats_server, tmp_path) as it:
        decode = it.processes["decode-1"]._worker.bus
        root = root_hash("tenant-a", REVISION)
        hashes = pack_hashes(extend_chain(root, OTHER_PROMPT, BLOCK_SIZE))
        command = run_prefill_of(it, PROMPT, decode_worker_id="decode-1", block_hashes=hashes)
        with pytest.raises(InvalidRequest, match="block_hashes are not those of the tokens"):
            await decode.request(
                run_prefill("prefill-1"), command, PrefillAccepted, timeout_s=LIMIT_S
            )
        assert not it.processes["prefill-1"]._worker.loop.engine.pool.cached_blocks()


async def test_prefill_pushes_to_the_data_plane_of_the_sender_only(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with live_workers(nats_server, tmp_path) as it:
        decode = it.processes["decode-1"]._worker.bus
        for changes in (
            {"host": "10.0.0.7"},
            {"port": it.data_plane.port + 1},
            {"unix_path": "/tmp/another"},
            {"instance_id": b"another"},
        ):
            address = msgspec.structs.replace(it.data_plane, **changes)
            targets = (msgspec.structs.replace(it.targets[0], address=address),)
            command = run_prefill_of(it, PROMPT, decode_worker_id="decode-1", targets=targets)
            with pytest.raises(InvalidRequest, match="targets are not those of decode-1"):
                await decode.request(
                    run_prefill("prefill-1"), command, PrefillAccepted, timeout_s=LIMIT_S
                )
        other = await NatsBus.connect(nats_server.url("decode-2"), process_id="decode-2")
        with pytest.raises(WorkerBusy, match="has received no heartbeat of decode-2 yet"):
            await other.request(
                run_prefill("prefill-1"),
                run_prefill_of(it, PROMPT),
                PrefillAccepted,
                timeout_s=LIMIT_S,
            )
        await other.close()


async def test_decode_refuses_tokens_under_the_hashes_of_others(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    async with live_workers(nats_server, tmp_path) as it:
        good, other = request_of(PROMPT), request_of(OTHER_PROMPT)
        with pytest.raises(InvalidRequest, match="block_hashes are not those of the tokens"):
            await it.place(msgspec.structs.replace(good, block_hashes=other.block_hashes))
        await it.place(good)
        assert (await it.finish()).reason == "length"


async def test_guessed_root_finds_no_cached_block(nats_server: NatsServer, tmp_path: Path) -> None:
    """Who does not hold the cluster secret cannot name the blocks of a prompt that is cached."""
    root = root_hash("tenant-a", REVISION, key=root_key("the secret of the cluster"))
    num_cached = []
    async with live_workers(nats_server, tmp_path) as it:
        for number, each in enumerate((root, root, root_hash("tenant-a", REVISION))):
            it.batches.clear()
            await it.place(request_of(PROMPT, root=each), placement_id=bytes([number]) * 16)
            num_cached.append((await it.finish()).served.num_cached_tokens)
    assert num_cached == [0, len(PROMPT) // BLOCK_SIZE * BLOCK_SIZE, 0]
