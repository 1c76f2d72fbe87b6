"""Computes what a worker of a model will take before its first start, from the files of its
checkpoint. Anybody may have written them: `source_process.py` reads them.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from services.host.budget import ModelKey, ModelMemory
from services.host.devices import weight_item_bytes
from services.local.gpus import compute_capability
from services.local.hub_download import is_hub_id
from shared.config import default_batch_tokens, default_block_size
from shared.engine.checkpoint_check import check_checkpoint
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.planning.kv_plan import kv_item_bytes
from shared.engine.planning.memory_plan import StepSize, plan_memory
from shared.errors import CheckpointError, ConfigError
from shared.model_registry.record import RegisteredModel, RegisteredRevision
from shared.numerics import FP8_CAPABILITY

DEFAULT_CONTEXT_TOKENS = 4096
NUM_SPARE_BLOCKS = 2  # blocks beyond those of one sequence
MAX_SEQUENCES = 256  # a cache for more full contexts than these is useless
PROCESS_BYTES = {"cpu": 200 << 20, "cuda": 700 << 20}  # assumed until it is measured


class ModelSource(msgspec.Struct, frozen=True, kw_only=True):
    """The weights of a model. Workers open `model_dir`. `block_size` is the device's, in tokens.
    Bytes are planned; a start measures them.
    """

    model_dir: str
    block_size: int
    max_context_tokens: int
    kv_bytes_per_token: int
    weights_bytes: int
    process_bytes: int

    @property
    def kv_floor_bytes(self) -> int:
        num_blocks = -(-self.max_context_tokens // self.block_size) + NUM_SPARE_BLOCKS
        return num_blocks * self.block_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_size * self.kv_bytes_per_token

    def kv_ceiling_bytes(self, budget_bytes: int) -> int:
        """Returns the bytes that a budget leaves it at most, in whole blocks."""
        useful = min(budget_bytes - self.weights_bytes, MAX_SEQUENCES * self.kv_floor_bytes)
        return max(self.kv_floor_bytes, useful // self.block_bytes * self.block_bytes)

    def memory(
        self, key: ModelKey, model: RegisteredModel, budget_bytes: int, process_bytes: int | None
    ) -> ModelMemory:
        return ModelMemory(
            key=key,
            weights_bytes=self.weights_bytes,
            process_bytes=self.process_bytes if process_bytes is None else process_bytes,
            kv_floor_bytes=self.kv_floor_bytes,
            kv_ceiling_bytes=self.kv_ceiling_bytes(budget_bytes),
            priority=model.priority,
            is_standby_wanted=model.num_standby > 0 or model.is_pinned,
        )


def planned_source(
    found: Path, model: RegisteredModel, revision: RegisteredRevision, device: str, *, has_fp8: bool
) -> ModelSource:
    """Returns the source in the directory `found`. `has_fp8`: of the device. Raises ConfigError for
    a checkpoint that cannot be served.
    """
    if not found.exists():
        hint = "" if is_hub_id(found) else ", and no hub id such as org/name"
        raise ConfigError(f"source {revision.source!r} is not a directory on this host{hint}")
    try:
        config = check_checkpoint(found, needs_weights=True).config
        item_bytes = weight_item_bytes(device)
        stored = _kv_item_bytes(config, model.kv_dtype, item_bytes, has_fp8=has_fp8)
        (planned,) = plan_memory(
            config,
            tp=1,
            pp=1,
            item_bytes=item_bytes,
            kv_item_bytes=stored,
            step=StepSize(max_batch_tokens=default_batch_tokens(device)),
        )
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"source {revision.source!r}: {error.message}") from None
    limit = model.max_context_tokens or DEFAULT_CONTEXT_TOKENS
    return ModelSource(
        model_dir=str(found.resolve()),
        block_size=default_block_size(device),
        max_context_tokens=min(limit, config.max_position_embeddings),
        kv_bytes_per_token=planned.kv_bytes_per_token,
        weights_bytes=planned.weight_bytes,
        process_bytes=PROCESS_BYTES[device.partition(":")[0]] + planned.workspace_bytes,
    )


def _kv_item_bytes(config: ModelConfig, given: str, item_bytes: int, *, has_fp8: bool) -> int:
    """Returns the bytes of a KV element in the worker's cache. On CUDA devices without FP8, `auto`
    means BF16.
    """
    dtype = "bfloat16" if item_bytes == 2 else "float32"
    is_declared_alone = given == "auto" and config.declares_fp8_kv
    is_bf16 = is_declared_alone and not has_fp8
    return kv_item_bytes(config, "bf16" if is_bf16 else given, dtype)


def has_fp8(device: str) -> bool:
    """Whether the device computes in FP8."""
    kind, _, index = device.partition(":")
    return kind == "cpu" or (compute_capability(int(index or 0)) or (0, 0)) >= FP8_CAPABILITY
