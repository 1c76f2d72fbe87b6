"""An open stream of a tenant whose regions change, on a live gateway."""

from __future__ import annotations

import asyncio
import json

from services.gateway.streams.streams import Streams
from shared.tenancy.tenant_admin import TenantAdmin
from tests.services.gateway.conftest import Cluster, SharedCluster, http_client
from tests.services.gateway.dialects.openai.test_chat_http import BODY, CHAT
from tests.support.waiting import until


async def test_stream_ends_where_its_tenant_may_not_be_any_more(
    cluster: Cluster, shared_cluster: SharedCluster
) -> None:
    admin = TenantAdmin(shared_cluster.store, lambda: 0.0)
    await admin.add("moving", {}, "key of moving")
    first = cluster.decodes[0]
    first.hold_at = 5
    streams: Streams = cluster.gateway._driver._streams
    async with http_client(cluster.gateway, "key of moving") as http:
        reading = asyncio.create_task(http.post(CHAT, json={**BODY, "stream": True}))
        await until(lambda: any(e.queue.has_output for e in streams._by_request.values()))
        await admin.change("moving", {"allowed_regions": ("elsewhere",)})
        response = await reading
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        (error,) = (json.loads(each)["error"] for each in events if '"error"' in each)
        assert error["code"] == "no_region_allowed"
        assert error["message"].startswith("the regions of this tenant have changed: this process")
        assert (await first.aborts.get()).reason == "failed"
        refused = await http.post(CHAT, json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_region_allowed")
        await admin.change("moving", {"allowed_regions": None})
        first.hold_at = None

        async def is_served() -> bool:
            return (await http.post(CHAT, json=BODY)).status_code == 200

        await until(is_served)
    assert cluster.gateway._health_monitor.refusals.totals["gateway"] >= 2
