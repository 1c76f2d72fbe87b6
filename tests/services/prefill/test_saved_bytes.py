"""What compression has saved is told with each heartbeat."""

from __future__ import annotations

from tests.services.decode.test_handoff import cluster
from tests.simulation.clock import run


def test_a_prefill_worker_tells_what_it_did_not_have_to_send() -> None:
    async def main() -> None:
        async with cluster() as it:
            compressed = it.prefills[0].dialer.compressed
            compressed.num_frames, compressed.num_saved_bytes = 3, 4096
            load = it.prefills[0].worker._load()
            assert (load.num_compressed_kv_frames, load.saved_kv_bytes) == (3, 4096)

    run(main())
