"""Receipts of requests over NATS, by the endpoint `receipt`."""

from __future__ import annotations

from typing import Any

import pytest

from services.client.hearth_nats import ApiError
from tests.services.gateway.nats_api.conftest import Api, all_of, next_of

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def test_receipts_over_nats(api: Api) -> None:
    reply = await next_of(await api.send("chat", BODY))
    assert reply.headers is not None
    promised = reply.headers["Hearth-Receipt"]
    issued = await api.client.request("receipt", {"request": reply.headers["Hearth-Request"]})
    assert issued["hash"] == promised
    messages = await all_of(await api.send("chat", {**BODY, "stream": True}))
    last = messages[-1].headers
    assert last is not None
    assert all(b"receipt" not in each.data for each in messages)
    issued = await api.client.request("receipt", {"request": last["Hearth-Request"]})
    assert issued["hash"] == last["Hearth-Receipt"]
    silent = await next_of(await api.send("chat", BODY, headers={"Hearth-Receipt": "off"}))
    assert "Hearth-Receipt" not in (silent.headers or {})
    for body, status in (({"request": "unknown"}, 404), ({"id": 1}, 400)):
        with pytest.raises(ApiError) as caught:
            await api.client.request("receipt", body)
        assert caught.value.status == status
