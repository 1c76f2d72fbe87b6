"""The bytes and operations of a dense model, and the least time for them on a session's card."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_kit.session import Session
from shared.engine.model_config.model_config import ModelConfig
from shared.engine.models import FAMILIES
from shared.engine.parallel.rank_part import whole_model
from shared.engine.planning import rank_bytes
from shared.engine.planning.step_work import ModelWorkload, StepWork, model_work

ITEM_BYTES = 2  # BF16, of weights and KV


def decode_s(session: Session, config: dict[str, Any], batch: int, context: int) -> float:
    """Returns the least seconds of a decode step, bound by reading; NaN on an unknown card."""
    work = step_work(config, [context - 1] * batch, [1] * batch)
    return work.num_bytes / session.ceiling("copy_bytes_s")


def prefill_s(session: Session, config: dict[str, Any], num_tokens: int) -> float:
    """Returns the least seconds of a prefill, bound by computing; NaN on an unknown card."""
    return step_work(config, [0], [num_tokens]).num_operations / session.ceiling("matmul_flops")


def mixed_s(
    session: Session, config: dict[str, Any], batch: int, context: int, num_tokens: int
) -> float:
    """Returns the least seconds of a decode step beside tokens of a prompt, bound by the products
    of all tokens and by reading the KV of each sequence.
    """
    products = 2.0 * _work(config).layer_weights * (batch + num_tokens)
    kv = (batch + 1) * context * kv_bytes_per_token(config)
    return products / session.ceiling("matmul_flops") + kv / session.ceiling("copy_bytes_s")


def step_work(config: dict[str, Any], starts: list[int], counts: list[int]) -> StepWork:
    """Returns the work of a step of sequences that sample: see `ModelWorkload.of`."""
    return _work(config).of(starts, counts, len(starts))


def weight_bytes(config: dict[str, Any]) -> int:
    """Returns the bytes of all weights: layers, embedding and head."""
    model = _model(config)
    return rank_bytes.weight_bytes(model, whole_model(model), ITEM_BYTES)


def kv_bytes_per_token(config: dict[str, Any]) -> int:
    model = _model(config)
    return rank_bytes.kv_values_per_token(model, whole_model(model)) * ITEM_BYTES


def _work(config: dict[str, Any]) -> ModelWorkload:
    return model_work(_model(config), item_bytes=ITEM_BYTES, kv_item_bytes=ITEM_BYTES)


def _model(config: dict[str, Any]) -> ModelConfig:
    return FAMILIES[config["architectures"][0]](config)
