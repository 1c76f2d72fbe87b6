"""A cluster of a small random model that takes images, and the images for it."""

from __future__ import annotations

import base64
import contextlib
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shared.messages import Heartbeat, WorkerLoad
from tests.support.cluster.model_cluster import ModelCluster, run_model
from tests.support.services.seeing_dir import write_seeing_dir
from tests.support.services.vision_dir import SCALE

WORKERS = ("prefill-1", "prefill-2", "decode-1", "decode-2")
SLOW = {
    "image_size": 256,
    "patch_size": 16,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
}
TILES_OF_SLOW = 17
# Its 17 tiles take a second of CPU: several heartbeats.
STEADY = {
    **SLOW,
    "image_size": 128,
    "patch_size": 8,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
}


def is_encoding(load: WorkerLoad) -> bool:
    return load.num_encoded_tiles % TILES_OF_SLOW > 0


def is_receiving(load: WorkerLoad) -> bool:
    return load.num_handoffs_in_flight > 0


@contextlib.contextmanager
def running_model(
    folder: Path,
    vision: dict[str, int],
    scale: int = SCALE,
    workers: Iterable[str] = WORKERS,
    **more: Any,
) -> Iterator[ModelCluster]:
    """Serves a small random model with this encoder. `more` is of `run_model`."""
    model_dir = write_seeing_dir(folder / "smolvlm-tiny", vision, scale)
    options = {"dtype": "float32", "kv-cache-bytes": str(32 << 20)}
    with run_model(folder, model_dir, workers, options, **more) as running:
        yield running


def picture(seed: int, size: tuple[int, int] = (90, 70)) -> dict:
    """Returns a part of a chat message."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def content(*parts: dict | str) -> list[dict]:
    return [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts]


def workers_of(newest: dict[str, Heartbeat]) -> dict[str, Heartbeat]:
    return {name: each for name, each in newest.items() if each.load is not None}


def decoding(cluster: ModelCluster) -> str:
    """Returns the decode worker that generates an answer now."""

    def running(newest: dict[str, Heartbeat]) -> list[str]:
        workers = workers_of(newest).items()
        return [n for n, each in workers if n.startswith("decode") and each.load.num_running]

    (found,) = running(cluster.wait_for_heartbeats(lambda newest: bool(running(newest))))
    return found
