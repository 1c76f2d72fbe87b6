"""What compression has saved is told with each heartbeat."""

from __future__ import annotations

from tests.services.decode.test_handoff import cluster
from tests.simulation.world.clock import run


def test_a_prefill_worker_tells_what_it_did_not_have_to_send() -> None:
    async def main() -> None:
        async with cluster() as it:
            it.prefills[0].dialer.compressed.num_saved_bytes = 4096
            assert it.prefills[0].worker._load().saved_kv_bytes == 4096

    run(main())
