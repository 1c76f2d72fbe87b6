from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import pytest_asyncio
from PIL import Image

from services.gateway.service import GatewayService, build_gateway
from services.gateway.text.model_files import ModelFiles
from shared.messages import Request
from shared.pixels.pixel_frames import IMAGES_FEATURE
from tests.services.gateway.conftest import SharedCluster, http_client
from tests.services.gateway.peer import CARD, PeerDecode
from tests.support.services.vision_dir import write_vision_dir
from tests.support.waiting import until

MODEL = "eyes"


def picture(width: int = 100, height: int = 60, seed: int = 1, kind: str = "PNG") -> bytes:
    rng = np.random.default_rng(seed)
    buffer = BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64_of(data)}"


@dataclass
class Eyes:
    """A gateway whose model takes images, and a worker that answers anything."""

    gateway: GatewayService
    http: httpx.AsyncClient
    worker: PeerDecode
    files: ModelFiles

    @property
    def held_bytes(self) -> int:
        return self.gateway.pixels.num_bytes

    async def ended(self) -> None:
        await until(lambda: not len(self.gateway._driver) and not self.held_bytes)

    async def request_of(self, path: str, body: dict[str, Any]) -> Request:
        """Sends the body. Returns the request that the worker got."""
        self.worker.forget()
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        ((run,),) = [[*each.values()] for each in self.worker.runs.values()]
        await self.ended()
        return run.request


@pytest.fixture(scope="session")
def vision_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_dir(tmp_path_factory.mktemp("vision") / MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def eyes(shared_cluster: SharedCluster, vision_dir: Path) -> AsyncIterator[Eyes]:
    cluster = await shared_cluster.open()
    files = ModelFiles(vision_dir)
    size = 1 + max(files.tokens.added_ids.values())
    card = msgspec.structs.replace(
        CARD,
        name=MODEL,
        features=(*CARD.features, IMAGES_FEATURE),
        vocab_size=size,
        max_context_tokens=2048,
    )
    bus = await cluster.bus_of("decode-3")
    worker = PeerDecode(bus, files.tokenizer.encode(["a red fox"]), card=card)
    config = msgspec.structs.replace(
        cluster.gateway._config,
        nats_url=cluster.nats_server.url("gateway-2"),
        process_id="gateway-2",
        model_dir=vision_dir,
        max_body_bytes=300 << 10,
        max_image_body_bytes=2 << 20,
        tool_format="hermes",
    )
    gateway = await build_gateway(config)
    await worker.start()
    await gateway.start()
    cluster.scheduler.workers.append(worker)
    try:
        await until(lambda: gateway.readiness().ready)
        async with http_client(gateway) as http:
            yield Eyes(gateway, http, worker, files)
    finally:
        cluster.scheduler.workers.remove(worker)
        await gateway.stop()
        await worker.stop()
