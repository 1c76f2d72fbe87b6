"""What a host plans for a model, and gives its worker."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from services.cli.cluster.service_options import DEMO_MODEL_DIR
from services.host import sources
from services.host.budget import ModelKey
from services.host.device_models import DeviceModels
from services.host.devices import weight_item_bytes
from services.host.hosted_revisions import HostedRevision
from services.host.sources import PROCESS_BYTES, ModelSource, has_fp8, planned_source
from services.host.workers.worker_config import worker_config
from shared.config import HostConfig, WorkerConfig, default_block_size
from shared.errors import ConfigError
from shared.model_registry.record import RegisteredModel, RegisteredRevision

REVISION = RegisteredRevision(name="r1", source=str(DEMO_MODEL_DIR))
MODEL = RegisteredModel(name="m", revisions=(REVISION,), max_context_tokens=100)


def planned(model: RegisteredModel, device: str, found: Path = DEMO_MODEL_DIR) -> ModelSource:
    revision = RegisteredRevision(name="r1", source=str(found))
    return planned_source(found, model, revision, device, has_fp8=has_fp8(device))


def config_of(
    source: ModelSource, model: RegisteredModel, device: str, *, offloaded_bytes: int = 0
) -> WorkerConfig:
    key = ModelKey("m", "r1")
    host = HostConfig(
        nats_url="nats://x",
        worker_nats_url="nats://w@x",
        redis_url="redis://x",
        process_id="host-1",
    )
    memory = source.memory(key, model, 1 << 30, None)
    memory = msgspec.structs.replace(memory, offloaded_bytes=offloaded_bytes)
    hosted = HostedRevision(key, model, REVISION, source=source)
    place = DeviceModels(device, budget_bytes=3 << 30)
    return worker_config(host, hosted, memory, "w.m-1", place, None)


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_workers_have_the_block_size_of_their_device(device: str) -> None:
    """As those that are started without a host, whose requests they share."""
    source = planned(MODEL, device)
    config = config_of(source, MODEL, device)
    size = default_block_size(device)
    assert config.block_size == size
    assert config.kv_floor_bytes is not None
    num_blocks, rest = divmod(config.kv_floor_bytes, size * source.kv_bytes_per_token)
    assert (num_blocks, rest) == (-(-100 // size) + 2, 0)
    assert config.kv_ceiling_bytes is not None
    assert config.kv_ceiling_bytes % (size * source.kv_bytes_per_token) == 0


def test_worker_on_a_gpu_is_bound_by_the_budget_and_has_its_steps_planned() -> None:
    """Whoever else is on the card keeps its memory. Steps on CUDA are larger than on CPUs."""
    on_cpu, on_gpu = [planned(MODEL, each) for each in ("cpu", "cuda:1")]
    assert config_of(on_cpu, MODEL, "cpu").gpu_memory == ""
    config = config_of(on_gpu, MODEL, "cuda:1")
    assert config.gpu_memory == "3GiB"
    assert "gpu_memory" not in " ".join(config.problems())
    steps = [
        each.process_bytes - PROCESS_BYTES[device]
        for each, device in ((on_cpu, "cpu"), (on_gpu, "cuda"))
    ]
    assert steps[1] > steps[0]


def test_weights_leave_the_device_only_with_memory_of_the_host() -> None:
    source = planned(MODEL, "cuda:1")
    assert config_of(source, MODEL, "cuda:1").parked_weights == "device"
    config = config_of(source, MODEL, "cuda:1", offloaded_bytes=source.weights_bytes)
    assert config.parked_weights == "host"


def test_kv_is_planned_in_the_dtype_that_the_worker_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the models fit where a checkpoint declares FP8. Of CUDA devices, some have none."""
    for each in DEMO_MODEL_DIR.iterdir():
        (tmp_path / each.name).symlink_to(each)
    config = json.loads((tmp_path / "config.json").read_text())
    declared = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": declared}))
    capabilities = [(8, 6), (9, 0)]
    monkeypatch.setattr(sources, "compute_capability", capabilities.__getitem__)
    for device in ("cpu", "cuda:0", "cuda:1"):
        plain = planned(MODEL, device)
        own = planned(MODEL, device, tmp_path)
        factor = 1 if device == "cuda:0" else weight_item_bytes(device)
        assert own.kv_bytes_per_token * factor == plain.kv_bytes_per_token
        assert own.weights_bytes == plain.weights_bytes


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_kv_is_planned_and_stored_in_the_dtype_that_the_registry_names(device: str) -> None:
    in_fp8 = msgspec.structs.replace(MODEL, kv_dtype="fp8")
    plain, own = [planned(each, device) for each in (MODEL, in_fp8)]
    assert own.kv_bytes_per_token * weight_item_bytes(device) == plain.kv_bytes_per_token
    assert config_of(own, in_fp8, device).kv_dtype == "fp8"
    assert config_of(plain, MODEL, device).kv_dtype == "auto"


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    """In the words of `hearth plan` and `hearth up`."""
    for each in DEMO_MODEL_DIR.iterdir():
        name = "model.gguf" if each.suffix == ".safetensors" else each.name
        (tmp_path / name).symlink_to(each)
    for source in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ConfigError, match=rf"^source '{source}': .*GGUF is not served: safe"):
            planned(MODEL, "cpu", source)
