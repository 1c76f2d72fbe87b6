"""Compiles a model's CPU kernels, and warns if torch must be used instead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Event, Thread

import structlog

from kernels.ops import CompilePlan, QuantizedKind, cpu_host
from shared.engine.model_config.formats import (
    Awq,
    Fp8Block,
    Fp8Rows,
    Gptq,
    Int4,
    Int8,
    Mxfp4,
    Packed,
    WeightFormat,
)
from shared.engine.model_config.model_config import ModelConfig
from shared.kv_layout import FP8, KvLayout

log = structlog.get_logger(__name__)

CLOSE_TIMEOUT_S = 1.0
_BLOCK = 32
# A part of each GEMM -> its name where the checkpoint has it as one.
_PARTS = {
    "self_attn.q_proj": "self_attn.qkv_proj",
    "self_attn.o_proj": "self_attn.o_proj",
    "mlp.gate_proj": "mlp.gate_up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
_SCALES = {"BF16": "", "F16": "-halves", "F32": "-floats"}
_EXPERTS = {f"mlp.experts.0.{part}": f"mlp.experts.0.{part}" for part in ("gate_proj", "down_proj")}


def import_kernels() -> None:
    """Imports numba and the kernels, for workers that are forked from this process. Neither
    compiles nor loads machine code, and starts no thread.
    """
    cpu_host()


def compile_plan(
    config: ModelConfig, dtype: str, kv_layout: KvLayout, *, is_compressed: bool
) -> CompilePlan:
    """Returns the properties that a model's machine code depends on. `dtype` is that
    of activations.
    """
    widths = (
        config.hidden_size,
        config.intermediate_size,
        config.num_heads * config.head_dim,
        config.num_kv_heads * config.head_dim,
    )
    has_layer_kernel = (
        cpu_host().has_gemm(dtype)
        and config.latent is None
        and kv_layout.dtype != FP8
        and all(width % _BLOCK == 0 for width in widths)
        and not (config.has_output_bias or config.has_mlp_bias)
        and not all(layer.moe for layer in config.layers)
    )
    return cpu_host().compile_plan(
        dtype=dtype,
        head_dim=kv_layout.state.row[2],
        block_size=kv_layout.block_size,
        is_compressed=is_compressed,
        is_blocked=has_layer_kernel,
        has_gelu=config.activation != "silu",
        quantized=_quantized_kinds(config, dtype, _PARTS),
        quantized_experts=_quantized_kinds(config, dtype, _EXPERTS),
        has_experts=config.has_experts,
        has_latents=config.latent is not None,
        has_clamped_gates=config.moe is not None and config.moe.clamped_gate is not None,
        has_fp8_kv=kv_layout.dtype == FP8,
    )


def _quantized_kinds(
    config: ModelConfig, dtype: str, paths: Mapping[str, str]
) -> tuple[QuantizedKind, ...]:
    """Returns the kinds of the last layer: the first ones of some models differ."""
    formats = config.layers[-1].formats
    if formats is None or dtype != "bfloat16":
        return ()
    is_fused = config.has_fused_projections
    return tuple(
        _quantized_kind(formats.of(fused if is_fused else part)) for part, fused in paths.items()
    )


def _quantized_kind(form: WeightFormat | None) -> QuantizedKind:
    match form:
        case None:
            return "dense"
        case Fp8Block():
            return "fp8"
        case Mxfp4():
            return "e2m1"
        case Fp8Rows(scale_dtype=scale):
            return f"e4m3{_SCALES[scale]}"
        case Awq(scale_dtype=scale):
            return f"int4-zeros{_SCALES[scale]}"
        case Int4() | Packed() | Int8() | Gptq():
            num_bits = getattr(form, "num_bits", 8 if isinstance(form, Int8) else 4)
            zeros = "" if form.is_symmetric else "-zeros"
            return f"int{num_bits}{zeros}{_SCALES[form.scale_dtype]}"


def compile_kernels(plan: CompilePlan) -> None:
    """Returns once they are compiled. On failure it logs a warning, and torch is used instead."""
    failure = cpu_host().compile_ahead(plan)
    if failure is not None:
        log.warning("cpu_kernels_unavailable", reason=failure, backend="torch")


def load_kernels(plan: CompilePlan, run: Callable[[], None]) -> None:
    """Calls `run`, whose steps load all machine code and compile what `compile_kernels` did not.

    One process of a host does so at a time until one has; later ones find the code, and wait for
    no process that compiles another model's.
    """
    if has_run(plan):
        run()
        return
    with cpu_host().compile_lock():
        run()
    with suppress(OSError):
        plan.marker("steps").touch()


def has_run(plan: CompilePlan) -> bool:
    """Whether a process of this host has run steps, so that all their machine code is cached."""
    return plan.marker("steps").exists()


class RowKernels:
    """Compiles kernels for long prompts in the background, during steps; `close` cancels."""

    def __init__(self, plan: CompilePlan) -> None:
        self._is_closed = Event()
        self._thread = Thread(
            target=cpu_host().compile_rows,
            args=(plan, self._is_wanted),
            name="compile-rows",
            daemon=True,
        )

    def start(self) -> None:
        self._thread.start()

    async def close(self) -> None:
        """Waits for the end of the child that compiles: it would outlive this process."""
        self._is_closed.set()
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    def _is_wanted(self) -> bool:
        return not self._is_closed.is_set()
