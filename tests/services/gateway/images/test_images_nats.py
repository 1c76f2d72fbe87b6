"""Images over NATS: the same request as over HTTP, within what a message of NATS holds."""

from __future__ import annotations

from typing import Any

import pytest

from services.client.hearth_nats import MAX_BODY_BYTES, ApiError, HearthClient
from shared.messages import Request
from tests.services.gateway.images.conftest import Eyes, data_url, picture
from tests.services.gateway.images.test_images_http import DOORS, chat, image_part, text_part
from tests.services.gateway.nats_api.conftest import connected, has_joined
from tests.support.servers import NatsServer
from tests.support.waiting import until


async def request_of(eyes: Eyes, client: HearthClient, body: dict[str, Any]) -> Request:
    """Returns the request that the worker gets. Any gateway may take the message, and the other one
    of this cluster does not know the model.
    """
    eyes.worker.forget()
    for _ in range(100):
        try:
            await client.request("chat", body)
            break
        except ApiError as error:
            if error.status != 404:
                raise
    ((run,),) = [[*each.values()] for each in eyes.worker.runs.values()]
    await eyes.ended()
    return run.request


async def test_an_image_over_nats_is_that_over_http(eyes: Eyes, nats_server: NatsServer) -> None:
    await until(lambda: has_joined(eyes.gateway))
    path, body = DOORS["chat"]
    over_http = await eyes.request_of(path, body)
    large = chat(image_part(data_url(picture(480, 480))), text_part())
    assert len(str(large)) > eyes.gateway._config.max_body_bytes
    async with connected(nats_server, "client-1") as (client, _):
        over_nats = await request_of(eyes, client, body)
        assert over_nats.images == over_http.images
        assert over_nats.prompt_token_ids == over_http.prompt_token_ids
        assert (await request_of(eyes, client, large)).images[0].grid == (4, 4)
        too_large = chat(image_part("data:image/png;base64," + "A" * MAX_BODY_BYTES))
        with pytest.raises(ApiError, match="use HTTP, not NATS") as refused:
            await client.request("chat", too_large)
        assert refused.value.status == 413
        assert (await request_of(eyes, client, body)).images  # the connection is still there
