"""`hearth tenant show --where`, about simulated workers with timing engines."""

from __future__ import annotations

from services.cli.tenants.tenant_where import WorkerKv, count_kv
from shared.sites.tenant_names import shared_name
from tests.services.kv_index.test_kv_dropper import DropRig, scenario


def test_tenant_of_another_site_is_counted_under_the_name_that_it_shares() -> None:
    async def test(rig: DropRig) -> None:
        worker = await rig.engine("decode-0", region="fr")
        await rig.cache(worker, "b/acme", shared_name("b/acme"), "acme", "b/other")
        asked = rig.peer.bus
        (of_other_site,) = await count_kv(asked, "b/acme")
        (of_this_site,) = await count_kv(asked, "acme")
        found = WorkerKv(worker="decode-0", region="fr", cached_tokens=96, shared_tokens=96)
        assert of_other_site == found
        assert of_this_site == WorkerKv(worker="decode-0", region="fr", cached_tokens=96)

    scenario(test)
