"""Random weights of four and eight bits, made on the device as a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import torch

from benchmarks.gpu_kit.session import Session

if TYPE_CHECKING:
    from kernels.quantized_weight import QuantizedWeight

GROUP = 128  # columns that share a scale
FP8_BLOCK = 128
SCALE = 0.02

# The weight and its bytes; no weight where only the compiler runs: a CPU takes long to make one.
Built: TypeAlias = "tuple[QuantizedWeight | None, int]"


def int4(session: Session, shape: tuple[int, int]) -> Built:
    from kernels.transcode import Int4Part, int4_weight

    num_rows, width = shape
    if session.mode == "compile":
        return None, num_rows * width // 2
    words = session.random(num_rows, width // 8, dtype=torch.float32).view(torch.int32)
    scale = session.random(num_rows, -(-width // GROUP), scale=SCALE)
    weight = int4_weight([Int4Part(words, scale, None)], width, GROUP, torch.bfloat16)
    return weight, weight.num_bytes


def fp8(session: Session, shape: tuple[int, int]) -> Built:
    from kernels.transcode import Fp8Part, fp8_weight

    num_rows, width = shape
    if session.mode == "compile":
        return None, num_rows * width
    codes = session.random(num_rows, width, dtype=torch.float8_e4m3fn)
    blocks = -(-num_rows // FP8_BLOCK), -(-width // FP8_BLOCK)
    scale = session.random(*blocks, dtype=torch.float32, scale=SCALE)
    weight = fp8_weight([Fp8Part(codes, scale)], torch.bfloat16)
    return weight, weight.num_bytes


BUILDS: dict[str, Callable[[Session, tuple[int, int]], Built]] = {
    "int4_products": int4,
    "fp8_products": fp8,
}
