from __future__ import annotations

from tests.services.decode.test_handoff import cluster
from tests.support.world.clock import run


def test_heartbeat_load_reports_saved_kv_bytes() -> None:
    async def main() -> None:
        async with cluster() as it:
            it.prefills[0].dialer.compressed.num_saved_bytes = 4096
            assert it.prefills[0].worker._load().saved_kv_bytes == 4096

    run(main())
