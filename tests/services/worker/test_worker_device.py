"""Settings that depend on a worker's device, before the model is loaded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from services.worker.image_port import load_image_encoder, vision_of
from services.worker.model_loading import load_model, on_device
from shared.config import WorkerConfig
from shared.engine.executors.group import load_cuda_rank
from shared.engine.executors.group.messages import DeviceSetup
from shared.engine.parallel.processes.group import GroupSpec
from shared.errors import ConfigError
from shared.messages import Role
from tests.support.engine.vision.vision_models import write_smolvlm


def config(device: str, **options: Any) -> WorkerConfig:
    return WorkerConfig(
        **options,
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


def test_process_of_a_device_gets_the_options_that_depend_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker's own process does not use the device, which this machine may not have."""
    started: list[GroupSpec] = []

    def start_group(spec: GroupSpec, *_: object) -> None:
        started.append(spec)
        raise InterruptedError

    monkeypatch.setattr(load_cuda_rank, "start_group", start_group)
    with pytest.raises(InterruptedError):
        given = config("cuda:1", device_process=True, mode="auto", executor="plain")
        load_model(on_device(given, ("decode",)))
    setup = msgspec.msgpack.decode(started[0].config, type=DeviceSetup)
    assert (setup.device, setup.mode, setup.options.executor) == ("cuda:1", "auto", "plain")
    assert setup.options.block_size == 64


@pytest.mark.parametrize("device", ["cpu", "auto", f"cuda:{torch.cuda.device_count()}"])
def test_image_encoder_is_on_the_device_of_the_worker(tmp_path: Path, device: str) -> None:
    """Of several GPUs on its own: this machine does not have the last of these."""
    write_smolvlm(tmp_path)
    given = msgspec.structs.replace(config(device), model_dir=tmp_path)
    vision = vision_of(given)
    assert vision is not None
    load = load_image_encoder(given, vision, "float32")
    if ":" in device:
        with pytest.raises(ConfigError, match=f"device '{device}' cannot be used"):
            asyncio.run(load)
    else:
        asyncio.run(asyncio.run(load).close())
