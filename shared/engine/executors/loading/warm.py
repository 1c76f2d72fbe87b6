"""Compiles a model's CPU kernels without loading it."""

from __future__ import annotations

from pathlib import Path

import torch

from kernels.ops import cpu_host
from shared.engine.executors.loading.cpu_kernels import compile_plan
from shared.engine.executors.loading.model_loading import kv_layout_of, resolve_dtype
from shared.engine.kv.kv_dtype import resolve_kv_dtype
from shared.engine.models.checkpoint_config import read_config
from shared.engine.weights.weight_form import uses_compressed
from shared.errors import ConfigError

_CPU = torch.device("cpu")


def compile_model(
    model_dir: Path, *, dtype: str, kv_dtype: str, weights: str, block_size: int, has_rows: bool
) -> None:
    """Compiles a model's machine code, and returns once it is cached.

    If `has_rows`, kernels that only long prompts use are included. Raises CheckpointError, and
    ConfigError for a bad option or a host that cannot compile.
    """
    config = read_config(model_dir)
    dtype = resolve_dtype(dtype, _CPU)
    kv_layout = kv_layout_of(config, resolve_kv_dtype(kv_dtype, dtype, config, _CPU), block_size)
    is_compressed = uses_compressed(weights, model_dir, _CPU)
    plan = compile_plan(config, dtype, kv_layout, is_compressed=is_compressed)
    failure = cpu_host().compile_ahead(plan)
    if failure is not None:
        raise ConfigError(f"CPU kernels cannot be compiled here: {failure}")
    if has_rows:
        cpu_host().compile_rows(plan, lambda: True)
