"""Settings that depend on a worker's device, before the model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.worker.worker import on_device
from shared.config import WorkerConfig
from shared.messages import Role


def config(device: str) -> WorkerConfig:
    return WorkerConfig(
        process_id="worker-1",
        nats_url="nats://worker-1:secret@127.0.0.1:4222",
        model_dir=Path("shared/demo_model"),
        device=device,
    )


@pytest.mark.parametrize(
    ("device", "roles", "max_batch_tokens"),
    [
        ("cpu", ("prefill",), 512),
        ("cuda:1", ("prefill",), 8192),
        ("cuda:1", ("decode",), 2048),
        ("cuda:1", ("prefill", "decode"), 2048),
    ],
)
def test_max_batch_tokens_follows_device_and_roles(
    device: str, roles: tuple[Role, ...], max_batch_tokens: int
) -> None:
    found = on_device(config(device), roles)
    assert (found.device, found.max_batch_tokens) == (device, max_batch_tokens)


def test_auto_selects_cuda_if_available() -> None:
    found = on_device(config("auto"), ("decode",))
    assert found.device == ("cuda" if torch.cuda.is_available() else "cpu")
