"""Computes what every rank of a worker would hold, from the config alone. No torch.

Weights and KV are exact; the workspace is an estimate of the largest step's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shared.config import ExpertSplit, default_block_size
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.model_config.moe_config import MoeConfig
from shared.engine.parallel.cuts import whole_blocks
from shared.engine.parallel.mesh_shape import MeshShape
from shared.engine.parallel.rank_part import RankPart, whole_model
from shared.engine.planning.kv_plan import KvPlan, kv_plan
from shared.engine.planning.rank_bytes import FP32_BYTES, kv_values_per_token, weight_bytes
from shared.engine.planning.vision_tensors import encoder_bytes
from shared.engine.planning.worker_parts import worker_parts
from shared.errors import ConfigError

KV_SHARE = 0.9  # share of the memory that weights and workspace leave
_UNITS = (("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """The largest step."""

    max_batch_tokens: int = 512
    max_sequences: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """Bytes of each rank: of all its memory, and of its KV cache; None: by `KV_SHARE`."""

    memory_bytes: int | None = None
    kv_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemoryPlan:
    """The bytes of one rank.

    `num_kv_tokens` is the longest sequence that fits its KV cache of `kv_bytes`; both are None if
    no memory was given. `kv` is None without layers.
    """

    stage: int
    tp_rank: int
    part: RankPart
    weight_bytes: int
    workspace_bytes: int
    kv_bytes_per_token: int
    kv: KvPlan | None
    kv_bytes: int | None
    num_kv_tokens: int | None


def plan_memory(
    config: ModelConfig,
    *,
    tp: int,
    pp: int,
    item_bytes: int,
    kv_item_bytes: int | None = None,
    block_size: int = default_block_size("cuda"),
    limit: MemoryLimit = MemoryLimit(),
    step: StepSize = StepSize(),
    experts: ExpertSplit = "auto",
) -> list[RankMemoryPlan]:
    """Returns the memory of the ranks, by stage.

    `item_bytes` is the size of a weight that is not quantized, and without `kv_item_bytes`
    also of a KV value. Raises ConfigError if the model cannot be cut like this or a rank's
    part does not fit.
    """
    try:
        shape = MeshShape(tp, pp)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    encoder = encoder_bytes(config.vision, item_bytes)  # the worker's, beside its first rank
    return [
        _rank_memory(
            config,
            (*shape.place(rank), part),
            (item_bytes, item_bytes if kv_item_bytes is None else kv_item_bytes),
            block_size,
            limit,
            step,
            weight_bytes(config, part, item_bytes) + (0 if rank else encoder),
        )
        for rank, part in enumerate(worker_parts(config, shape, experts))
    ]


def num_kv_tokens(ranks: list[RankMemoryPlan]) -> int | None:
    """Returns the tokens that the worker's KV cache holds: as many as its fullest rank's."""
    found = [each.num_kv_tokens for each in ranks if each.kv_bytes_per_token]
    return None if None in found else min(filter(None, found), default=0)


def whole_kv_bytes(config: ModelConfig, item_bytes: int) -> int:
    """Returns the bytes of a token's KV in all layers and heads, each once."""
    return kv_values_per_token(config, whole_model(config)) * item_bytes


def num_sequences(ranks: list[RankMemoryPlan], num_tokens: int) -> tuple[int, int] | None:
    """Sequences of so many tokens that the worker's KV cache holds, and how many it would hold if
    every layer kept all tokens; None: no memory was given.
    """
    found = [(each.kv, each.kv_bytes) for each in ranks if each.kv is not None]
    counts = []
    for kv, kv_bytes in found:
        if kv_bytes is None:
            return None
        whole = replace(kv, reaches=(None,) * len(kv.reaches))
        counts.append([each.num_sequences(kv_bytes, num_tokens) for each in (kv, whole)])
    grouped, plain = (min(each) for each in zip(*counts, strict=True))
    return grouped, plain


def _rank_memory(
    config: ModelConfig,
    place: tuple[int, int, RankPart],
    item_bytes: tuple[int, int],
    block_size: int,
    limit: MemoryLimit,
    step: StepSize,
    held_bytes: int,
) -> RankMemoryPlan:
    """Returns the plan of one rank. `item_bytes` are those of a value of activations, and of KV."""
    (stage, tp_rank, part), (value_bytes, kv_item_bytes) = place, item_bytes
    workspace_bytes = _workspace_bytes(config, part, value_bytes, step)
    per_token = kv_values_per_token(config, part) * kv_item_bytes
    kv = kv_plan(config, part, kv_item_bytes, block_size) if part.layers else None
    kv_bytes = limit.kv_bytes
    if limit.memory_bytes is not None:
        left = limit.memory_bytes - held_bytes - workspace_bytes
        if left < (per_token if kv_bytes is None else kv_bytes):
            raise ConfigError(
                f"rank {tp_rank} of stage {stage} needs {size_text(held_bytes)} for weights and "
                f"{size_text(workspace_bytes)} for the largest step"
                f"{'' if kv_bytes is None else f', beside {size_text(kv_bytes)} of KV'}: "
                f"{size_text(limit.memory_bytes)} are too few. Use more ranks (--tp, --pp) or "
                "more memory",
                param="memory",
            )
        kv_bytes = int(left * KV_SHARE) if kv_bytes is None else kv_bytes
    return RankMemoryPlan(
        stage=stage,
        tp_rank=tp_rank,
        part=part,
        weight_bytes=held_bytes,
        workspace_bytes=workspace_bytes,
        kv_bytes_per_token=per_token,
        kv=kv,
        kv_bytes=kv_bytes,
        num_kv_tokens=None if kv is None or kv_bytes is None else kv.longest_sequence(kv_bytes),
    )


def _workspace_bytes(config: ModelConfig, part: RankPart, item_bytes: int, step: StepSize) -> int:
    """Returns the bytes of hidden states before and after a layer, a layer's widest GEMMs,
    and all logits.
    """
    columns = max(len(part.columns), *(_expert_columns(layer.moe) for layer in config.layers))
    widest = max(_attention_width(config, part), 3 * columns) * item_bytes
    hidden = config.hidden_size * (3 * item_bytes + FP32_BYTES)
    logits = step.max_sequences * config.vocab_size * FP32_BYTES if part.has_head else 0
    return step.max_batch_tokens * (widest + hidden) + logits


def _attention_width(config: ModelConfig, part: RankPart) -> int:
    """Elements of a token's queries, keys and values; latents are attended to in their own width,
    by queries and their results.
    """
    if config.latent is None:
        return (len(part.heads) + 2 * len(part.kv_heads)) * config.head_dim
    row = config.latent.kv_rank + config.latent.rope_dim
    return len(part.heads) * (config.head_dim + 2 * row) + row


def _expert_columns(moe: MoeConfig | None) -> int:
    """Returns the columns of a token's rows in its experts."""
    return 0 if moe is None else moe.experts_per_token * whole_blocks(moe.intermediate_size)


def size_text(num_bytes: int) -> str:
    """Returns the size in three digits or more: `15.0 GiB`, `512 KiB`."""
    unit, shift = next(each for each in _UNITS if num_bytes >> each[1] or not each[1])
    size = num_bytes / (1 << shift)
    return f"{size:,.1f} {unit}" if size < 100 and shift else f"{size:,.0f} {unit}"
